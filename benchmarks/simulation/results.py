"""Running a workload under a policy, and what is said about it.

`Result.row` and `Result.details` are what `--json` prints; `table` is for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.policy import PolicyName, make_policy
from rl.simulation.bound import Bound
from rl.simulation.tally import Tally
from rl.simulation.workloads import Workload
from rl.simulation.world import World

HOUR_S = 3600.0
# "No waste" for a throttled baseline: under one episode in two hundred.
NO_WASTE = 0.005
# Concurrencies tried when a baseline is throttled, evenly over all, then as finely
# around the best: a search that assumes little about how waste goes with concurrency.
THROTTLE_STEPS = 16
# Below this the table shows no sign: it would only be the sums' rounding.
SHOWN_BIAS = 5e-5

OnUpdate = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One workload under one policy.

    Attributes:
        workload: its name.
        policy: the policy's name.
        slots: slots that the policy was given.
        updates: updates made.
        end_s: end of the last update, virtual s.
        bound: the trace's lower bound on the step time.
        own_bound_s: the recurrence over the policy's own batches, per step, s.
        trainer_utilisation: share of the time that the trainer worked.
        replica_utilisation: share of the workload's slots in use, over time.
        tally: counts.
        computed_s: processor seconds that the simulation took.
    """

    workload: str
    policy: str
    slots: int
    updates: int
    end_s: float
    bound: Bound
    own_bound_s: float
    trainer_utilisation: float
    replica_utilisation: float
    tally: Tally
    computed_s: float

    @property
    def step_time_s(self) -> float:
        """Mean time of an update, s."""
        return self.end_s / self.updates

    @property
    def trained_per_hour(self) -> float:
        """Episodes trained on per virtual hour."""
        return self.tally.trained * HOUR_S / self.end_s

    @property
    def max_staleness(self) -> int:
        """Of any trained episode, from its group's dispatch."""
        return max(self.tally.staleness)

    def row(self) -> dict[str, Any]:
        """The headline numbers."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "step_time_s": self.step_time_s,
            "bound_s": self.bound.step_s,
            "trainer_utilisation": self.trainer_utilisation,
            "replica_utilisation": self.replica_utilisation,
            "waste": self.tally.waste,
            "duration_bias": self.tally.duration_bias,
            "max_staleness": self.max_staleness,
        }

    def details(self) -> dict[str, Any]:
        """Everything else."""
        tally = self.tally
        return {
            "workload": self.workload,
            "policy": self.policy,
            "slots": self.slots,
            "updates": self.updates,
            "trained_per_hour": self.trained_per_hour,
            "recurrence_bound_s": self.bound.recurrence_s,
            "slot_bound_s": self.bound.slots_s,
            "own_bound_s": self.own_bound_s,
            "mean_trained_s": tally.mean_trained_s,
            "mean_dispatched_s": tally.mean_dispatched_s,
            "wasted_time": tally.wasted_s / tally.busy_s,
            "staleness": {str(key): tally.staleness[key] for key in sorted(tally.staleness)},
            "dispatched": tally.dispatched,
            "graded": tally.graded,
            "masked": tally.masked,
            "cancelled": tally.cancelled,
            "trained": tally.trained,
            "wasted": tally.wasted,
            "left_over": tally.left_over,
            "computed_s": self.computed_s,
        }


def simulate(
    workload: Workload,
    name: PolicyName,
    bound: Bound,
    *,
    slots: int | None = None,
    label: str | None = None,
    on_update: OnUpdate | None = None,
) -> Result:
    """Run `workload` under the policy `name`.

    Args:
        workload: what to run.
        name: the policy.
        bound: the workload's.
        slots: slots for the policy, where fewer than the workload's.
        label: its name in results, where it is not the policy's own.
        on_update: told of the run's label and of each update when it ends.
    """
    shown = label or name
    began = time.process_time()

    def tell(update: int) -> None:
        if on_update is not None:
            on_update(shown, update)

    world = World(workload, make_policy(name, workload, slots), tell)
    world.run()
    updates = workload.schedule.updates
    return Result(
        workload=workload.name,
        policy=shown,
        slots=workload.slots if slots is None else slots,
        updates=updates,
        end_s=world.end_s,
        bound=bound,
        own_bound_s=world.own_recurrence_s / updates,
        trainer_utilisation=world.trainer_utilisation,
        replica_utilisation=world.replica_utilisation,
        tally=world.tally,
        computed_s=time.process_time() - began,
    )


def throttled(workload: Workload, bound: Bound, on_update: OnUpdate | None = None) -> Result | None:
    """Upstream's rule at the concurrency that trains most without waste; None: at none."""
    label = "upstream_no_waste"

    def best_of(settings: Sequence[int]) -> Result | None:
        tried = (
            simulate(workload, "upstream", bound, slots=slots, label=label, on_update=on_update)
            for slots in settings
        )
        clean = [result for result in tried if result.tally.waste <= NO_WASTE]
        return max(clean, key=lambda result: result.trained_per_hour, default=None)

    step = max(1, workload.slots // THROTTLE_STEPS)
    coarse = best_of(evenly(0, workload.slots, step))
    middle = step if coarse is None else coarse.slots
    around = evenly(max(0, middle - step), middle + step, max(1, step // THROTTLE_STEPS))
    fine = best_of([slots for slots in around if slots <= workload.slots])
    found = [result for result in (coarse, fine) if result is not None]
    return max(found, key=lambda result: result.trained_per_hour, default=None)


def evenly(low: int, high: int, step: int) -> list[int]:
    """The multiples of `step` above `low`, up to `high`."""
    return [low + offset for offset in range(step, high - low + 1, step)]


def table(results: Sequence[Result]) -> str:
    """The results of one workload, for people."""
    first = results[0]
    bound = first.bound
    lines = [
        f"{first.workload}   bound {bound.step_s:.1f} s per step "
        f"(recurrence {bound.recurrence_s:.1f}, slots {bound.slots_s:.1f}), "
        f"{first.updates} updates",
        f"  {'policy':<18}{'step s':>8}{'/bound':>8}{'/own':>7}{'trained/h':>11}"
        f"{'trainer':>9}{'slots':>8}{'waste':>8}{'bias':>8}  staleness",
    ]
    for result in results:
        total = sum(result.tally.staleness.values())
        shares = ", ".join(
            f"{key}: {result.tally.staleness[key] / total:.0%}"
            for key in sorted(result.tally.staleness)
        )
        step = result.step_time_s
        bias = 0.0 if abs(result.tally.duration_bias) < SHOWN_BIAS else result.tally.duration_bias
        lines.append(
            f"  {result.policy:<18}{step:>8.1f}{step / bound.step_s:>8.3f}"
            f"{step / result.own_bound_s:>7.3f}{result.trained_per_hour:>11,.0f}"
            f"{result.trainer_utilisation:>9.1%}{result.replica_utilisation:>8.1%}"
            f"{result.tally.waste:>8.2%}{bias:>+8.2%}  {shares}"
        )
    return "\n".join(lines)


LEGEND = """\
step s: mean time of an update; /bound: over the trace's lower bound; /own: over the
recurrence for the batches that the policy itself formed; trainer, slots: share of time in
use; waste: share of finished or cancelled episodes that were not trained on; bias: mean
duration of trained over dispatched episodes; staleness: share of trained episodes."""
