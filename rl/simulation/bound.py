"""The analytic lower bound on step time, folded batch by batch.

With F(k) the end of update k, F(k) = 0 for k < 1, S the staleness bound and
D_max(k) the longest episode of batch k:

    F(k) = max(F(k-1) + T_train, F(k-S-1) + T_sync + D_max(k) + T_group)

The trainer takes T_train for a batch; an episode of batch k starts no earlier than
the publication of version k - S - 1, and when the batch's last one has ended, its
group's work is left.  Together with the slot bound: E episodes of mean length m on
N slots take E * m / N.

Lengths are those of an attempt alone on a replica, so with a concurrency curve each
episode counts at its fastest.  Faults are left out: the trace is that of a world
without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rl.schedule.order import TaskOrder
from rl.simulation.trace import Trace
from rl.simulation.workloads import Workload


class Recurrence:
    """F(k), one batch at a time, in memory of S + 1 numbers.

    Args:
        max_staleness: S.
        train_s: T_train, s.
        sync_s: T_sync, s.
        group_s: T_group, the trainer's time for one group, s.
    """

    def __init__(
        self, *, max_staleness: int, train_s: float, sync_s: float, group_s: float
    ) -> None:
        self._train_s = train_s
        self._tail_s = sync_s + group_s
        self._ends = deque([0.0] * (max_staleness + 1), maxlen=max_staleness + 1)

    @classmethod
    def of(cls, workload: Workload) -> Recurrence:
        """With the workload's times."""
        schedule, trainer = workload.schedule, workload.trainer
        return cls(
            max_staleness=schedule.max_staleness,
            train_s=trainer.update_s,
            sync_s=trainer.sync_s,
            group_s=trainer.update_s / schedule.groups_per_batch,
        )

    @property
    def end(self) -> float:
        """F of the last batch, s."""
        return self._ends[-1]

    def advance(self, longest_s: float) -> float:
        """F of the next batch, whose longest episode takes `longest_s`."""
        published = self._ends[0]
        self._ends.append(max(self.end + self._train_s, published + self._tail_s + longest_s))
        return self.end


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on a workload's mean step time, s."""

    recurrence_s: float
    slots_s: float

    @property
    def step_s(self) -> float:
        """The greater of both."""
        return max(self.recurrence_s, self.slots_s)


def lower_bound(workload: Workload) -> Bound:
    """The bound over the trace in the order of draws, cut into batches."""
    recurrence = Recurrence.of(workload)
    total_s, updates = 0.0, workload.schedule.updates
    for longest_s, sum_s in batches_in_order(workload):
        recurrence.advance(longest_s)
        total_s += sum_s
    return Bound(recurrence.end / updates, total_s / workload.slots / updates)


def batches_in_order(workload: Workload) -> Iterator[tuple[float, float]]:
    """Longest and summed duration of each batch, s, were draws trained in order."""
    trace, schedule = Trace(workload), workload.schedule
    tasks = workload.durations.task_count
    order = TaskOrder([""] * tasks, workload.seed)
    for first in range(0, schedule.updates * schedule.groups_per_batch, schedule.groups_per_batch):
        seconds = [
            trace.fate(order.task(draw), draw // tasks, attempt).seconds
            for draw in range(first, first + schedule.groups_per_batch)
            for attempt in range(schedule.group_size)
        ]
        yield max(seconds), sum(seconds)
