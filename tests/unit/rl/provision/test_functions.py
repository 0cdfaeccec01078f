"""What each function is given, and which values are refused before Modal sees them."""

from __future__ import annotations

from typing import Any

import pytest

from rl.errors import ConfigurationError
from rl.provision.functions import campaign_functions, functions, smoke_overrides
from tests.support.modal_rented import configured

EVERY = ("prepare_account", "final_train", "heldout_worker", "final_continue")


def test_the_watchdog_of_nine_hours_lies_inside_the_functions_550_minutes() -> None:
    config = configured()
    assert config.limits.watchdog_s == 9 * 3600
    by_name = {spec.name: spec for spec in functions(config, EVERY)}
    assert by_name["final_train"].timeout_s == by_name["heldout_worker"].timeout_s == 550 * 60
    assert by_name["final_continue"].timeout_s == 2 * 550 * 60 + 1800


@pytest.mark.parametrize(
    ("steps", "concurrency"), [(0, 16), (3, 16), (10, 32), (1, 8), (2, 128), (2, 17)]
)
def test_the_short_run_takes_no_other_values(steps: int, concurrency: int) -> None:
    with pytest.raises(ConfigurationError, match="is not one of"):
        smoke_overrides(steps, concurrency)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("concurrency", [16, 32])
def test_the_short_run_has_two_gpus(steps: int, concurrency: int) -> None:
    given = {key.replace(".", "__"): v for key, v in smoke_overrides(steps, concurrency).items()}
    config = configured("smoke", **given)
    (spec,) = functions(config, ("train",))
    assert (spec.gpu, spec.max_containers) == ("H100!:2", 1)
    assert (config.schedule.updates, config.episodes.concurrency) == (steps, concurrency)


def test_the_short_run_refuses_a_configuration_of_more_gpus() -> None:
    with pytest.raises(ConfigurationError, match="has 2 GPUs, and this configuration asks for 3"):
        functions(configured("smoke"), ("train",))


def test_several_machines_have_all_their_gpus() -> None:
    config = configured(modal__nodes=2, engine__replicas=14, heldout__shards=14)
    assert campaign_functions(config)[0] == "final_cluster"
    (spec,) = functions(config, ("final_cluster",))
    assert (spec.gpu, spec.nodes, spec.max_containers) == ("H100!:8", 2, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine__replicas": 8}, "9 GPUs are more than 8"),
        ({"resources__replica_gpus": 0.5}, "0.5 GPUs can't be rented"),
        ({"limits__function_bound_s": 90_000.0}, "at most 24 h"),
        ({"modal__nodes": 2, "engine__replicas": 16}, "17 GPUs are more than 16"),
        ({"modal__nodes": 2, "engine__replicas": 7}, "16 GPUs would be paid for, and 8 are used"),
    ],
)
def test_what_modal_would_not_check_is_refused(changes: dict[str, Any], told: str) -> None:
    config = configured(**changes)
    with pytest.raises(ConfigurationError, match=told):
        functions(config, campaign_functions(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"modal__base_image": "python:3.12-slim-bookworm"},
        {"modal__base_image": "python@sha256:" + "0" * 63},
        {"modal__gpu": "h100 please"},
        {"modal__memory_gib": 96_000},
        {"modal__workspace": ""},
        {"modal__secrets": ["one", "one"]},
        {"modal__state_volume": "terminal-rl-models"},
        {"modal__unheard_of": 1},
        {"limits__function_bound_s": 32_000.0},
    ],
)
def test_a_wrong_table_is_refused_when_it_is_read(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        configured(**changes)
