"""A group's sequences divided among the ranks that share an update.

Invariants:
- Every sequence is in exactly one share, so every sampled token is trained on once.
- A share is a run of neighbours in the token tree of all, so ranks compute little
  twice: what opens the sequences of two shares, and nothing else.
- The largest share, which all ranks wait for, is the smallest that such runs allow.
- The shares are a function of the sequences and the number of ranks alone: every rank
  finds the same ones by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rl.learner.packing import TrainingSequence
from rl.learner.tree import common_length


def shares(
    sequences: Sequence[TrainingSequence], ranks: int, *, shared: bool
) -> list[list[TrainingSequence]]:
    """One list for each rank, some of them empty if there are few sequences.

    Args:
        sequences: in any order.
        ranks: at least 1.
        shared: whether what a rank's sequences have in common is computed once.
    """
    if ranks == 1:
        return [list(sequences)]
    ranked = sorted(sequences, key=lambda sequence: sequence.inputs)
    lengths = [len(sequence.inputs) for sequence in ranked]
    common = [0] * len(ranked)  # with the one before it
    if shared:
        common[1:] = [common_length(a.inputs, b.inputs) for a, b in pairwise(ranked)]
    least, most = max(lengths, default=0), sum(lengths)
    while least < most:
        middle = (least + most) // 2
        if len(_runs(lengths, common, middle)) <= ranks:
            most = middle
        else:
            least = middle + 1
    runs = _runs(lengths, common, least)
    divided = [ranked[start:stop] for start, stop in runs]
    return divided + [[] for _ in range(ranks - len(divided))]


def _runs(lengths: list[int], common: list[int], most: int) -> list[tuple[int, int]]:
    """The fewest runs that compute at most `most` tokens each; no length exceeds it."""
    runs: list[tuple[int, int]] = []
    start = size = 0
    for index, length in enumerate(lengths):
        more = length - common[index]
        if index > start and size + more > most:
            runs.append((start, index))
            start, size, more = index, 0, length
        elif index == start:
            more = length
        size += more
    return [*runs, (start, len(lengths))] if lengths else []
