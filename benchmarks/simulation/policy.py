"""The policies that are compared: the scheduler itself, and the baselines."""

from __future__ import annotations

from typing import Literal, get_args

from benchmarks.simulation.batchwise import Batchwise
from benchmarks.simulation.upstream import Upstream
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler
from rl.simulation.policy import Policy
from rl.simulation.workloads import Workload

PolicyName = Literal["ours", "sync", "one_step_off", "upstream"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


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
