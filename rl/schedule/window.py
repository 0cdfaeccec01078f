"""The feasibility window: how many groups may still be due by each update.

A group of version `v` may be trained no later than update `v + 1 + S` (S:
max_staleness); that, or the campaign's last update if it is earlier, is its
*due* update.  A group is *open* from its admission until it is placed into a
batch or dropped.

Invariant (B: groups per batch, t: the update whose batch is being formed,
placed: groups already in that batch): for every update d >= t,

    slack(d) = B * (d - t + 1) - placed - |{open groups due by d}|  >=  0

so everything open can be placed in time, earliest due first.  It holds because
`admit` and `place`, which lower some slack, refuse where it would fall below 0,
and `advance`, which starts the next batch, needs a full one: slack(d) for
d > t then stays as it was, and slack(t) = 0 says that nothing due is left.
"""

from __future__ import annotations

from rl.errors import StalenessViolation


class DueWindow:
    """See the module's invariant.

    Args:
        batch: groups per batch.
        max_staleness: S.
        updates: the last update of the campaign.
        done: updates that have been made already.
    """

    def __init__(self, batch: int, max_staleness: int, updates: int, done: int = 0) -> None:
        self._batch = batch
        self._max_staleness = max_staleness
        self._updates = updates
        self._forming = done + 1
        self._placed = 0
        self._open: dict[int, int] = {}

    @property
    def forming(self) -> int:
        """The update whose batch is being formed."""
        return self._forming

    @property
    def full(self) -> bool:
        """Whether the forming batch has all its groups."""
        return self._placed == self._batch

    @property
    def open(self) -> int:
        """Groups that are admitted, and neither placed nor dropped."""
        return sum(self._open.values())

    def due(self, version: int) -> int:
        """The last update that may train on a group of `version`."""
        return min(version + 1 + self._max_staleness, self._updates)

    def slack(self, update: int) -> int:
        """How many more groups due by `update` could be placed in time."""
        places = self._batch * (update - self._forming + 1) - self._placed
        return places - sum(count for due, count in self._open.items() if due <= update)

    def can_admit(self, version: int) -> bool:
        """Whether a new group of `version`, the newest one, could be placed in time."""
        due = self.due(version)
        return due >= self._forming and self.slack(due) > 0

    def admit(self, version: int) -> int:
        """Open a group of `version`; returns its due update."""
        if not self.can_admit(version):
            raise StalenessViolation(f"a group of version {version} could go stale", "window")
        due = self.due(version)
        self._open[due] = self._open.get(due, 0) + 1
        return due

    def can_place(self, due: int) -> bool:
        """Whether an open group due then may go into the forming batch.

        It may not where it would take the place of one that is due earlier.
        """
        return not self.full and all(self.slack(d) > 0 for d in range(self._forming, due))

    def place(self, version: int, due: int) -> None:
        """Put an open group into the forming batch.

        Raises:
            StalenessViolation: it is too stale, or would make another too stale.
        """
        staleness = self._forming - 1 - version
        if not 0 <= staleness <= self._max_staleness or not self.can_place(due):
            raise StalenessViolation(
                f"update {self._forming} can't take a group of version {version}", "window"
            )
        self.close(due)
        self._placed += 1

    def close(self, due: int) -> None:
        """An open group was dropped."""
        self._open[due] -= 1
        if not self._open[due]:
            del self._open[due]

    def advance(self) -> None:
        """The full batch was trained: begin to form the next one.

        Raises:
            StalenessViolation: the batch is not full.
        """
        if not self.full:
            raise StalenessViolation(f"batch {self._forming} is not full", "window")
        self._forming += 1
        self._placed = 0
