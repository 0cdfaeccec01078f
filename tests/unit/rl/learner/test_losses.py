from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner import losses
from rl.learner.losses import (
    advantage_form,
    advantages,
    token_loss,
    vanishes_without_advantage,
)
from rl.loss_config import KNOBS, LossConfig, LossName
from tests.unit.rl.learner.loss_reference import WHOLE, reference

POISON = [math.nan, math.inf, -math.inf, 1e89, -1e89]
NAMES = list(KNOBS)
# No two alike, and none of 0, so that a knob in another's place is seen.
TEST_KNOBS = {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": 0.05, "ratio_cap": 1.7}
EXACT = 1e-9

each_name = pytest.mark.parametrize("name", NAMES)
each_sum = pytest.mark.parametrize("normalisation", ["tokens", "sequences"])


def knobs_of(name: str, own: bool) -> dict[str, float]:
    """The tests' knobs of an objective, or those it has by default."""
    return {} if own else {knob: TEST_KNOBS[knob] for knob in KNOBS[name]}


def configure(name: Any, **values: Any) -> LossConfig:
    return LossConfig(name=name, **values)


def evaluate(config, logp, mu, adv, mask, sequences=None):
    """(loss, d loss / d logprob, clipped) in float64."""
    variable = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    mu, adv, mask = (torch.tensor(x, dtype=torch.float64) for x in (mu, adv, mask))
    owners = torch.tensor(sequences or [0] * len(logp), dtype=torch.int64)
    result = token_loss(config, variable, mu, adv, mask, owners)
    result.loss.backward()
    assert variable.grad is not None
    return float(result.loss.detach()), variable.grad.numpy(), result.clipped.numpy()


def assert_equals_reference(config, logp, mu, adv, mask, sequences):
    found, gradient, clipped = evaluate(config, logp, mu, adv, mask, sequences)
    wanted = reference(
        config.name, config.normalisation, config.knobs, logp, mu, adv, mask, sequences
    )
    assert abs(found - wanted.loss) <= EXACT * max(1.0, wanted.size)
    error = np.abs(gradient - wanted.gradient)
    assert (error <= EXACT * np.maximum(1.0, wanted.gradient_size)).all()
    np.testing.assert_array_equal(clipped, wanted.clipped)


logprob = st.one_of(
    st.floats(-60, 0), st.floats(-0.5, 0), st.just(0.0), st.floats(-1e6, -1e3), st.just(-1e30)
)
# Where a clip, a cap or the clamp begins, a little to either side of it.
EDGES = [0.8, 1.2, 1.3, 1.7, 2.0, 5.0, 1 - 3e-4, 1 + 4e-4, math.exp(20), math.exp(-20)]


@st.composite
def at_a_ratio_s_edge(draw: st.DrawFn) -> tuple[float, float]:
    ratio = draw(st.sampled_from(EDGES)) * (1 + draw(st.sampled_from([-1e-7, 1e-7])))
    mu = draw(st.floats(-30, -21 if ratio > 10 else -2))
    return mu + math.log(ratio), mu


@st.composite
def at_a_probability_s_edge(draw: st.DrawFn) -> tuple[float, float]:
    moved = draw(st.sampled_from([0.2, 0.3])) * (1 + draw(st.sampled_from([-1e-7, 1e-7])))
    low = draw(st.floats(0.01, 0.6))
    high, low = math.log(low + moved), math.log(low)
    return (high, low) if draw(st.booleans()) else (low, high)


pair = st.one_of(st.tuples(logprob, logprob), at_a_ratio_s_edge(), at_a_probability_s_edge())
advantage = st.floats(-3, 3, allow_subnormal=False)
token = st.tuples(pair, advantage, st.booleans(), st.integers(0, 11))


def columns(tokens) -> list[list[Any]]:
    """logprobs, sampler's, advantages, mask, sequence ids below the number of tokens."""
    pairs, adv, mask, owners = zip(*tokens, strict=True)
    logp, mu = zip(*pairs, strict=True)
    return [list(logp), list(mu), list(adv), list(mask), [o % len(pairs) for o in owners]]


@each_name
@each_sum
@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(token, min_size=1, max_size=12), own=st.booleans())
def test_loss_and_gradient_equal_the_float64_reference(name, normalisation, tokens, own):
    config = configure(name, normalisation=normalisation, **knobs_of(name, own))
    assert_equals_reference(config, *columns(tokens))


@each_name
@each_sum
@pytest.mark.parametrize("seed", range(3))
def test_a_long_batch_equals_the_float64_reference(name, normalisation, seed):
    draw = np.random.default_rng(seed)
    mu = -draw.exponential(1.5, 400)
    logp = np.minimum(mu + draw.normal(0, 0.3, 400), 0.0)
    config = configure(name, normalisation=normalisation, **knobs_of(name, bool(seed)))
    assert_equals_reference(
        config,
        logp.tolist(),
        mu.tolist(),
        draw.normal(size=400).tolist(),
        (draw.random(400) < 0.8).tolist(),
        draw.integers(0, 23, 400).tolist(),
    )


