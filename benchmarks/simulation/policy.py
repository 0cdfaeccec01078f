"""What a scheduling policy is to the simulator: the scheduler's own protocol.

`rl.schedule.scheduler.Scheduler` satisfies it as it stands; the baselines are
written to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, get_args

from benchmarks.simulation.batchwise import Batchwise
from benchmarks.simulation.upstream import Upstream
from benchmarks.simulation.workloads import Workload
from rl.records import Outcome
from rl.schedule.commands import Command
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler

PolicyName = Literal["ours", "sync", "one_step_off", "upstream"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class Policy(Protocol):
    """Events and a clock in, commands out; see `Scheduler` for each method."""

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        ...

    def version_current(self, version: int, replicas: Mapping[int, int]) -> None:
        """`version` is served by these replicas, in these generations."""
        ...

    def attempt_finished(
        self, attempt_id: str, outcome: Outcome, reward: float | None, now: float
    ) -> None:
        """A dispatched attempt reached its one terminal event."""
        ...

    def update_finished(self, update: int) -> None:
        """The trainer made version `update`."""
        ...

    def replica_lost(self, replica: int) -> int:
        """A replica left rotation; returns its new generation."""
        ...

    def replica_back(self, replica: int, version: int, generation: int) -> None:
        """A lost replica serves `version` again."""
        ...

    def poll(self, now: float) -> list[Command]:
        """Everything that can be done now."""
        ...


def make_policy(name: PolicyName, workload: Workload, slots: int | None = None) -> Policy:
    """The policy `name`, new, over the workload's tasks.

    Args:
        name: which one.
        workload: what it is to schedule.
        slots: attempts at once, where fewer than the workload's.
    """
    order = TaskOrder([""] * workload.durations.task_count, workload.seed)
    config, replicas = workload.schedule, workload.engine.replicas
    slots = workload.slots if slots is None else slots
    match name:
        case "ours":
            return Scheduler(config, order, slots=slots, replicas=replicas)
        case "sync":
            return Batchwise(config, order, slots=slots, replicas=replicas, lead=0)
        case "one_step_off":
            lead = min(1, config.max_staleness)
            return Batchwise(config, order, slots=slots, replicas=replicas, lead=lead)
        case "upstream":
            return Upstream(config, order, slots=slots, replicas=replicas)
