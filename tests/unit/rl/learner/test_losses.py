from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config import LossConfig
from rl.learner.losses import (
    _FORMS,
    LOG_RATIO_LIMIT,
    advantage_form,
    advantages,
    importance_sampling,
    ppo_clip,
    token_loss,
    trust_region,
    vanishes_without_advantage,
)

POISON = [math.nan, math.inf, -math.inf, 1e89, -1e89]
NAMES = ["trust_region", "ppo_clip", "importance_sampling"]


def reference(name, logp, mu, adv, mask, low, high, kl):
    """(loss, d loss / d logp, clipped) of the definitions, one token at a time, float64."""
    total, gradient = 0.0, np.zeros(len(logp))
    clipped = np.zeros(len(logp), dtype=bool)
    for i in range(len(logp)):
        if not mask[i]:
            continue
        raw = logp[i] - mu[i]
        x = min(max(raw, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)
        slope = 1.0 if x == raw else 0.0
        r, a = math.exp(x), adv[i]
        if name == "importance_sampling":
            total -= r * a
            gradient[i] = -r * a * slope
        elif name == "ppo_clip":
            bounded = min(max(r, 1 - low), 1 + high)
            total -= min(r * a, bounded * a)
            clipped[i] = bounded * a < r * a
            gradient[i] = 0.0 if clipped[i] else -r * a * slope
        else:
            moved = math.exp(logp[i]) - math.exp(mu[i])
            clipped[i] = moved > high if a > 0 else moved < -low
            k = 0.0 if clipped[i] else 1.0
            total += -k * a * r + kl * x * x
            gradient[i] = (-k * a * r + 2 * kl * x) * slope
    return total, gradient, clipped


def evaluate(name, logp, mu, adv, mask, low=0.2, high=0.3, kl=0.05):
    config = LossConfig(name=name, clip_low=low, clip_high=high, kl_weight=kl)
    variable = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(x, dtype=torch.float64) for x in (mu, adv, mask)]
    result = token_loss(config, variable, *others)
    result.loss.backward()
    assert variable.grad is not None
    return float(result.loss.detach()), variable.grad.numpy(), result.clipped.numpy()


logprob = st.one_of(
    st.floats(-60, 0), st.floats(-0.5, 0), st.just(0.0), st.floats(-1e6, -1e3), st.just(-1e30)
)
token = st.tuples(logprob, logprob, st.floats(-3, 3), st.booleans())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(token, min_size=1, max_size=12))
def test_loss_and_gradient_equal_the_float64_reference(name, tokens):
    logp, mu, adv, mask = (list(column) for column in zip(*tokens, strict=True))
    loss, gradient, clipped = evaluate(name, logp, mu, adv, mask)
    wanted, wanted_gradient, wanted_clipped = reference(name, logp, mu, adv, mask, 0.2, 0.3, 0.05)
    np.testing.assert_allclose(loss, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(clipped, wanted_clipped)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", POISON)
def test_what_stands_on_a_masked_token_changes_no_bit(name, poison):
    logp, mu, adv = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], [0.5, -0.5, 1.0]
    mask = [1.0, 0.0, 1.0]
    clean = evaluate(name, logp, mu, adv, mask)
    for column in range(3):
        columns = [list(logp), list(mu), list(adv)]
        columns[column][1] = poison
        loss, gradient, clipped = evaluate(name, columns[0], columns[1], columns[2], mask)
        assert loss == clean[0]
        assert gradient.tobytes() == clean[1].tobytes()
        assert (clipped == clean[2]).all()
    assert clean[1][1] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_an_enormous_ratio_stays_finite_in_single_precision(name):
    logp = torch.tensor([0.0, -300.0], requires_grad=True)
    mu, adv = torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0])
    result = token_loss(LossConfig(name=name), logp, mu, adv, torch.ones(2))
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_trust_region_stops_pushing_only_in_the_advantage_s_direction():
    logp = torch.log(torch.tensor([0.9, 0.9, 0.1, 0.1]))
    mu = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    result = trust_region(
        logp,
        mu,
        torch.tensor([1.0, -1.0, 1.0, -1.0]),
        torch.ones(4),
        clip_low=0.2,
        clip_high=0.2,
        kl_weight=0.0,
    )
    assert result.clipped.tolist() == [True, False, False, True]


def test_on_policy_gradient_is_minus_the_advantage():
    adv = torch.tensor([0.5, -0.25])
    mu, mask = torch.tensor([-1.0, -2.0]), torch.ones(2)
    for result in (
        ppo_clip(logp := mu.clone().requires_grad_(), mu, adv, mask, clip_low=0.2, clip_high=0.2),
        importance_sampling(logp, mu, adv, mask),
    ):
        logp.grad = None
        result.loss.backward()
        assert logp.grad is not None
        assert torch.equal(logp.grad, -adv)


def test_only_objectives_without_a_kl_term_vanish_at_advantage_zero():
    assert not vanishes_without_advantage(LossConfig(name="trust_region"))
    assert vanishes_without_advantage(LossConfig(name="trust_region", kl_weight=0))
    assert vanishes_without_advantage(LossConfig(name="ppo_clip"))


def test_every_loss_declares_how_it_depends_on_the_advantage():
    assert set(_FORMS) == set(NAMES) == set(get_args(LossConfig.model_fields["name"].annotation))


def test_a_loss_that_declares_nothing_is_taken_to_be_of_any_form():
    config = LossConfig.model_construct(name="new", kl_weight=0.0)
    assert advantage_form(config) == "other"
    assert not vanishes_without_advantage(config)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8),
    size=st.floats(1e-3, 1e3),
    negative=st.booleans(),
)
def test_every_loss_is_of_the_form_that_it_declares(name, tokens, size, negative):
    logp, mu = (list(column) for column in zip(*tokens, strict=True))
    form = advantage_form(LossConfig(name=name))
    assert form != "other"
    sign = -1.0 if negative else 1.0
    unit = 1.0 if form == "linear" else sign
    found, at_unit, at_zero = (
        evaluate(name, logp, mu, [advantage] * len(logp), [1.0] * len(logp))
        for advantage in (size * sign, unit, 0.0)
    )
    for part in range(2):  # the loss, and its gradient
        slope = at_unit[part] - at_zero[part]
        wanted = at_zero[part] + size * sign * unit * slope
        np.testing.assert_allclose(found[part], wanted, rtol=1e-9, atol=1e-9 * size)
    if form == "linear_by_sign":
        assert (found[2] == at_unit[2]).all()


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=10))
def test_advantages_equal_the_numpy_reference(rewards):
    if len(set(rewards)) < 2:
        return
    centred = np.array(rewards) - np.mean(rewards)
    np.testing.assert_allclose(advantages(rewards, "mean"), centred, atol=1e-12)
    scaled = centred / (np.std(rewards) + 1e-6)
    np.testing.assert_allclose(advantages(rewards, "mean_std"), scaled, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e17])
def test_equal_rewards_give_exactly_zero(kind, reward):
    assert advantages([reward] * 7, kind) == [0.0] * 7
