"""What prime-rl is handed: the wire type, and how sequences become micro-batches."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner.prime.pinned import MICRO_BATCH_FIELDS
from rl.learner.prime.wire import MicroBatch, WireSequence, distribute, encode


def sequence(length: int, first: int = 1) -> WireSequence:
    return WireSequence(
        input_ids=[first + position for position in range(length)],
        loss_mask=[True] * length,
        advantages=[0.5] * length,
        inference_logprobs=[-1.5] * length,
    )


def micro_batch(*lengths: int) -> MicroBatch:
    batch = MicroBatch()
    for length in lengths:
        batch.add(sequence(length), 0.7)
    return batch


def test_a_micro_batch_travels_by_position() -> None:
    (values,) = msgpack.unpackb(encode([micro_batch(3, 2)]))
    named: dict[str, Any] = dict(zip(MICRO_BATCH_FIELDS, values, strict=True))
    assert {name: value for name, value in named.items() if value is not None} == {
        "input_ids": [1, 2, 3, 1, 2],
        "loss_mask": [False, True, True, False, True],
        "advantages": [0.5] * 5,
        "inference_logprobs": [-1.5] * 5,
        "position_ids": [0, 1, 2, 0, 1],
        "sequence_lengths": [3, 2],
        "temperatures": [0.7] * 5,
        "env_names": ["terminal"] * 5,
        "seq_lens": [3, 2],
    }


def test_a_silent_batch_has_nothing_to_train_on() -> None:
    batch = micro_batch(4)
    silent = batch.silent()
    assert silent.loss_tokens == 0
    assert set(silent.advantages) == {0.0}
    assert silent.input_ids == batch.input_ids
    assert batch.loss_tokens == 3


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=24),
    ranks=st.integers(1, 5),
)
def test_every_rank_gets_as_many_and_no_sequence_is_lost(lengths: list[int], ranks: int) -> None:
    sequences = [sequence(length, first=100 * index) for index, length in enumerate(lengths)]
    shares = distribute(sequences, budget=32, ranks=ranks, temperature=1.0)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert all(batch.tokens <= 32 for batch in batches)
    trained = [batch for batch in batches if batch.loss_tokens]
    found = sorted(length for batch in trained for length in batch.sequence_lengths)
    assert found == sorted(lengths)
    assert sum(batch.loss_tokens for batch in batches) == sum(n - 1 for n in lengths)


def test_work_is_spread_over_ranks() -> None:
    shares = distribute([sequence(n) for n in (32, 30, 20, 18)], 32, ranks=2, temperature=1.0)
    assert sorted(sum(batch.tokens for batch in share) for share in shares) == [50, 50]


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_gives_every_rank_nothing(ranks: int) -> None:
    assert distribute([], 32, ranks, 1.0) == [[] for _ in range(ranks)]
