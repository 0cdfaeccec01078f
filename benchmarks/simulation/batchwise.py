"""Baselines that generate one batch after the other: synchronous and one-step-off.

The rule: batch k is opened, whole, when the generation of batch k - 1 has ended
and version k - 1 - `lead` is current; the trainer takes batches in order.

- `lead = 0`, *synchronous*: sample, train, publish, sample again.  Trainer and
  replicas take turns.
- `lead = 1`, *one-step-off*: batch k is sampled under version k - 2 while batch
  k - 1 is trained on.  Slots stay empty from the moment when fewer attempts of a
  batch are left than slots, and the next batch waits for the longest of them.

Favourable to it: publications cost the trainer nothing, and a batch is opened at
the very moment when both conditions hold.

Invariant: batch k holds no group staler than `lead`, and nothing is ever wasted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.simulation.baseline import Baseline
from rl.config import ScheduleConfig
from rl.schedule.groups import PendingGroup
from rl.schedule.order import TaskOrder


class Batchwise(Baseline):
    """See the module's rule.

    Args:
        config: updates, batch, group and staleness settings.
        order: the order of tasks.
        slots: attempts that may run at once.
        replicas: number of replicas.
        lead: versions that a batch may be behind, at most the staleness bound.
    """

    def __init__(
        self, config: ScheduleConfig, order: TaskOrder, *, slots: int, replicas: int, lead: int
    ) -> None:
        super().__init__(config, order, slots=slots, replicas=replicas)
        self._lead = lead
        self._generating = 1  # the batch whose groups are being opened and sampled
        self._complete: list[PendingGroup] = []
        self._ready: deque[list[PendingGroup]] = deque()

    def _may_open(self) -> bool:
        opened = len(self._groups) + len(self._complete)  # a dropped one is drawn afresh
        return (
            self._version is not None
            and self._generating <= self._config.updates
            and self._version >= self._generating - 1 - self._lead
            and opened < self._config.groups_per_batch
        )

    def _keep(self, group: PendingGroup) -> None:
        self._complete.append(group)
        if len(self._complete) == self._config.groups_per_batch:
            self._ready.append(self._complete)
            self._complete = []
            self._generating += 1

    def _batch(self) -> Sequence[PendingGroup] | None:
        return self._ready.popleft() if self._ready else None
