"""The order in which tasks are drawn: seeded, endless, balanced over families.

Invariants:
- Draw `n` is a pure function of (families, seed, n): a resumed campaign draws
  what the undisturbed one would have drawn.
- Every task is drawn once per epoch, and any window of draws as long as there
  are families holds each family about once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache


class TaskOrder:
    """Maps a draw number to a task index.

    Args:
        families: the family of each task, by task index.
        seed: the campaign's seed.
    """

    def __init__(self, families: Sequence[str], seed: int) -> None:
        if not families:
            raise ValueError("no tasks to draw from")
        self._families = tuple(families)
        self._seed = seed
        self._epoch = lru_cache(maxsize=4)(self._shuffle)

    def task(self, draw: int) -> int:
        """The task index of draw number `draw`, counted from 0."""
        epoch, position = divmod(draw, len(self._families))
        return self._epoch(epoch)[position]

    def _shuffle(self, epoch: int) -> tuple[int, ...]:
        """One epoch: each family shuffled, then spread evenly over the epoch."""
        rng = random.Random(f"{self._seed}/{epoch}")
        by_family: dict[str, list[int]] = {}
        for index, family in enumerate(self._families):
            by_family.setdefault(family, []).append(index)
        placed: list[tuple[float, float, int]] = []
        for family in sorted(by_family):
            members = by_family[family]
            rng.shuffle(members)
            for rank, index in enumerate(members):
                placed.append(((rank + 0.5) / len(members), rng.random(), index))
        placed.sort()
        return tuple(index for _, _, index in placed)
