"""A bound on how often something may be begun.

Invariants:
- Turns are at least `1 / per_s` seconds apart, in the order they were asked for;
  one that nobody takes is not made up for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Pace:
    """Gives out turns, at most `per_s` a second.

    Args:
        per_s: turns per second.
        clock: seconds of a clock that only goes forward.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._apart_s = 1.0 / per_s
        self._clock = clock
        self._next = clock()

    def reserve(self) -> float:
        """Take the next turn; returns the seconds until it comes."""
        now = self._clock()
        turn = max(self._next, now)
        self._next = turn + self._apart_s
        return turn - now

    async def turn(self) -> None:
        """Wait for the next turn."""
        await asyncio.sleep(self.reserve())
