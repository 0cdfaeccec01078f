"""prime-rl's configuration is ours, said in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigurationError
from rl.learner.prime.settings import first_difference, native_config, prime, ranks, token_budget
from rl.learner.rate import learning_rate
from tests.support.prime_config import prime_campaign
from tests.unit.rl.learner.tiny_policy import make_config


def native(resume_step: int = 0, **trainer: Any) -> dict[str, Any]:
    return native_config(prime_campaign(**trainer), Path("/model"), Path("/out"), resume_step)


def test_what_decides_learning_is_written_out() -> None:
    found = native()
    assert found["loss"] == {
        "type": "default",
        "dppo_mask_low": 0.2,
        "dppo_mask_high": 0.2,
        "adv_tau": 1.0,
        "kl_tau": 1e-3,
    }
    assert found["optim"]["lr"] == 1e-2
    assert (found["optim"]["betas1"], found["optim"]["betas2"]) == (0.9, 0.99)
    assert found["optim"]["max_norm"] == 1.0
    assert found["model"]["lora"]["rank"] == 4
    assert found["model"]["name"] == "/model"
    assert found["model"]["seq_len"] == 64
    assert found["rollout_transport"] == found["weight_broadcast"] == {"type": "filesystem"}


def test_it_never_ends_by_itself_and_checkpoints_every_step() -> None:
    found = native()
    assert found["max_steps"] is None
    assert found["ckpt"] == {"interval": 1, "keep_last": None, "keep_interval": None}


def test_it_resumes_from_the_step_that_is_named() -> None:
    assert native()["resume"] is None
    assert native(3)["resume"] == {"step": 3}


def theirs(scheduler: dict[str, Any], peak: float, update: int) -> float:
    """The rate of prime-rl's update: PyTorch's LinearLR, whose first step is its start."""
    if scheduler["type"] == "constant":
        return peak
    steps = scheduler["warmup_steps"]
    start = scheduler["min_lr"] / peak
    return peak * (start + (1 - start) * min(update - 1, steps) / steps)


@pytest.mark.parametrize("warmup", [0, 1, 2, 3, 10])
def test_both_backends_warm_up_alike(warmup: int) -> None:
    scheduler = native(optimizer={"lr": 1e-3, "warmup_updates": warmup})["scheduler"]
    for update in range(1, 14):
        wanted = learning_rate(1e-3, warmup, update)
        assert theirs(scheduler, 1e-3, update) == pytest.approx(wanted, rel=1e-12)


def test_a_sequence_that_an_engine_can_make_fits_in_a_micro_batch() -> None:
    assert token_budget(prime_campaign(micro_batch_tokens=16)) == 64


def test_ranks_are_the_trainers_gpus() -> None:
    assert ranks(prime_campaign(gpus=4.0)) == 4


@pytest.mark.parametrize(
    ("trainer", "gpus", "what"),
    [
        ({"device": "cpu"}, 1.0, "device = 'cuda' only"),
        ({"loss": {"name": "ppo_clip"}}, 1.0, "trust_region"),
        ({"loss": {"normalisation": "sequences"}}, 1.0, "normalisation = 'tokens'"),
        ({"optimizer": {"lr": 1e-3, "eps": 1e-6}}, 1.0, "eps = 1e-08"),
        ({"prime": None}, 1.0, "exactly when"),
        ({}, 0.5, "whole GPUs"),
        ({}, 0.0, "whole GPUs"),
    ],
)
def test_what_prime_rl_has_not_is_refused(trainer: dict[str, Any], gpus: float, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        prime_campaign(gpus=gpus, **trainer)


def test_its_section_is_refused_with_another_backend() -> None:
    with pytest.raises(ConfigurationError, match="exactly when"):
        make_config(prime={})
    with pytest.raises(ConfigurationError, match="another backend"):
        prime(make_config())


def test_a_difference_is_named_by_its_key() -> None:
    wanted = {"a": 1, "b": {"c": [1], "d": None}}
    assert first_difference(wanted, {"a": 1, "b": {"c": [1], "d": None, "e": 5}}) is None
    assert first_difference(wanted, {"a": 1, "b": {"c": [1]}}) == "b.d is missing"
    assert first_difference(wanted, {"a": 1, "b": {"c": [2], "d": None}}) == (
        "b.c is [2] instead of [1]"
    )
    assert first_difference({"b": {"c": 1}}, {"b": None}) == "b is None instead of {'c': 1}"
