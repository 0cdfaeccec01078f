"""What a modelled campaign is made of: its configuration, its machines and its faults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.config import ScheduleConfig
from rl.schedule.evals import NO_EVALS, EvalPlan
from rl.schedule.ledger import VersionLedger
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler


class Violation(AssertionError):
    """A rule that must always hold does not."""


def require(holds: bool, rule: str) -> None:
    """Raise `Violation` unless `holds`."""
    if not holds:
        raise Violation(rule)


class DrawOrder(TaskOrder):
    """Draw `n` is task `n`, so that a dispatched task tells its draw."""

    def __init__(self) -> None:
        super().__init__(["any"], 0)
        del self._epoch  # a cache, which can't be pickled

    def task(self, draw: int) -> int:
        return draw


class SharedConfig(ScheduleConfig):
    """A configuration that copies of a state share: it is pickled by its values."""

    def __reduce__(self) -> tuple[Any, ...]:
        values = (
            self.updates,
            self.batch_size,
            self.group_size,
            self.max_staleness,
            self.refill_zero_variance,
            self.min_group,
            self.attempt_retries,
        )
        return shared_config, values


@lru_cache(maxsize=64)
def shared_config(
    updates: int,
    batch: int,
    group: int,
    staleness: int,
    refill: int = 0,
    min_group: int = 2,
    retries: int = 1,
) -> SharedConfig:
    """The one configuration with these values."""
    return SharedConfig(
        updates=updates,
        batch_size=batch,
        group_size=group,
        max_staleness=staleness,
        refill_zero_variance=refill,
        min_group=min_group,
        attempt_retries=retries,
    )


@dataclass(slots=True)
class Faults:
    """How many of each fault may still happen.

    Attributes:
        masks: attempts that infrastructure fails, beyond those of a lost replica.
        cancels: attempts that end `cancelled` though nobody asked for it.
        losses: replicas that leave rotation, beyond those that failed a load.
        failed_loads: loads or probes that fail, beyond those of a lost replica.
        restarts: restarts of lost replicas, all together.
        suspicions: replicas that are suspended until they answer.
        drivers: crashes of the driver.
    """

    masks: int = 0
    cancels: int = 0
    losses: int = 0
    failed_loads: int = 0
    restarts: int = 0
    suspicions: int = 0
    drivers: int = 0


@dataclass(frozen=True)
class Machines:
    """The state machines under test: the product's, or a mutated copy's."""

    scheduler: type[Scheduler] = Scheduler
    ledger: type[VersionLedger] = VersionLedger


@dataclass(frozen=True)
class Setting:
    """A campaign.

    Attributes:
        rewards: what a graded attempt may get.
        evals: which versions are evaluated on the way.
    """

    config: ScheduleConfig
    slots: int
    replicas: int
    rewards: tuple[float, ...] = (1.0,)
    machines: Machines = Machines()
    evals: EvalPlan = NO_EVALS
