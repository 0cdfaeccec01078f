"""The trainer under virtual time, fed as `actors.feed` feeds the real one.

Invariants:
- One call at a time: whole groups in the order in which they came, the step after
  the last of them, and attempts ahead of their group only while there is nothing
  else to do.
- An attempt that still waits when its group is complete is left to the group.
- An episode costs `update_s / batch_size` in a whole group, so a full batch costs
  `update_s`, and `ahead_cost` times as much if it is worked on ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rl.schedule.commands import ATTEMPTS_AHEAD
from rl.simulation.engine import Agenda


class Trainer:
    """See the module's invariants.

    Args:
        update_s: one full batch in whole groups, s.
        batch_size: episodes in it.
        ahead_cost: of an episode that is worked on ahead, over one in a whole group.
        agenda: the world's clock.
        on_step: told of every update when it is made.
    """

    def __init__(
        self,
        update_s: float,
        batch_size: int,
        ahead_cost: float,
        agenda: Agenda,
        on_step: Callable[[int], None],
    ) -> None:
        self._episode_s = update_s / batch_size
        self._ahead_cost = ahead_cost
        self._agenda = agenda
        self._on_step = on_step
        self._waiting: dict[str, int] = {}  # attempts to be worked on ahead, by group
        self._done: dict[str, int] = {}  # attempts that were, by group
        self._groups: deque[float] = deque()  # seconds of whole groups
        self._step: int | None = None
        self._busy = False
        self.busy_s = 0.0

    def ahead(self, group_id: str) -> None:
        """One graded attempt of a group that is not complete."""
        self._waiting[group_id] = self._waiting.get(group_id, 0) + 1
        self._go_on()

    def group(self, group_id: str, episodes: int) -> None:
        """A complete group of so many episodes."""
        self._waiting.pop(group_id, None)
        left = episodes - self._done.pop(group_id, 0)
        self._groups.append(left * self._episode_s)
        self._go_on()

    def drop(self, group_id: str) -> None:
        """A group that will not be trained on."""
        self._waiting.pop(group_id, None)
        self._done.pop(group_id, None)

    def step(self, update: int) -> None:
        """All groups of the batch of `update` were given."""
        self._step = update
        self._go_on()

    def _go_on(self) -> None:
        if self._busy:
            return
        if self._groups:
            self._work(self._groups.popleft())
        elif self._step is not None:
            # An event of its own, even after no work: a policy may not be called back
            # from inside its own command.
            self._busy = True
            self._agenda.at(self._agenda.now, self._stepped)
        elif self._waiting:
            self._work(self._take_ahead() * self._episode_s * self._ahead_cost)

    def _take_ahead(self) -> int:
        """Take attempts to be worked on ahead; how many."""
        graded = {
            group_id: waiting + self._done.get(group_id, 0)
            for group_id, waiting in self._waiting.items()
        }
        group_id = min(graded, key=lambda key: graded[key])
        episodes = min(ATTEMPTS_AHEAD, self._waiting[group_id])
        self._done[group_id] = self._done.get(group_id, 0) + episodes
        self._waiting[group_id] -= episodes
        if not self._waiting[group_id]:
            del self._waiting[group_id]
        return episodes

    def _work(self, seconds: float) -> None:
        self._busy = True
        self.busy_s += seconds
        self._agenda.at(self._agenda.now + seconds, self._worked)

    def _worked(self) -> None:
        self._busy = False
        self._go_on()

    def _stepped(self) -> None:
        self._busy = False
        update, self._step = self._step, None
        assert update is not None
        self._on_step(update)
