"""Attempts worked on before their group is complete, against whole groups at once."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import EngineError, EvidenceError, StalenessViolation
from rl.learner import head, losses
from rl.learner.packing import MicroBatch
from rl.learner.peft_learner import NonFiniteError, PeftLearner
from rl.learner.policy import TokenScores
from rl.learner.state import LearnerState
from rl.records import EpisodeRecord, Group, Sample, UpdateMetrics
from tests.unit.rl.learner.tiny_policy import (
    VOCABULARY,
    gradients,
    make_config,
    make_episode,
    make_group,
    trained,
)

# Rounding of fp32 sums made in another order, as a share of each weight's gradient.
TOLERANCE = 1e-5
KINDS = ["mean", "mean_std"]
LOSSES: dict[str, dict[str, Any]] = {
    "trust_region": {
        "name": "trust_region",
        "clip_low": 0.02,
        "clip_high": 0.005,
        "kl_weight": 0.1,
    },
    "trust_region_without_kl": {
        "name": "trust_region",
        "clip_low": 0.02,
        "clip_high": 0.005,
        "kl_weight": 0.0,
    },
    "ppo_clip": {"name": "ppo_clip"},
    "importance_sampling": {"name": "importance_sampling"},
    "cispo": {"name": "cispo"},
    "icepop": {"name": "icepop", "clip_low": 0.9, "clip_high": 2.0},
    "tis": {"name": "tis"},
    "gspo": {"name": "gspo"},
    "gspo_wide": {"name": "gspo", "clip_low": 0.3, "clip_high": 0.3},
}
NORMALISATIONS: list[dict[str, Any]] = [
    {"normalisation": "tokens"},
    {"normalisation": "sequences"},
    {"normalisation": "constant", "normaliser_constant": 17.0},
]
BINARY: list[list[float]] = [[0, 1, 0, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0], [1, 1, 1]]
# Of the last three, the signs assumed for 1 and for 0 are wrong.
OTHER: list[list[float]] = [
    [0, 0.5, 1, 0.25],
    [-0.5, 2, 0, 1, 1],
    [0.3, 0.3],
    [1, 2, 2, 1],
    [0, -1, 0, -2],
    [0, 1, 9],
]


@pytest.fixture(scope="module")
def learner(model_dir: Path) -> PeftLearner:
    """At version 1, so that both LoRA factors have gradients."""
    return trained(model_dir, 1)


def prepare(
    learner: PeftLearner, loss: str, kind: str = "mean", budget: int = 8192, **values: Any
) -> None:
    """Make the learner one of this objective, with nothing accumulated."""
    learner._config = make_config(
        loss=LOSSES[loss] | {"advantage": kind} | values, micro_batch_tokens=budget
    )
    learner.discard()


def rewarded_group(
    group_id: str, seed: int, rewards: Sequence[float], version: int = 1, prompt: int = 24
) -> Group:
    """Attempts at one prompt whose sampler differed much from the policy, both ways."""
    draw = random.Random(seed)
    head = [draw.randrange(VOCABULARY) for _ in range(prompt)]
    episodes: list[EpisodeRecord] = []
    for index, reward in enumerate(rewards):
        samples: list[Sample] = []
        for _ in range(draw.choice([1, 1, 2])):
            length = draw.randrange(1, 12)
            sampled = [draw.random() < 0.8 for _ in range(length)]
            logprobs = [draw.uniform(-8, -0.5) if bit else 0.0 for bit in sampled]
            samples.append(
                Sample(
                    token_ids=head + [draw.randrange(VOCABULARY) for _ in range(length)],
                    sampled=[False] * prompt + sampled,
                    logprobs=[0.0] * prompt + logprobs,
                )
            )
        episodes.append(make_episode(samples, reward, group_id, index, version))
    # A token of which something is learned in any case.
    sure = Sample(token_ids=[*head, 1], sampled=[False] * prompt + [True], logprobs=[0.0] * 25)
    first = episodes[0].model_copy(update={"samples": [*episodes[0].samples, sure]})
    return make_group([first, *episodes[1:]])


def weights(learner: PeftLearner) -> list[torch.Tensor]:
    """Copies of the adapter's weights."""
    return [weight.detach().clone() for weight in learner._policy.parameters]


