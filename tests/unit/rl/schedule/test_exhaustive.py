"""Every interleaving of small campaigns keeps every rule and comes to an end.

Each has two replicas.  Unless its name says otherwise it has two slots, one group
of two per batch, and allows one version of staleness.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rl.config import ScheduleConfig
from rl.schedule.evals import NO_EVALS, EvalPlan
from tests.support.schedule_model.explore import explore
from tests.support.schedule_model.setting import Faults, Setting, shared_config


@dataclass(frozen=True)
class Case:
    """A small campaign.

    Attributes:
        states: fewest that an exploration worth its name visits.
    """

    name: str
    config: ScheduleConfig
    faults: Faults
    states: int
    slots: int = 2
    rewards: tuple[float, ...] = (1.0,)
    evals: EvalPlan = NO_EVALS


THREE_UPDATES = shared_config(3, 2, 2, 1)
TWO_UPDATES = shared_config(2, 2, 2, 1)

EVERY_VERSION = EvalPlan(frozenset({0, 1, 2}), cells=2, retries=1)
FIRST = EvalPlan(frozenset({0}), cells=1, retries=1)
SECOND = EvalPlan(frozenset({1}), cells=2, retries=0)

CASES = [
    Case("nothing_fails", THREE_UPDATES, Faults(), 100),
    Case("attempt_is_masked", THREE_UPDATES, Faults(masks=1), 500),
    Case("attempt_is_cancelled", THREE_UPDATES, Faults(cancels=1), 350),
    Case("replica_is_lost_and_restarts", THREE_UPDATES, Faults(losses=1, restarts=1), 4_000),
    Case("load_fails", THREE_UPDATES, Faults(failed_loads=1, restarts=1), 1_300),
    Case("replica_is_suspended", THREE_UPDATES, Faults(suspicions=1), 500),
    Case("driver_crashes", THREE_UPDATES, Faults(drivers=1), 500),
    Case("driver_crashes_and_attempt_is_masked", TWO_UPDATES, Faults(masks=1, drivers=1), 600),
    Case(
        "both_replicas_are_lost_and_one_restarts",
        TWO_UPDATES,
        Faults(losses=2, restarts=1),
        2_700,
        slots=1,
    ),
    Case(
        "replica_is_lost_and_load_fails_and_one_restarts",
        TWO_UPDATES,
        Faults(losses=1, failed_loads=1, restarts=1),
        2_400,
        slots=1,
    ),
    Case("two_groups_per_batch", shared_config(3, 4, 2, 1), Faults(), 650),
    Case("two_groups_per_batch_and_mask", shared_config(2, 4, 2, 1), Faults(masks=1), 1_000),
    Case("two_versions_stale", shared_config(3, 2, 2, 2), Faults(), 450, slots=3),
    Case("no_staleness", shared_config(3, 4, 2, 0), Faults(masks=1), 200, slots=4),
    Case(
        "equal_rewards_are_refilled",
        shared_config(2, 2, 2, 1, refill=1),
        Faults(),
        400,
        rewards=(0.0, 1.0),
    ),
    Case(
        "group_of_three_does_with_two",
        shared_config(2, 3, 3, 1, retries=0),
        Faults(masks=1),
        400,
        slots=3,
    ),
    Case("evaluations", THREE_UPDATES, Faults(), 600, evals=EVERY_VERSION),
    Case("evaluation_is_masked", TWO_UPDATES, Faults(masks=1), 1_000, evals=EVERY_VERSION),
    Case("evaluation_is_cancelled", TWO_UPDATES, Faults(cancels=1), 900, evals=EVERY_VERSION),
    Case("driver_crashes_in_an_evaluation", TWO_UPDATES, Faults(drivers=1), 400, evals=SECOND),
    Case(
        "evaluated_version_loses_its_replicas",
        TWO_UPDATES,
        Faults(losses=1, failed_loads=1, restarts=1),
        5_000,
        evals=FIRST,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_interleaving_keeps_the_rules(case: Case) -> None:
    setting = Setting(case.config, case.slots, replicas=2, rewards=case.rewards, evals=case.evals)
    explored = explore(setting, case.faults)
    print(f"{case.name}: {explored}")
    assert explored.states >= case.states
    assert explored.ends >= 1
