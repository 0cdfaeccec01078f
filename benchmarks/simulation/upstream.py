"""Upstream's rule, that of prime-rl's orchestrator: launch on a free slot, drop at the sink.

- A free slot takes an attempt of an open group, or opens a group under the newest
  published version, whatever is in flight already.
- Launching holds while the trainer lags by one batch: it is busy, and a whole
  batch waits for it.  Attempts of groups that are open already are still launched.
- The trainer takes the first whole batch of complete groups in order of completion.
- A group that would be staler than the bound in the next batch is dropped whole: a
  complete one at the sink, where its finished attempts are wasted; of one that still
  runs, the attempts are cancelled.

Favourable to it: groups are given up at the moment when it is certain that they are
too stale, not when the next version is published, so that their slots are free
sooner; none is opened that could not be trained on even if it ended at once; and
cancelling takes no time.

Invariant: no batch holds a group staler than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulation.baseline import Baseline
from rl.config import ScheduleConfig
from rl.schedule.commands import DropGroup
from rl.schedule.groups import PendingGroup
from rl.schedule.order import TaskOrder


class Upstream(Baseline):
    """See the module's rule."""

    def __init__(
        self, config: ScheduleConfig, order: TaskOrder, *, slots: int, replicas: int
    ) -> None:
        super().__init__(config, order, slots=slots, replicas=replicas)
        self._complete: list[PendingGroup] = []

    def _may_open(self) -> bool:
        lagging = self._stepping and len(self._complete) >= self._config.groups_per_batch
        return not lagging and self._due(self._version or 0) >= self._next_update

    def _keep(self, group: PendingGroup) -> None:
        if group.due < self._next_update:
            self._given_up.append(DropGroup(group.group_id, "too stale at the sink"))
        else:
            self._complete.append(group)

    def _batch(self) -> Sequence[PendingGroup] | None:
        size = self._config.groups_per_batch
        if len(self._complete) < size:
            return None
        batch, self._complete = self._complete[:size], self._complete[size:]
        self._drop_stale(self._next_update + 1)
        return batch

    def _drop_stale(self, update: int) -> None:
        """Give up what is too stale for the batch of `update`."""
        fresh: list[PendingGroup] = []
        for group in self._complete:
            if group.due < update:
                self._given_up.append(DropGroup(group.group_id, "too stale at the sink"))
            else:
                fresh.append(group)
        self._complete = fresh
        for group in list(self._groups.values()):
            if group.due < update:
                self._give_up(group, "too stale for the next batch")
