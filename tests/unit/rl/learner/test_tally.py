"""An update's figures against their definitions, and what its gradient is divided by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner.losses import token_loss
from rl.learner.peft_learner import PeftLearner
from rl.learner.state import LearnerState
from rl.learner.tally import QUANTILES, Tally, merged, ratio_quantiles
from rl.loss_config import LossConfig
from rl.records import Group, Sample, UpdateMetrics
from tests.unit.rl.learner.tiny_policy import make_config, make_episode, make_group, trained

EXACT = 1e-12
PPO = LossConfig(name="ppo_clip")


def tokens_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Policy's logprobs, sampler's, advantages and entropies in float64."""
    draw = np.random.default_rng(seed)
    mu = -draw.exponential(1.5, count)
    return mu + draw.normal(0, 0.4, count), mu, draw.normal(size=count), draw.random(count)


def add(tally: Tally, part: Any, staleness: int = 0, owners: list[int] | None = None) -> None:
    logp, mu, adv, entropy = (torch.tensor(column) for column in part)
    sequences = torch.tensor(owners or [0] * len(logp))
    result = token_loss(tally.objective, logp, mu, adv, torch.ones_like(mu), sequences)
    tally.add_batch(staleness, 2 * len(logp), result, entropy)


def one_group(group_id: str = "g", rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    sample = Sample(token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, -1.0])
    return make_group([make_episode([sample], r, group_id, i) for i, r in enumerate(rewards)])


def metrics_of(parts: list[tuple[Any, int]], config: LossConfig = PPO) -> UpdateMetrics:
    tally = Tally(config)
    for part, staleness in parts:
        add(tally, part, staleness)
    tally.add_group(one_group(), 0)
    return tally.metrics(1, 0.5, 1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    staleness=st.integers(0, 3),
)
def test_figures_of_the_tokens_equal_their_definitions(seed, sizes, staleness):
    every = tokens_of(seed, sum(sizes))
    cuts = np.cumsum(sizes)[:-1]
    pieces = zip(*(np.split(column, cuts) for column in every), strict=True)
    parts = [(piece, staleness * (index % 2)) for index, piece in enumerate(pieces)]
    found = metrics_of(parts)
    logp, mu, adv, entropy = every
    ratio = np.exp(logp - mu)
    kl = ratio - 1 - np.log(ratio)
    of = np.concatenate([[s] * len(piece[0]) for piece, s in parts])
    clipped = np.where(adv > 0, ratio > 1.2, ratio < 0.8)
    surrogate = np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv)
    count = len(ratio)
    assert found.loss == pytest.approx(-surrogate.sum() / count, rel=EXACT, abs=EXACT)
    assert found.sampled_tokens == count
    assert found.sequences == len(sizes)
    assert found.computed_tokens == 2 * count
    assert found.mismatch_kl == pytest.approx(kl.mean(), rel=1e-9, abs=EXACT)
    assert found.mismatch_kl_by_staleness == {
        s: pytest.approx(kl[of == s].mean(), rel=1e-9, abs=EXACT) for s in set(of)
    }
    assert found.entropy == pytest.approx(entropy.mean(), rel=EXACT)
    assert found.clipped_fraction == clipped.mean()
    assert found.ratio_min == pytest.approx(ratio.min(), rel=EXACT)
    assert found.ratio_max == pytest.approx(ratio.max(), rel=EXACT)
    share = ratio.sum() ** 2 / np.square(ratio).sum() / count
    assert found.effective_sample_size == pytest.approx(share, rel=1e-9)
    ranked = np.sort(ratio)
    for name, quantile in QUANTILES.items():
        least = ranked[max(math.ceil(quantile * count - 1e-9), 1) - 1]
        assert found.ratio_quantiles[name] == pytest.approx(least, rel=1e-6)  # kept in float32


def test_quantiles_do_not_depend_on_how_the_tokens_were_divided():
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    wanted = ratio_quantiles([values])
    assert list(wanted) == ["p01", "p05", "p50", "p95", "p99"]
    assert wanted["p50"] == math.exp(float(values.sort().values[500]))
    shuffled = values[torch.randperm(1001, generator=torch.Generator().manual_seed(1))]
    assert ratio_quantiles(list(shuffled.split(97))) == wanted


def test_the_sample_is_whole_on_policy_and_shrinks_with_one_dominating_token():
    flat = (np.full(50, -1.0), np.full(50, -1.0), np.ones(50), np.ones(50))
    assert metrics_of([(flat, 0)]).effective_sample_size == pytest.approx(1)
    logp = flat[0].copy()
    logp[7] += 15
    skewed = metrics_of([((logp, *flat[1:]), 0)])
    assert skewed.effective_sample_size == pytest.approx(1 / 50, rel=1e-3)


def test_mismatch_at_staleness_0_is_told_apart_from_staleness():
    same = (np.full(9, -1.0), np.full(9, -1.0), np.ones(9), np.ones(9))
    moved = (np.full(3, -1.0), np.full(3, -1.5), np.ones(3), np.ones(3))
    found = metrics_of([(same, 0), (moved, 1)])
    kl = math.exp(0.5) - 1 - 0.5
    assert found.mismatch_kl_by_staleness == {0: 0, 1: pytest.approx(kl)}
    assert found.mismatch_kl == pytest.approx(kl / 4)


