"""`python -m benchmarks.scheduler`: synthetic episodes per second through the Scheduler alone.

Attempts end in a random order at once, updates and publications take no time: all
that is measured is the state machine, and a loop around it as small as it can be.
Rates are per second of the processor, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks._table import keep, show
from rl.config import ScheduleConfig
from rl.errors import EXIT_OK, InfrastructureError, run_command
from rl.schedule.commands import Dispatch, StepUpdate
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler

SEED = 0
QUICK_SHARE = 10  # --quick makes one update in so many


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a campaign is."""

    name: str
    slots: int
    replicas: int
    batch_size: int
    group_size: int
    tasks: int
    updates: int


SCALES = (
    Scale("small", 128, 2, 64, 8, 80, 800),
    Scale("large", 65_536, 1_024, 32_768, 16, 10_000, 10),
)


def drive(scale: Scale, updates: int) -> float:
    """Take a campaign through the Scheduler; returns episodes per processor second."""
    config = ScheduleConfig(
        updates=updates,
        batch_size=scale.batch_size,
        group_size=scale.group_size,
        max_staleness=1,
    )
    order = TaskOrder([""] * scale.tasks, SEED)
    scheduler = Scheduler(config, order, slots=scale.slots, replicas=scale.replicas)
    replicas = dict.fromkeys(range(scale.replicas), 0)
    pick = random.Random(SEED).random
    running: list[str] = []
    clock, ended = 0.0, 0
    began = time.process_time()
    scheduler.version_current(0, replicas)
    while not scheduler.done:
        stepped = None
        for command in scheduler.poll(clock):
            if isinstance(command, Dispatch):
                running.append(command.attempt_id)
            elif isinstance(command, StepUpdate):
                stepped = command.update
        if stepped is not None:
            scheduler.update_finished(stepped)
            scheduler.version_current(stepped, replicas)
            continue
        index = int(pick() * len(running))
        running[index], running[-1] = running[-1], running[index]
        scheduler.attempt_finished(running.pop(), "graded", 1.0, clock)
        clock += 1.0
        ended += 1
    seconds = time.process_time() - began
    if ended != updates * scale.batch_size:
        raise InfrastructureError(f"{ended} episodes ended", scale.name)
    return ended / seconds


def measure(rounds: int, share: int) -> list[dict[str, Any]]:
    """One row per scale, by the median round."""
    rows: list[dict[str, Any]] = []
    for scale in SCALES:
        updates = max(2, scale.updates // share)
        rates = [drive(scale, updates) for _ in range(rounds)]
        rows.append(
            {
                "scale": scale.name,
                "slots": scale.slots,
                "replicas": scale.replicas,
                "episodes": updates * scale.batch_size,
                "episodes/s": round(statistics.median(rates)),
                "slowest round": round(min(rates)),
            }
        )
    return rows


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler",
        description="Synthetic episodes per second of one core through the Scheduler alone, at "
        "128 slots and at 65,536 slots over 1,024 replicas.",
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the updates, one round")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rows = measure(1 if options.quick else options.rounds, QUICK_SHARE if options.quick else 1)
    path = keep("scheduler", rows)
    if options.json:
        print(json.dumps(rows))
    else:
        show("episodes through the Scheduler, per second of one core", rows)
        print(f"kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
