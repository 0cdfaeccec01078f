"""Which draw of the task order is admitted next: in blocks, long tasks first.

Invariants:
- Every draw is handed out once, and those owed from before open the first blocks.
- Blocks follow the order of draws; only inside a block do tasks with longer
  estimates come first, so that no task waits longer than one block.  In steady
  state a block is what one version's window admits.
"""

from __future__ import annotations

from collections import deque

from rl.schedule.estimates import DurationEstimates
from rl.schedule.order import TaskOrder


class Backlog:
    """See the module's invariants.

    Args:
        order: maps draws to tasks.
        estimates: looked at when a block is opened.
        block: draws per block.
        next_draw: first draw that has never been opened.
        redraw: draws that were opened before and are still owed.
    """

    def __init__(
        self,
        order: TaskOrder,
        estimates: DurationEstimates,
        block: int,
        next_draw: int = 0,
        redraw: tuple[int, ...] = (),
    ) -> None:
        self._order = order
        self._estimates = estimates
        self._size = block
        self._next = next_draw
        self._redraw = deque(sorted(redraw))
        self._block: deque[int] = deque()

    @property
    def next_draw(self) -> int:
        """First draw that has never been opened."""
        return self._next

    @property
    def owed(self) -> tuple[int, ...]:
        """Draws that were opened, or are to be drawn again, and not taken yet."""
        return (*self._block, *self._redraw)

    def take(self) -> tuple[int, int]:
        """The next draw and its task."""
        if not self._block:
            self._open()
        draw = self._block.popleft()
        return draw, self._order.task(draw)

    def _open(self) -> None:
        draws: list[int] = []
        while len(draws) < self._size:
            if self._redraw:
                draws.append(self._redraw.popleft())
            else:
                draws.append(self._next)
                self._next += 1
        estimate = self._estimates.estimate
        draws.sort(key=lambda draw: (-estimate(self._order.task(draw)), draw))
        self._block.extend(draws)
