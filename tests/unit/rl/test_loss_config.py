from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from rl.loss_config import KNOB_NAMES, KNOBS, LossConfig, LossName


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        LossConfig(**values)
    return str(caught.value)


@pytest.mark.parametrize("name", get_args(LossName))
def test_a_loss_has_its_own_defaults_and_no_other_knob(name):
    config = LossConfig(name=name)
    assert config.knobs == KNOBS[name]
    for knob in KNOB_NAMES:
        assert getattr(config, knob) == KNOBS[name].get(knob)
        if knob in KNOBS[name]:
            assert LossConfig.model_validate({"name": name, knob: 0.125}).knobs[knob] == 0.125
        else:
            assert f"{name} has no {knob}" in refusal(**{"name": name, knob: 0.125})


def test_the_defaults_are_those_of_the_sources():
    assert LossConfig() == LossConfig(
        name="trust_region", clip_low=0.2, clip_high=0.2, kl_weight=1e-3, normalisation="tokens"
    )
    assert LossConfig(name="ppo_clip").knobs == {"clip_low": 0.2, "clip_high": 0.2}
    assert LossConfig(name="cispo").knobs == {"ratio_cap": 5}
    assert LossConfig(name="tis").knobs == {"ratio_cap": 2}
    assert LossConfig(name="icepop").knobs == {"clip_low": 0.2, "clip_high": 0.2}
    assert LossConfig(name="gspo").knobs == {"clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize("name", get_args(LossName))
def test_a_default_is_frozen_as_if_it_had_been_given(name):
    implicit = LossConfig(name=name)
    assert LossConfig.model_validate({"name": name, **KNOBS[name]}) == implicit
    assert LossConfig.model_validate(implicit.model_dump(mode="json")) == implicit
    assert LossConfig.model_validate({"name": name, **dict.fromkeys(KNOB_NAMES)}) == implicit


def test_a_refused_knob_says_which_there_are():
    message = refusal(name="cispo", clip_low=0.1, kl_weight=0.1)
    assert "cispo has no clip_low or kl_weight: its knobs are ratio_cap" in message
    assert "it has no knobs" in refusal(name="importance_sampling", clip_low=0.1)


def test_the_constant_is_given_exactly_when_it_is_divided_by():
    for values in ({"normalisation": "constant"}, {"normaliser_constant": 5.0}):
        assert "normaliser_constant is given exactly when" in refusal(**values)
    config = LossConfig(normalisation="constant", normaliser_constant=5.0)
    assert config.normaliser(tokens=100, sequences=7) == 5
    assert LossConfig().normaliser(tokens=100, sequences=7) == 100
    assert LossConfig(normalisation="sequences").normaliser(tokens=100, sequences=7) == 7


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"name": "grpo"}, "name"),
        ({"name": ["tis"]}, "name"),
        ({"name": 3}, "name"),
        ({"normalisation": "groups"}, "normalisation"),
        ({"normalisation": "constant", "normaliser_constant": 0.0}, "normaliser_constant"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"name": "tis", "ratio_cap": float("inf")}, "ratio_cap"),
        ({"clip_mid": None}, "clip_mid"),
    ],
)
def test_a_wrong_value_is_named(values, key):
    assert key in refusal(**values)
