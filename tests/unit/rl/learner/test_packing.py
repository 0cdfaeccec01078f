from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import EngineError, EvidenceError
from rl.learner.packing import MicroBatch, pack, training_sequences
from rl.records import EpisodeRecord, Failure, Sample
from tests.unit.rl.learner.tiny_policy import make_episode, make_group, random_group


def context_of(batch: MicroBatch, source: int) -> tuple[int, ...]:
    """The tokens that the position `source` sees, itself included."""
    ends = [segment.end for segment in batch.segments for _ in range(segment.start, segment.stop)]
    return tuple(
        int(token)
        for place, (token, end) in enumerate(zip(batch.token_ids, ends, strict=True))
        if place <= source < end
    )


def predictions(batch: MicroBatch) -> list[tuple[tuple[int, ...], int, float]]:
    """(context, target, sampler logprob) of everything the batch predicts."""
    return [
        (context_of(batch, int(source)), int(target), float(logprob))
        for source, target, logprob in zip(
            batch.sources, batch.targets, batch.sampler_logprobs, strict=True
        )
    ]


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    head = draw(st.lists(st.integers(0, 5), max_size=30))
    made: list[Sample] = []
    for index in range(draw(st.integers(2, 6))):
        tail = draw(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12))
        sampled = [False] * len(head) + [bit for _, bit in tail]
        made.append(
            Sample(
                token_ids=head + [t for t, _ in tail],
                sampled=sampled,
                # powers of two: exact in float32, and they tell the samples apart
                logprobs=[-(2.0**-index) - t if bit else 0.0 for t, bit in enumerate(sampled)],
            )
        )
    return made


@settings(max_examples=200, deadline=None)
@given(samples(), st.integers(1, 120), st.booleans())
def test_every_sampled_token_is_predicted_exactly_once_from_its_own_context(drawn, budget, share):
    group = make_group([make_episode([s], float(i % 2), index=i) for i, s in enumerate(drawn)])
    batches = pack(training_sequences(group, "mean"), budget, share)
    wanted = Counter(
        (tuple(s.token_ids[:t]), s.token_ids[t], s.logprobs[t])
        for s in drawn
        for t in range(1, len(s.token_ids))
        if s.sampled[t]
    )
    assert Counter(p for batch in batches for p in predictions(batch)) == wanted
    for batch in batches:
        alone = sum(segment.depth == 0 for segment in batch.segments) == len(batch.segments) == 1
        assert batch.computed_tokens <= budget or alone


def test_the_common_prompt_is_kept_once_and_nothing_is_padded():
    sequences = training_sequences(random_group("g", 1), "mean")
    tails = [len(sequence.inputs) - 24 for sequence in sequences]
    (batch,) = pack(sequences, 8192, share_prefix=True)
    assert batch.computed_tokens == 24 + sum(tails)
    assert int(batch.position_ids.max()) == 24 + max(tails) - 1
    (plain,) = pack(sequences, 8192, share_prefix=False)
    assert plain.computed_tokens == 4 * 24 + sum(tails)


def test_what_follows_the_last_sampled_token_is_not_computed():
    sample = Sample(
        token_ids=[1, 2, 3, 4, 5],
        sampled=[False, True, True, False, False],
        logprobs=[0, -1, -1, 0, 0],
    )
    group = make_group([make_episode([sample], 1.0), make_episode([sample], 0.0, index=1)])
    (batch,) = pack(training_sequences(group, "mean"), 100, share_prefix=True)
    assert batch.token_ids.tolist() == [1, 2]
    assert batch.targets.tolist() == [2, 3, 2, 3]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_branches_of_one_attempt_stay_together_under_a_small_budget():
    def sample(*runs: int) -> Sample:
        ids = [token for token in runs for _ in range(20)]
        return Sample(token_ids=ids, sampled=[t >= 20 for t in range(len(ids))], logprobs=[-1] * 60)

    group = make_group(
        [
            make_episode([sample(0, 1, 2), sample(0, 1, 3)], 1.0),
            make_episode([sample(0, 4, 5), sample(0, 4, 6)], 0.0, index=1),
        ]
    )
    batches = pack(training_sequences(group, "mean"), 80, share_prefix=True)
    assert [batch.computed_tokens for batch in batches] == [78, 78]
    assert [len(batch.segments) for batch in batches] == [3, 3]


def test_rows_that_share_nothing_are_sorted_by_length_for_a_budget_with_padding():
    sequences = training_sequences(random_group("g", 3), "mean")
    lengths = sorted(len(sequence.inputs) for sequence in sequences)
    (batch,) = pack(sequences, 4 * lengths[-1], share_prefix=False)
    assert [segment.stop - segment.start for segment in batch.segments] == lengths
    assert len(pack(sequences, 4 * lengths[-1] - 1, share_prefix=False)) == 2


def test_both_samples_of_a_compacted_episode_carry_its_advantage():
    halves = [
        Sample(token_ids=[1, 2, n], sampled=[False, True, True], logprobs=[0, -1, -1])
        for n in (3, 4)
    ]
    group = make_group([make_episode(halves, 1.0), make_episode([halves[0]], 0.0, index=1)])
    assert [s.advantage for s in training_sequences(group, "mean")] == [0.5, 0.5, -0.5]


def test_a_skipped_attempt_still_counts_in_the_advantages():
    group = random_group("g", 1)
    whole = training_sequences(group, "mean")
    assert training_sequences(group, "mean", skip={"g-0", "g-3"}) == whole[1:3]


def test_a_masked_episode_is_refused():
    good = make_episode([], 1.0)
    failure = Failure(kind="SandboxError", message="gone")
    masked = EpisodeRecord.model_validate(
        good.model_dump() | {"outcome": "masked", "reward": None, "failure": failure.model_dump()}
    )
    with pytest.raises(EvidenceError, match="masked"):
        training_sequences(make_group([good, masked]), "mean")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_a_sampler_logprob_that_is_none_is_refused(value):
    sample = Sample(token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, value])
    group = make_group([make_episode([sample], 1.0), make_episode([sample], 0.0, index=1)])
    with pytest.raises(EngineError, match="logprob"):
        training_sequences(group, "mean")


def test_a_logprob_on_a_token_that_was_not_sampled_is_never_looked_at():
    sample = Sample(
        token_ids=[1, 2, 3], sampled=[False, True, False], logprobs=[0, -1, float("nan")]
    )
    group = make_group([make_episode([sample], 1.0), make_episode([sample], 0.0, index=1)])
    (batch,) = pack(training_sequences(group, "mean"), 100, share_prefix=True)
    assert torch.isfinite(batch.sampler_logprobs).all()
