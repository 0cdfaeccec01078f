"""Batches in prime-rl's wire type.

Invariants:
- A file is one list of micro-batches, each a list of values in the order of
  `pinned.MICRO_BATCH_FIELDS`; the optional ones at the end are empty.
- Every per-token list of a micro-batch has one entry per token.
- The first token of every packed sequence is masked: nothing precedes it.
- The bytes equal those that prime-rl's own encoder makes of the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgpack

from rl.learner.prime.pinned import MICRO_BATCH_FIELDS

# Statistics over there are kept per environment; "all" is taken by the total.
ENVIRONMENT = "terminal"


@dataclass(frozen=True)
class WireSequence:
    """One sequence with what its loss needs, one entry per token."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]  # 0 where not trained on
    inference_logprobs: list[float]  # after temperature, nats; 0 where not trained on


@dataclass
class MicroBatch:
    """Sequences of one forward pass, one after the other."""

    input_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[bool] = field(default_factory=list[bool])
    advantages: list[float] = field(default_factory=list[float])
    inference_logprobs: list[float] = field(default_factory=list[float])
    position_ids: list[int] = field(default_factory=list[int])
    sequence_lengths: list[int] = field(default_factory=list[int])
    temperatures: list[float] = field(default_factory=list[float])
    env_names: list[str] = field(default_factory=list[str])
    seq_lens: list[int] = field(default_factory=list[int])

    @property
    def tokens(self) -> int:
        """Tokens in it."""
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(self.loss_mask)

    def add(self, sequence: WireSequence, temperature: float) -> None:
        """Append `sequence`, sampled at `temperature`."""
        length = len(sequence.input_ids)
        self.input_ids.extend(sequence.input_ids)
        self.loss_mask.extend([False, *sequence.loss_mask[1:]])
        self.advantages.extend(sequence.advantages)
        self.inference_logprobs.extend(sequence.inference_logprobs)
        self.position_ids.extend(range(length))
        self.sequence_lengths.append(length)
        self.temperatures.extend([temperature] * length)
        self.env_names.extend([ENVIRONMENT] * length)
        self.seq_lens.append(length)

    def silent(self) -> MicroBatch:
        """The same forward pass without anything to train on.

        Every rank takes part in every pass, so a rank with fewer gets such ones.
        """
        return MicroBatch(
            self.input_ids,
            [False] * self.tokens,
            [0.0] * self.tokens,
            self.inference_logprobs,
            self.position_ids,
            self.sequence_lengths,
            self.temperatures,
            self.env_names,
            self.seq_lens,
        )

    def values(self) -> list[object]:
        """Its values in the wire type's order."""
        given: list[object] = [
            self.input_ids,
            self.loss_mask,
            self.advantages,
            self.inference_logprobs,
            self.position_ids,
            self.sequence_lengths,
            self.temperatures,
            self.env_names,
            self.seq_lens,
        ]
        return given + [None] * (len(MICRO_BATCH_FIELDS) - len(given))


def encode(batches: Sequence[MicroBatch]) -> bytes:
    """The content of one rank's file."""
    return cast(bytes, msgpack.packb([batch.values() for batch in batches]))


def distribute(
    sequences: Sequence[WireSequence], budget: int, ranks: int, temperature: float
) -> list[list[MicroBatch]]:
    """Micro-batches for each rank, as many for one as for another.

    First fit by descending length; then the fullest goes to the rank with the
    least work.

    Args:
        sequences: none longer than `budget`.
        budget: tokens per micro-batch.
        ranks: data-parallel ranks.
        temperature: of sampling.
    """
    bins: list[MicroBatch] = []
    for sequence in sorted(sequences, key=lambda one: -len(one.input_ids)):
        length = len(sequence.input_ids)
        fitting = next((batch for batch in bins if batch.tokens + length <= budget), None)
        if fitting is None:
            fitting = MicroBatch()
            bins.append(fitting)
        fitting.add(sequence, temperature)
    bins.sort(key=lambda batch: -batch.tokens)
    if bins:
        bins.extend([bins[-1].silent()] * (-len(bins) % ranks))
    each = len(bins) // ranks
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for batch in bins:
        open_shares = [share for share in shares if len(share) < each]
        min(open_shares, key=lambda share: sum(one.tokens for one in share)).append(batch)
    return shares
