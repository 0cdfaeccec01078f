"""The seed of an attempt depends on what is attempted, not on which driver dispatched it."""

from __future__ import annotations

from actors.episodes import attempt_seed
from rl.config import ScheduleConfig
from rl.schedule.commands import Dispatch
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler


def ids_of(incarnation: int) -> list[str]:
    """Ids as the scheduler makes them."""
    config = ScheduleConfig(updates=2, batch_size=8, group_size=4)
    order = TaskOrder(["a", "b", "c"], seed=0)
    scheduler = Scheduler(config, order, slots=8, replicas=1, incarnation=incarnation)
    scheduler.version_current(0, {0: 0})
    return [c.attempt_id for c in scheduler.poll(0.0) if isinstance(c, Dispatch)]


def test_a_continued_campaign_samples_as_the_undisturbed_one() -> None:
    first, second = ids_of(0), ids_of(1)
    assert not set(first) & set(second)
    seeds = [attempt_seed(7, attempt_id) for attempt_id in first]
    assert [attempt_seed(7, attempt_id) for attempt_id in second] == seeds
    assert len(set(seeds)) == len(seeds) == 8
    assert [attempt_seed(8, attempt_id) for attempt_id in first] != seeds


def test_a_heldout_attempt_s_id_is_its_seed_s_whole() -> None:
    ids = [f"heldout-{arm}-g1.{task}-k0" for arm in ("base", "step2") for task in (1, 2)]
    assert len({attempt_seed(0, attempt_id) for attempt_id in ids}) == 4
