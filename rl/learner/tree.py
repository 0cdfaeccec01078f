"""The token tree of several sequences, laid out in one row without padding.

Invariants:
- Every sequence is a path from a root: the tokens of its segments, in order, are the
  sequence. Sequences with a long enough run in common share its segment.
- Segments stand in preorder: behind a segment come all that continue it, directly or
  not, then the rest. So position k is seen by position q, that is, it is the same
  token or an earlier one of the same sequence, exactly where k <= q < ends[k]; `ends`
  is where the last segment that continues k's ends.
- A position's number is its place in its sequences, the same in all that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Below this many shared tokens a branch costs more than it saves.
SHORTEST_SHARED = 16


@dataclass(frozen=True)
class Segment:
    """A run of tokens without a branch."""

    start: int  # in the row
    stop: int
    end: int  # where the last segment that continues this one stops; `stop` if none does
    depth: int  # how many tokens come before it in its sequences


@dataclass(frozen=True)
class Tree:
    """The layout of one row."""

    token_ids: list[int]
    segments: tuple[Segment, ...]
    paths: list[list[int]]  # for each sequence its segments, from the root

    def places(self, sequence: int) -> list[int]:
        """Where each token of a sequence stands in the row."""
        spans = [self.segments[index] for index in self.paths[sequence]]
        return [place for span in spans for place in range(span.start, span.stop)]

    def positions(self) -> list[int]:
        """Each token's place in its sequences, along the row."""
        return [
            segment.depth + offset
            for segment in self.segments
            for offset in range(segment.stop - segment.start)
        ]


@dataclass
class _Run:
    """A segment while its end isn't known."""

    start: int
    stop: int
    depth: int
    parent: int  # -1: it opens its sequences


def plant(sequences: Sequence[list[int]], shortest: int = SHORTEST_SHARED) -> Tree:
    """The tree of `sequences`, none of which is empty.

    Args:
        sequences: token ids, in any order.
        shortest: tokens from which on a common run is shared.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    ranked = [sequences[index] for index in order]
    common = [common_length(*pair) for pair in pairwise(ranked)]
    token_ids: list[int] = []
    runs: list[_Run] = []
    paths: list[list[int]] = [[] for _ in sequences]
    # Neighbours in sorted order with the same first `depth` tokens, laid out so far.
    waiting: list[tuple[int, int, int, list[int]]] = [(0, len(ranked), 0, [])]
    while waiting:
        low, high, depth, path = waiting.pop()
        limit = min(common[low : high - 1], default=len(ranked[low]))
        alike = limit == len(ranked[high - 1])  # none of them goes on
        ends_here = limit == len(ranked[low])  # then sharing makes no segment more
        if limit > depth and (ends_here or limit - depth >= shortest):
            runs.append(
                _Run(
                    start=len(token_ids),
                    stop=len(token_ids) + limit - depth,
                    depth=depth,
                    parent=path[-1] if path else -1,
                )
            )
            token_ids.extend(ranked[low][depth:limit])
            depth, path = limit, [*path, len(runs) - 1]
        if alike:
            for index in range(low, high):
                paths[order[index]] = path
            continue
        cuts = [low, *(i + 1 for i in range(low, high - 1) if common[i] == limit), high]
        # The last one is laid out first.
        waiting.extend((a, b, depth, path) for a, b in reversed([*pairwise(cuts)]))
    return Tree(token_ids, _finished(runs), paths)


def unshared(sequences: Sequence[list[int]]) -> Tree:
    """`sequences` one behind another, in the given order, with nothing shared."""
    segments: list[Segment] = []
    token_ids: list[int] = []
    for sequence in sequences:
        start = len(token_ids)
        token_ids.extend(sequence)
        segments.append(Segment(start, len(token_ids), len(token_ids), 0))
    return Tree(token_ids, tuple(segments), [[index] for index in range(len(segments))])


def _finished(runs: list[_Run]) -> tuple[Segment, ...]:
    ends = [run.stop for run in runs]
    for index in range(len(runs) - 1, -1, -1):
        parent = runs[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return tuple(
        Segment(run.start, run.stop, end, run.depth) for run, end in zip(runs, ends, strict=True)
    )


def common_length(a: list[int], b: list[int]) -> int:
    """How many tokens `a` and `b` begin with alike."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