@each_name
@each_sum
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("own", [True, False])
def test_what_stands_on_a_masked_token_changes_no_bit(name, normalisation, poison, own):
    config = configure(name, normalisation=normalisation, **knobs_of(name, own))
    clean = [-1.0, -2.0, -0.5, -0.7, -3.0], [-1.2, -1.5, -0.5, -0.8, -3.1], [0.5, -0.5, 1.0, -1, 2]
    mask = [1.0, 0.0, 1.0, 1.0, 0.0]
    owners = [0, 0, 2, 0, 1]  # the last one is alone in its sequence
    wanted = evaluate(config, clean[0], clean[1], clean[2], mask, owners)
    for masked in (1, 4):
        for column in range(3):
            values = [list(x) for x in clean]
            values[column][masked] = poison
            logp, mu, adv = values
            loss, gradient, clipped = evaluate(config, logp, mu, adv, mask, owners)
            assert loss == wanted[0]
            assert gradient.tobytes() == wanted[1].tobytes()
            assert (clipped == wanted[2]).all()
        assert wanted[1][masked] == 0.0
    assert math.isfinite(wanted[0])
    elsewhere = [0, 3, 2, 0, 2]
    assert evaluate(config, clean[0], clean[1], clean[2], mask, elsewhere)[0] == wanted[0]


@each_name
@each_sum
def test_a_batch_that_is_masked_throughout_has_no_loss_and_no_gradient(name, normalisation):
    config = configure(name, normalisation=normalisation)
    poison = [math.nan, math.inf]
    loss, gradient, clipped = evaluate(config, poison, poison, poison, [0.0, 0.0], [0, 1])
    assert loss == 0
    assert not gradient.any()
    assert not clipped.any()


@each_name
@each_sum
def test_an_enormous_ratio_stays_finite_in_single_precision(name, normalisation):
    logp = torch.tensor([0.0, -300.0], requires_grad=True)
    mu, adv = torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0])
    config = configure(name, normalisation=normalisation)
    for owners in ([0, 0], [0, 1]):
        result = token_loss(config, logp, mu, adv, torch.ones(2), torch.tensor(owners))
        logp.grad = None
        result.loss.backward()
        assert torch.isfinite(result.loss)
        assert logp.grad is not None
        assert torch.isfinite(logp.grad).all()


@each_name
@each_sum
@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(token, min_size=1, max_size=12), cut=st.integers(0, 12))
def test_sequences_apart_add_up_to_the_batch(name, normalisation, tokens, cut):
    config = configure(name, normalisation=normalisation, **knobs_of(name, own=False))
    logp, mu, adv, mask, owners = columns(tokens)
    whole = evaluate(config, logp, mu, adv, mask, owners)
    loss, gradient = 0.0, np.zeros(len(logp))
    for part in ([o for o in set(owners) if o < cut], [o for o in set(owners) if o >= cut]):
        places = [i for i, owner in enumerate(owners) if owner in part]
        if places:
            inside = [[column[i] for i in places] for column in (logp, mu, adv, mask)]
            renamed = [part.index(owners[i]) for i in places]
            found = evaluate(config, inside[0], inside[1], inside[2], inside[3], renamed)
            loss += found[0]
            gradient[places] = found[1]
    size = reference(name, normalisation, config.knobs, logp, mu, adv, mask, owners).size
    assert abs(loss - whole[0]) <= EXACT * max(1.0, size)
    np.testing.assert_allclose(gradient, whole[1], rtol=EXACT, atol=EXACT)


def test_the_sequences_of_a_result_are_those_with_an_unmasked_token():
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    zeros = torch.zeros(5)
    owners = torch.tensor([3, 1, 0, 3, 0])
    result = token_loss(LossConfig(), zeros, zeros, zeros, mask, owners)
    assert int(result.sequences) == 2


def test_a_sequence_s_mean_is_over_its_unmasked_tokens():
    zeros, owners = torch.zeros(5), torch.tensor([0, 0, 0, 1, 2])
    values = torch.tensor([1.0, 100.0, 3.0, 5.0, 7.0])
    tokens = losses._tokens(zeros, zeros, zeros, torch.tensor([1.0, 0, 1, 1, 0]), owners)
    means = tokens.sequence_means(values)
    assert means[tokens.mask].tolist() == [2, 2, 5]
    alone = losses._tokens(zeros, zeros, zeros, zeros, owners).sequence_means(values)
    assert torch.isfinite(alone).all()  # where no sequence has an unmasked token


@each_sum
def test_what_an_objective_says_of_a_masked_token_is_not_used(monkeypatch, normalisation):
    talkative = replace(
        losses._OBJECTIVES["importance_sampling"],
        terms=lambda t: losses.Terms(t.logprobs + 1, torch.ones_like(t.mask)),
    )
    monkeypatch.setitem(losses._OBJECTIVES, "importance_sampling", talkative)
    config = configure("importance_sampling", normalisation=normalisation)
    loss, gradient, clipped = evaluate(config, [-3.0] * 3, [-3.0] * 3, [1.0] * 3, [1.0, 0.0, 0.0])
    assert loss == -2
    assert gradient.tolist() == clipped.tolist() == [1, 0, 0]


