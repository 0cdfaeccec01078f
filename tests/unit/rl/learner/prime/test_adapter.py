"""A broadcast adapter is checked to the last byte and given PEFT's names."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from rl.errors import TrainerError
from rl.learner.prime.adapter import CONFIG, WEIGHTS, read_broadcast, to_peft
from tests.support.prime_config import prime_campaign
from tests.support.prime_trainer_process import filled, safetensors

LAYER = "model.layers.0.self_attn.q_proj"


def tensors(rank: int = 4) -> dict[str, tuple[list[int], bytes]]:
    draw = random.Random(0)
    return {
        f"{LAYER}.lora_B.weight": filled([6, rank], draw, 1.0),
        f"{LAYER}.lora_A.weight": filled([rank, 8], draw, 1.0),
    }


def broadcast(weights: bytes | None = None, **settings: Any) -> dict[str, bytes]:
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "/somewhere/on/this/machine",
        "r": 4,
        "lora_alpha": 8.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "modules_to_save": None,
        **settings,
    }
    content = safetensors(tensors()) if weights is None else weights
    return {CONFIG: json.dumps(values).encode(), WEIGHTS: content}


def converted(files: dict[str, bytes]) -> dict[str, bytes]:
    return to_peft(files, prime_campaign(), "step_1")


def test_names_get_the_prefix_and_weights_stay() -> None:
    given = load(safetensors(tensors()))
    found = load(converted(broadcast())[WEIGHTS])
    assert set(found) == {f"base_model.model.{name}" for name in given}
    for name, weights in given.items():
        assert (found[f"base_model.model.{name}"] == weights).all()


def test_the_configuration_names_the_model_and_no_path() -> None:
    values = json.loads(converted(broadcast())[CONFIG])
    assert values["base_model_name_or_path"] == "tiny-llama"
    assert (values["r"], values["lora_alpha"]) == (4, 8.0)
    assert values["target_modules"] == ["q_proj"]


def test_equal_weights_give_equal_bytes() -> None:
    turned = dict(sorted(tensors().items()))
    first, second = converted(broadcast()), converted(broadcast(safetensors(turned)))
    assert first[CONFIG] == second[CONFIG]
    assert load(first[WEIGHTS]).keys() == load(second[WEIGHTS]).keys()
    assert converted(broadcast()) == first


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_torn_file_is_refused(share: float) -> None:
    whole = safetensors(tensors())
    with pytest.raises(TrainerError, match="out of contract"):
        converted(broadcast(whole[: int(share * len(whole))]))


def test_a_file_with_bytes_too_many_is_refused() -> None:
    with pytest.raises(TrainerError, match="bytes of weights"):
        converted(broadcast(safetensors(tensors()) + b"\0"))


def test_a_half_pair_is_refused() -> None:
    one = dict(list(tensors().items())[:1])
    with pytest.raises(TrainerError, match="has A None"):
        converted(broadcast(safetensors(one)))


def test_another_rank_is_refused() -> None:
    with pytest.raises(TrainerError, match="at rank 4"):
        converted(broadcast(safetensors(tensors(rank=2))))


def test_no_adapter_at_all_is_refused() -> None:
    with pytest.raises(TrainerError, match="no layer"):
        converted(broadcast(safetensors({})))


def test_names_that_have_the_prefix_already_are_refused() -> None:
    renamed = {f"base_model.model.{name}": value for name, value in tensors().items()}
    with pytest.raises(TrainerError, match="no name of an adapter"):
        converted(broadcast(safetensors(renamed)))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"r": 8}, "r is 8 instead of 4"),
        ({"lora_alpha": 16.0}, "lora_alpha is 16.0"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
    ],
)
def test_another_adapters_configuration_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(TrainerError, match=what):
        converted(broadcast(**settings))


@pytest.mark.parametrize("content", [b"", b"[]", b"{torn"])
def test_a_torn_configuration_is_refused(content: bytes) -> None:
    with pytest.raises(TrainerError, match="no JSON object"):
        converted({**broadcast(), CONFIG: content})


def test_a_broadcast_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="can't be read") as caught:
        read_broadcast(tmp_path)
    assert str(tmp_path) in caught.value.where