def test_tokens_are_counted_by_kind():
    bits = [False, False, True, True, False, True, False]
    one = Sample(token_ids=[1] * 7, sampled=bits, logprobs=[-1.0] * 7)
    opening = Sample(token_ids=[1, 2], sampled=[True, True], logprobs=[-1.0] * 2)
    silent = Sample(token_ids=[1] * 3, sampled=[False] * 3, logprobs=[0.0] * 3)
    tally = Tally(PPO)
    tally.add_group(make_group([make_episode([one, opening, silent], 1.0)]), 0)
    assert (tally.prompt_tokens, tally.tool_tokens, tally.total_tokens) == (2 + 0 + 3, 2, 12)


def test_groups_are_counted_with_their_staleness_and_variance():
    tally = Tally(PPO)
    add(tally, tokens_of(0, 5))
    tally.add_group(one_group("a", (1.0, 1.0, 1.0)), 1)
    tally.add_group(one_group("b", (0.0, 1.0)), 0)
    found = tally.metrics(1, 0.5, 1e-4)
    assert found.zero_variance_groups == 1
    assert found.staleness == {0: 2, 1: 3}
    assert found.reward_mean == pytest.approx(0.8)
    assert found.grad_norm == 0.5


@pytest.mark.parametrize(
    ("values", "divisor"),
    [
        ({}, 12),
        ({"normalisation": "sequences"}, 5),
        ({"normalisation": "constant", "normaliser_constant": 40.0}, 40),
    ],
)
def test_the_loss_is_divided_by_tokens_sequences_or_a_constant(values, divisor):
    tally = Tally(LossConfig(name="importance_sampling", **values))
    ones = [np.full(6, value) for value in (-1.0, -1.0, 1.0, 1.0)]
    add(tally, ones, owners=[0, 0, 0, 1, 1, 2])
    add(tally, ones, owners=[0, 0, 0, 0, 1, 1])
    assert tally.normaliser == divisor
    tally.add_group(one_group(), 0)
    summed = 5 if values.get("normalisation") == "sequences" else 12
    assert tally.metrics(1, 0.0, 0.0).loss == pytest.approx(-summed / divisor)


def test_a_row_of_an_older_campaign_is_still_read():
    row = metrics_of([(tokens_of(1, 4), 0)]).model_dump()
    for name, field in UpdateMetrics.model_fields.items():
        if "ot recorded" in (field.description or ""):
            del row[name]
    older = UpdateMetrics.model_validate(row)
    assert older.effective_sample_size is None
    assert older.ratio_quantiles == older.mismatch_kl_by_staleness == {}


@pytest.fixture(scope="module")
def start(model_dir: Path) -> tuple[PeftLearner, LearnerState]:
    """A learner, and its state at version 1, where both LoRA factors have gradients."""
    learner = trained(model_dir, 1)
    return learner, learner.state()


def step_of(
    start: tuple[PeftLearner, LearnerState], group: Group, loss: dict[str, Any]
) -> tuple[float, float]:
    """(gradient norm, loss) of a step with this group."""
    learner, state = start
    learner._config = make_config(loss={"name": "importance_sampling"} | loss)
    learner.load_state(state)
    learner.accumulate(2, group)
    metrics = learner.step(2)
    return metrics.grad_norm, metrics.loss


def sampled_group(lengths: list[int]) -> Group:
    """Attempts with so many loss tokens each, rewards alternating."""
    episodes = []
    for index, length in enumerate(lengths):
        tokens = [3, 5, *(7 * index + 11 * t + 1 for t in range(length))]
        sample = Sample(
            token_ids=[token % 64 for token in tokens],
            sampled=[False] * 2 + [True] * length,
            logprobs=[0.0] * 2 + [-2.0 - 0.1 * index] * length,
        )
        episodes.append(make_episode([sample], float(index % 2), "g", index, version=1))
    return make_group(episodes)


def test_the_step_s_gradient_is_divided_as_the_loss_is(start):
    even, uneven = sampled_group([3, 3, 3, 3]), sampled_group([2, 5, 1, 7])
    sequences = {"normalisation": "sequences"}
    # Sequences of one length weigh the same by token and by sequence.
    by_token = step_of(start, even, {})
    assert step_of(start, even, sequences) == pytest.approx(by_token, rel=1e-5)
    by_token = step_of(start, uneven, {})
    assert step_of(start, uneven, sequences) != pytest.approx(by_token, rel=1e-2)
    constant = {"normalisation": "constant", "normaliser_constant": 60.0}
    wanted = [value * 15 / 60 for value in by_token]
    assert step_of(start, uneven, constant) == pytest.approx(wanted, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
)
def test_figures_of_ranks_merge_into_those_of_one(seed, sizes, ranks):
    every = tokens_of(seed, sum(sizes))
    cuts = np.cumsum(sizes)[:-1]
    parts = [*zip(*(np.split(column, cuts) for column in every), strict=True)]
    alone, tallies = Tally(PPO), [Tally(PPO) for _ in range(ranks)]
    for index, part in enumerate(parts):
        add(alone, part, index % 2)
        add(tallies[index % ranks], part, index % 2)
    for tally in (alone, *tallies):
        tally.add_group(one_group(), 0)
    wanted = alone.metrics(1, 0.5, 1e-4).model_dump()
    found = merged(tallies, 0).metrics(1, 0.5, 1e-4).model_dump()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=EXACT), name