def figures(learner: PeftLearner) -> dict[str, Any]:
    """The metrics of what was accumulated, without what the work took."""
    took = {"seconds", "computed_tokens"}
    flat: dict[str, Any] = {}
    for name, value in learner._tally.metrics(2, 0.0, 0.0).model_dump(exclude=took).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name} {part}": figure for part, figure in parts}
    return flat


def assert_same_gradients(
    found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert len(found) == len(wanted)
    for gradient, other in zip(found, wanted, strict=True):
        error = float((gradient - other).norm())
        assert error <= tolerance * float(other.norm())


def assert_bit_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def at_once(learner: PeftLearner, groups: list[Group]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradients and figures of whole groups."""
    learner.discard()
    for group in groups:
        learner.accumulate(2, group)
    result = gradients(learner), figures(learner)
    learner.discard()
    return result


@dataclass
class Plan:
    """Groups, the early calls made for each, and the order of all that happens.

    Each time a group stands in `order` its next call is made; the last time, it is
    accumulated.
    """

    groups: list[Group]
    calls: list[list[list[EpisodeRecord]]]
    order: list[int]

    def run(self, learner: PeftLearner, update: int = 2) -> None:
        left = [list(calls) for calls in self.calls]
        for index in self.order:
            group = self.groups[index]
            if left[index]:
                learner.accumulate_attempts(update, group.group_id, left[index].pop(0))
            else:
                learner.accumulate(update, group)


@st.composite
def plans(draw: st.DrawFn, rewards: list[list[float]] | None = None) -> Plan:
    pool = rewards if rewards is not None else BINARY + OTHER
    plan = Plan([], [], [])
    for index in range(draw(st.integers(1, 3))):
        group = rewarded_group(
            f"g{index}",
            draw(st.integers(0, 10**6)),
            draw(st.sampled_from(pool)),
            draw(st.integers(0, 1)),
        )
        calls: list[list[EpisodeRecord]] = [[], [], []]
        for episode in draw(st.permutations(group.episodes)):
            calls[draw(st.integers(0, 2))].append(episode)
        plan.groups.append(group)
        plan.calls.append(calls[: draw(st.integers(0, 3))])  # the other attempts are late
        plan.order += [index] * (len(plan.calls[index]) + 1)
    plan.order = draw(st.permutations(plan.order))
    return plan


each_loss = pytest.mark.parametrize("loss", LOSSES)
each_kind = pytest.mark.parametrize("kind", KINDS)
# The same examples always: one in some millions of tokens is clipped or not by its rounding.
on_one_learner = settings(max_examples=10, deadline=None, derandomize=True)


@each_loss
@each_kind
@on_one_learner
@given(
    plan=plans(), budget=st.sampled_from([8192, 80, 1]), division=st.sampled_from(NORMALISATIONS)
)
def test_any_mix_of_early_attempts_and_whole_groups_equals_the_one_shot_batch(
    learner, loss, kind, plan, budget, division
):
    prepare(learner, loss, kind, budget, **division)
    wanted, wanted_figures = at_once(learner, plan.groups)
    plan.run(learner)
    assert_same_gradients(gradients(learner), wanted)
    assert figures(learner) == pytest.approx(wanted_figures, rel=TOLERANCE, abs=1e-6)


@each_loss
@each_kind
def test_the_gradient_is_right_where_clipping_acts_on_both_signs(learner, loss, kind):
    prepare(learner, loss, kind)
    group = rewarded_group("g", 3, [0, 1, 1, 0, 1, 0])
    wanted, wanted_figures = at_once(learner, [group])
    assert learner.accumulate_attempts(2, "g", group.episodes[:4]) == 4
    clipped = {
        part.reward: int(part.loss(learner._config.trainer.loss, sign).clipped.sum())
        for part, sign in zip(learner._early["g"].scored, (-1.0, 1.0), strict=True)
    }
    if loss != "importance_sampling":
        assert min(clipped.values()) >= 3
    learner.accumulate(2, group)
    assert_same_gradients(gradients(learner), wanted)
    assert figures(learner) == pytest.approx(wanted_figures, rel=TOLERANCE)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_recomputed_activations_serve_both_passes(model_dir, monkeypatch, checkpointing):
    monkeypatch.setattr(head, "HEAD_CHUNK", 4)  # so that the head works in parts
    loss = LOSSES["trust_region"]
    config = make_config(loss=loss, gradient_checkpointing=checkpointing)
    other = trained(model_dir, 1, PeftLearner(config, model_dir))
    group = rewarded_group("g", 8, [0, 1, 1, 0])
    wanted, _ = at_once(other, [group])
    other.accumulate_attempts(2, "g", group.episodes)
    other.accumulate(2, group)
    assert_same_gradients(gradients(other), wanted)


@each_loss
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_without_variance_leaves_what_it_leaves_anyway(learner, loss, reward):
    prepare(learner, loss)
    group = rewarded_group("g", 4, [reward] * 4)
    wanted, wanted_figures = at_once(learner, [group])
    assert bool(wanted) == (loss == "trust_region")  # the others vanish without advantage
    assert learner.accumulate_attempts(2, "g", group.episodes[:3]) == 3
    learner.accumulate(2, group)
    assert_same_gradients(gradients(learner), wanted)
    assert figures(learner) == pytest.approx(wanted_figures, rel=TOLERANCE)


@each_loss
def test_a_dropped_group_leaves_no_trace(learner, loss):
    prepare(learner, loss)
    kept, gone = rewarded_group("kept", 1, [0, 1, 1]), rewarded_group("gone", 2, [1, 0, 1])
    results = []
    for with_gone in (False, True):
        learner.accumulate_attempts(2, "kept", kept.episodes[:1])
        if with_gone:
            learner.accumulate_attempts(2, "gone", gone.episodes[:2])
        learner.accumulate_attempts(2, "kept", kept.episodes[1:2])
        if with_gone:
            learner.accumulate_attempts(2, "gone", gone.episodes[2:])
            learner.drop("gone")
        learner.accumulate(2, kept)
        assert not learner._early
        results.append((gradients(learner), figures(learner)))
        learner.discard()
    (found, found_figures), (wanted, wanted_figures) = results
    assert_bit_equal(found, wanted)
    assert found_figures == wanted_figures


def test_dropping_a_group_without_early_work_does_nothing(learner):
    prepare(learner, "ppo_clip")
    learner.accumulate(2, rewarded_group("g", 1, [0, 1]))
    before = gradients(learner)
    learner.drop("g")
    learner.drop("never seen")
    assert_bit_equal(gradients(learner), before)
    assert learner._tally.groups == {"g"}


@pytest.mark.parametrize("loss", ["trust_region", "ppo_clip"])
@pytest.mark.parametrize("rewards", [[1, 2, 2, 1], [0, -1, 0, -2]])
def test_after_a_wrong_assumption_the_group_is_computed_in_the_ordinary_way(learner, loss, rewards):
    prepare(learner, loss)
    group = rewarded_group("g", 5, rewards)
    wanted, wanted_figures = at_once(learner, [group])
    assert learner.accumulate_attempts(2, "g", group.episodes) == 2
    learner.accumulate(2, group)
    assert_bit_equal(gradients(learner), wanted)
    assert figures(learner) == wanted_figures


def test_only_an_attempt_whose_sign_is_known_is_worked_on(learner):
    group = rewarded_group("g", 6, [0, 0.5, 1, -3])
    for loss, count in (("trust_region", 2), ("ppo_clip", 2), ("importance_sampling", 4)):
        prepare(learner, loss)
        assert learner.accumulate_attempts(2, "g", group.episodes) == count
    prepare(learner, "ppo_clip")
    assert learner.accumulate_attempts(2, "g", group.episodes[1:2]) == 0
    assert learner.accumulate_attempts(2, "g", []) == 0
    assert not learner._early


def test_a_loss_of_any_form_is_never_worked_on_early(learner, monkeypatch):
    prepare(learner, "ppo_clip")
    other = replace(losses._OBJECTIVES["ppo_clip"], form="other")
    monkeypatch.setitem(losses._OBJECTIVES, "ppo_clip", other)
    group = rewarded_group("g", 6, [0, 1])
    assert learner.accumulate_attempts(2, "g", group.episodes) == 0
    assert not learner._early


@pytest.mark.parametrize(
    ("loss", "rewards"),
    [
        ("trust_region", [0, 1, 1, 0, 1]),
        ("trust_region", [1, 1, 1, 1, 1]),
        ("importance_sampling", [0.2, 3, -1, 7, 0]),
    ],
)
def test_what_was_worked_on_early_is_not_computed_again(learner, monkeypatch, loss, rewards):
    prepare(learner, loss)
    group = rewarded_group("g", 3, rewards)
    learner.accumulate_attempts(2, "g", group.episodes[:2])
    learner.accumulate_attempts(2, "g", group.episodes[2:3])
    scores, computed = learner._policy.scores, []

    def counting(batch: MicroBatch, temperature: float) -> TokenScores:
        computed.append(batch.targets.numel())
        return scores(batch, temperature)

    monkeypatch.setattr(learner._policy, "scores", counting)
    learner.accumulate(2, group)
    late = [sample for episode in group.episodes[3:] for sample in episode.samples]
    assert sum(computed) == sum(sample.sampled_tokens for sample in late)


def test_the_common_prompt_of_a_call_is_computed_once(learner):
    prepare(learner, "trust_region")
    group = rewarded_group("g", 7, [1, 1, 1, 0])
    learner.accumulate_attempts(2, "g", group.episodes[:3])
    (part,) = learner._early["g"].scored
    samples = [sample for episode in group.episodes[:3] for sample in episode.samples]
    # Nothing is computed from a sequence's last sampled token on.
    ends = [max(t for t, bit in enumerate(s.sampled) if bit) for s in samples if any(s.sampled)]
    assert part.computed_tokens == 24 + sum(end - 24 for end in ends)


def test_memory_is_one_buffer_per_reward_and_one_for_the_rest(learner):
    group = rewarded_group("g", 7, [1, 0, 1, 0, 1, 1])
    for loss, rest in (("trust_region", 1), ("ppo_clip", 0)):
        prepare(learner, loss)
        for episode in group.episodes:
            learner.accumulate_attempts(2, "g", [episode])
        work = learner._early["g"]
        buffers = [*work.slopes.values(), *([work.offset] if work.offset else [])]
        assert len(buffers) == 2 + rest
        shapes = [weight.shape for weight in learner._policy.parameters]
        assert all([tensor.shape for tensor in buffer] == shapes for buffer in buffers)
        kept = [tensor for buffer in buffers for tensor in buffer]
        for part in work.scored:
            kept += [part.logprobs, part.sampler_logprobs, part.entropy]
        assert not any(tensor.requires_grad for tensor in kept)


@pytest.fixture(scope="module")
def stepping(model_dir: Path) -> tuple[PeftLearner, LearnerState]:
    """A learner for tests that step, and the state at version 1 to begin them with."""
    learner = trained(model_dir, 1)
    return learner, learner.state()


@each_loss
@each_kind
def test_the_step_after_early_work_gives_the_same_weights(stepping, loss, kind):
    learner, state = stepping
    groups = [rewarded_group(f"g{i}", 20 + i, rewards) for i, rewards in enumerate(BINARY[:3])]
    ends: list[tuple[list[torch.Tensor], UpdateMetrics]] = []
    for early in (0, 2):
        learner.load_state(state)
        prepare(learner, loss, kind)
        for group in groups:
            learner.accumulate_attempts(2, group.group_id, group.episodes[:early])
        for group in groups:
            learner.accumulate(2, group)
        metrics = learner.step(2, ["g2", "g0", "g1"])
        ends.append((weights(learner), metrics))
    (wanted, wanted_metrics), (found, metrics) = ends
    learner.load_state(state)
    for weight, other, start in zip(found, wanted, weights(learner), strict=True):
        # Adam divides each element by its size, and so makes steps of the rounding in elements
        # that are nearly 0: how large they are in all depends on the machine's kernels.
        assert float((weight - other).norm()) <= 100 * TOLERANCE * float((other - start).norm())
    assert metrics.grad_norm == pytest.approx(wanted_metrics.grad_norm, rel=TOLERANCE)
    assert metrics.seconds > 0


def test_a_step_with_other_groups_than_named_is_refused_and_nothing_changes(stepping):
    learner, state = stepping
    learner.load_state(state)
    prepare(learner, "trust_region")
    for name in ("a", "b"):
        learner.accumulate(2, rewarded_group(name, 1, [0, 1]))
    before = gradients(learner), figures(learner), learner.export()
    for named in (["a"], ["a", "b", "c"], ["a", "c"], ["a", "b", "b"], []):
        with pytest.raises(EvidenceError, match="were accumulated"):
            learner.step(2, named)
    assert_bit_equal(gradients(learner), before[0])
    assert (figures(learner), learner.export()) == before[1:]
    assert learner.step(2, ("b", "a")).update == 2


def test_a_step_is_refused_while_an_incomplete_group_has_early_work(stepping):
    learner, state = stepping
    learner.load_state(state)
    prepare(learner, "trust_region")
    learner.accumulate(2, rewarded_group("a", 1, [0, 1]))
    group = rewarded_group("b", 2, [0, 1])
    learner.accumulate_attempts(2, "b", group.episodes[:1])
    before = gradients(learner)
    for named in (None, ["a"]):
        with pytest.raises(EvidenceError, match="never accumulated"):
            learner.step(2, named)
    assert_bit_equal(gradients(learner), before)
    learner.drop("b")
    assert learner.step(2, ["a"]).episodes == 2


def test_an_attempt_is_worked_on_only_once(learner):
    prepare(learner, "ppo_clip")
    first, second, third = rewarded_group("g", 1, [0, 1, 1]).episodes
    learner.accumulate_attempts(2, "g", [first])
    with pytest.raises(EvidenceError, match="worked on already"):
        learner.accumulate_attempts(2, "g", [second, first])
    with pytest.raises(EvidenceError, match="more than once"):
        learner.accumulate_attempts(2, "g", [third, third])
    assert set(learner._early["g"].digests) == {first.attempt_id}
    twice = make_group([first, second, second])
    with pytest.raises(EvidenceError, match="more than once"):
        learner.accumulate(2, twice)


def test_early_work_is_refused_as_a_whole_group_would_be(learner):
    prepare(learner, "ppo_clip")
    group = rewarded_group("g", 1, [0, 1, 1])
    first, second, third = group.episodes
    for update, version in ((1, 0), (3, 1), (2, 2)):
        other = first.model_copy(update={"version": version})
        with pytest.raises(StalenessViolation):
            learner.accumulate_attempts(update, "g", [other])
    with pytest.raises(EvidenceError, match="another group"):
        learner.accumulate_attempts(2, "h", [first])
    lost = first.model_copy(update={"outcome": "cancelled", "reward": None})
    with pytest.raises(EvidenceError, match="cancelled"):
        learner.accumulate_attempts(2, "g", [second, lost])
    assert not learner._early
    learner.accumulate_attempts(2, "g", [first])
    with pytest.raises(StalenessViolation, match="holds episodes of"):
        learner.accumulate_attempts(2, "g", [second, third.model_copy(update={"version": 0})])
    learner.accumulate(2, group)
    with pytest.raises(EvidenceError, match="accumulated already"):
        learner.accumulate_attempts(2, "g", [second])


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_a_sampler_logprob_that_is_none_is_refused_before_any_work(learner, reward):
    prepare(learner, "ppo_clip")
    good, _ = rewarded_group("g", 1, [0, 1]).episodes
    sample = Sample(token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, math.nan])
    bad = make_episode([sample], reward, "g", 7, version=1)
    with pytest.raises(EngineError, match="logprob"):
        learner.accumulate_attempts(2, "g", [good, bad])
    assert not learner._early


def test_a_group_without_its_early_attempts_or_with_changed_ones_is_refused(learner):
    prepare(learner, "ppo_clip")
    group = rewarded_group("g", 1, [0, 1, 1])
    first, second, third = group.episodes
    learner.accumulate_attempts(2, "g", [first])
    for episodes in (
        [second, third],
        [first.model_copy(update={"reward": 1.0}), second, third],
        [first.model_copy(update={"samples": second.samples}), second, third],
    ):
        with pytest.raises(EvidenceError, match="worked on early"):
            learner.accumulate(2, make_group(episodes))
    assert not gradients(learner)
    learner.accumulate(2, group)
    assert gradients(learner)


def test_a_record_equals_itself_after_a_journey_though_it_holds_a_nan(learner):
    prepare(learner, "ppo_clip")
    group = rewarded_group("g", 1, [0, 1])
    sample = Sample(
        token_ids=[1, 2, 3], sampled=[False, True, False], logprobs=[0.0, -1.0, math.nan]
    )
    odd = make_episode([sample], 1.0, "g", 7, version=1)
    learner.accumulate_attempts(2, "g", [odd])
    travelled = pickle.loads(pickle.dumps(odd))
    assert travelled != odd
    learner.accumulate(2, make_group([*group.episodes, travelled]))
    assert not learner._early


def test_a_non_finite_loss_in_early_work_drops_the_update(learner, monkeypatch):
    prepare(learner, "trust_region")
    groups = [rewarded_group(name, seed, [0, 1]) for seed, name in enumerate("abc")]
    learner.accumulate(2, groups[0])
    learner.accumulate_attempts(2, "b", groups[1].episodes[:1])
    scores = learner._policy.scores
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="nan"):
        patch.setattr(learner._policy, "scores", lambda b, t: scores(b, t * math.nan))
        learner.accumulate_attempts(2, "c", groups[2].episodes[:1])
    assert not gradients(learner)
    assert not learner._early
    assert not learner._tally.groups
    wanted, _ = at_once(learner, groups)
    for group in groups:
        learner.accumulate(2, group)
    assert_bit_equal(gradients(learner), wanted)


def test_early_work_that_breaks_off_is_done_again_with_the_group(learner, monkeypatch):
    prepare(learner, "trust_region", budget=1)
    group = rewarded_group("g", 9, [0, 1, 1, 0])
    wanted, wanted_figures = at_once(learner, [group])
    learner.accumulate_attempts(2, "g", group.episodes[:1])
    scores, calls = learner._policy.scores, iter([True, False])

    def failing(batch: MicroBatch, temperature: float) -> TokenScores:
        if next(calls):
            return scores(batch, temperature)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(learner._policy, "scores", failing)
        learner.accumulate_attempts(2, "g", group.episodes[1:3])
    learner.accumulate(2, group)
    assert_bit_equal(gradients(learner), wanted)
    assert figures(learner) == wanted_figures


def test_a_state_is_refused_while_there_is_early_work_and_discarding_clears_it(learner):
    prepare(learner, "ppo_clip")
    learner.accumulate_attempts(2, "g", rewarded_group("g", 1, [0, 1]).episodes[:1])
    with pytest.raises(EvidenceError, match="accumulated already"):
        learner.state()
    learner.discard()
    assert not learner._early
    assert learner.state().adapter.version == 1
