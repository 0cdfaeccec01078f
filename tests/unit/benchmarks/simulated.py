"""A small workload, and a way to run it."""

from __future__ import annotations

from typing import Any

from benchmarks.simulation.policy import PolicyName
from benchmarks.simulation.results import Result, simulate
from rl.simulation.bound import lower_bound
from rl.simulation.workloads import Workload

SMALL: dict[str, Any] = {
    "name": "small",
    "slots": 32,
    "schedule": {"updates": 40, "batch_size": 16, "group_size": 4, "max_staleness": 1},
    "engine": {"replicas": 2},
    "durations": {"lognormal": {"tasks": 12, "mean_s": 300.0, "cv": 0.5, "task_share": 0.5}},
    "trainer": {"update_s": 150.0, "sync_s": 5.0},
}


def small(**changes: Any) -> Workload:
    """The small workload; `changes` are by dotted key, dots written as two underscores."""
    data: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()
    }
    data["durations"] = {"lognormal": dict(SMALL["durations"]["lognormal"])}
    for key, value in changes.items():
        *tables, last = key.split("__")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return Workload.model_validate(data)


def run(workload: Workload, policy: PolicyName, **options: Any) -> Result:
    """Simulate it."""
    return simulate(workload, policy, lower_bound(workload), **options)