def test_by_sequences_a_long_one_counts_as_much_as_a_short_one():
    logp, mu = [-1.0] * 4, [-1.0] * 4
    config = configure("importance_sampling", normalisation="sequences")
    loss, gradient, _ = evaluate(config, logp, mu, [3.0, 3.0, 3.0, 5.0], [1.0] * 4, [0, 0, 0, 1])
    assert loss == pytest.approx(-8)
    assert gradient == pytest.approx([-1, -1, -1, -5])


def test_trust_region_stops_pushing_only_in_the_advantage_s_direction():
    logp, mu = np.log([0.9, 0.9, 0.1, 0.1]), np.log([0.5, 0.5, 0.5, 0.5])
    _, gradient, clipped = evaluate(
        configure("trust_region", kl_weight=0), logp, mu, [1.0, -1.0, 1.0, -1.0], [1.0] * 4
    )
    assert clipped.tolist() == [True, False, False, True]
    assert (gradient == 0).tolist() == clipped.tolist()


def test_cispo_and_tis_push_every_token_and_icepop_only_those_in_its_band():
    logp, mu = [-1.0, -1.0, -3.0], [-3.0, -1.0, -1.0]
    ones = [1.0] * 3
    for name, cap in (("cispo", 5.0), ("tis", 2.0)):
        _, gradient, clipped = evaluate(configure(name), logp, mu, ones, ones)
        assert gradient == pytest.approx([-cap, -1, -math.exp(-2)])
        assert clipped.tolist() == [True, False, False]
    _, gradient, clipped = evaluate(configure("icepop"), logp, mu, ones, ones)
    assert gradient == pytest.approx([0, -1, 0])
    assert clipped.tolist() == [True, False, True]


def test_gspo_clips_a_sequence_as_a_whole_by_its_mean_log_ratio():
    """Tokens far from 1 that cancel are pushed, tokens that all moved a little are not."""
    mu = [-1.0, -1.0, -1.0, -1.0]
    logp = [-0.5, -1.5, -0.999, -0.999]
    _, gradient, clipped = evaluate(configure("gspo"), logp, mu, [1.0] * 4, [1.0] * 4, [0, 0, 1, 1])
    assert clipped.tolist() == [False, False, True, True]
    assert gradient == pytest.approx([-1, -1, 0, 0])


@each_name
def test_on_policy_gradient_is_minus_the_advantage(name):
    adv = torch.tensor([0.5, 0.5, -0.25])
    mu, owners = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0, 0, 1])
    logp = mu.clone().requires_grad_()
    token_loss(configure(name), logp, mu, adv, torch.ones(3), owners).loss.backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -adv)


def test_every_loss_has_a_name_knobs_a_declaration_and_a_reference():
    assert set(losses._OBJECTIVES) == set(get_args(LossName)) == set(KNOBS) == set(WHOLE)
    for name, objective in losses._OBJECTIVES.items():
        _, *knobs = inspect.signature(objective.terms).parameters
        assert knobs == list(KNOBS[name])
        assert objective.level is None or objective.level in knobs
        assert configure(name).knobs == KNOBS[name]


@each_name
def test_a_loss_vanishes_without_advantage_exactly_if_it_says_so(name):
    zero = {"kl_weight": 0.0} if "kl_weight" in KNOBS[name] else {}
    for config in (configure(name), configure(name, **zero)):
        _, gradient, _ = evaluate(config, [-1.0, -2.0], [-2.0, -1.0], [0.0, 0.0], [1.0, 1.0])
        assert vanishes_without_advantage(config) == (not gradient.any())
    assert vanishes_without_advantage(configure(name)) == (name != "trust_region")


def test_a_loss_of_any_form_says_so(monkeypatch):
    other = replace(losses._OBJECTIVES["tis"], form="other")
    monkeypatch.setitem(losses._OBJECTIVES, "tis", other)
    assert advantage_form(configure("tis")) == "other"


@each_name
@each_sum
@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.tuples(pair, st.integers(0, 7)), min_size=1, max_size=8),
    size=st.floats(1e-3, 1e3),
    negative=st.booleans(),
)
def test_every_loss_is_of_the_form_that_it_declares(name, normalisation, tokens, size, negative):
    config = configure(name, normalisation=normalisation, **knobs_of(name, own=False))
    pairs, owners = zip(*tokens, strict=True)
    logp, mu = (list(column) for column in zip(*pairs, strict=True))
    owners = [owner % len(logp) for owner in owners]
    form = advantage_form(config)
    assert form != "other"
    sign = -1.0 if negative else 1.0
    unit = 1.0 if form == "linear" else sign
    found, at_unit, at_zero = (
        evaluate(config, logp, mu, [advantage] * len(logp), [1.0] * len(logp), owners)
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
