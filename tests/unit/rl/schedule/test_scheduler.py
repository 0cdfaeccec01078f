"""The scheduler's invariants under arbitrary interleavings."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config import ScheduleConfig
from rl.errors import StalenessViolation
from rl.schedule.commands import Dispatch, DropGroup, RetireVersion, StartUpdate
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler

FAMILIES = list("aabbcc")


def make(
    *, updates: int = 4, staleness: int = 1, slots: int = 4, refill: int = 0, retries: int = 1
) -> Scheduler:
    config = ScheduleConfig(
        updates=updates,
        batch_size=4,
        group_size=2,
        max_staleness=staleness,
        refill_zero_variance=refill,
        attempt_retries=retries,
    )
    return Scheduler(config, TaskOrder(FAMILIES, 0), slots=slots, replicas=2)


class World:
    """Carries out a scheduler's commands in an order that a test chooses."""

    def __init__(self, scheduler: Scheduler, staleness: int, slots: int) -> None:
        self.scheduler = scheduler
        self.staleness = staleness
        self.slots = slots
        self.flying: list[Dispatch] = []
        self.versions: dict[str, int] = {}
        self.training: int | None = None
        self.to_publish: list[int] = []
        self.trained: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.retired: list[int] = []
        self.ended: Counter[str] = Counter()
        self.lost: int | None = None
        self.current = 0
        scheduler.version_current(0, [0, 1])

    def obey(self) -> None:
        for command in self.scheduler.poll():
            match command:
                case Dispatch():
                    assert command.version not in self.retired
                    assert command.replica != self.lost
                    assert self.versions.setdefault(command.group_id, command.version) == (
                        command.version
                    )
                    self.flying.append(command)
                case StartUpdate(update, groups):
                    assert self.training is None
                    self.training = update
                    for group in groups:
                        assert 0 <= (update - 1) - self.versions[group] <= self.staleness
                        self.trained[group] += 1
                case DropGroup(group):
                    self.dropped[group] += 1
                case RetireVersion(version):
                    assert all(flight.version != version for flight in self.flying)
                    self.retired.append(version)
        assert len(self.flying) <= self.slots
        assert self.scheduler.poll() == []

    def choices(self) -> list[str]:
        moves = ["finish"] * bool(self.flying)
        moves += ["train"] * (self.training is not None)
        return moves + ["publish"] * bool(self.to_publish)

    def lose(self, replica: int) -> None:
        self.scheduler.suspend_replica(replica)
        self.obey()
        self.scheduler.replica_lost(replica)
        self.lost = replica

    def back(self) -> None:
        assert self.lost is not None
        self.scheduler.replica_back(self.lost, self.current)
        self.lost = None

    def finish(self, index: int, outcome: str, reward: float) -> None:
        flight = self.flying.pop(index % len(self.flying))
        self.ended[flight.attempt_id] += 1
        graded = outcome == "graded"
        self.scheduler.attempt_finished(
            flight.attempt_id, "graded" if graded else "masked", reward if graded else None
        )

    def train(self) -> None:
        assert self.training is not None
        self.scheduler.update_finished(self.training)
        self.to_publish.append(self.training)
        self.training = None

    def publish(self) -> None:
        version = self.to_publish[-1]
        self.to_publish.clear()
        self.current = version
        self.scheduler.version_current(version, [i for i in (0, 1) if i != self.lost])


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    staleness=st.integers(0, 3),
    slots=st.sampled_from([1, 3, 8, 40]),
    refill=st.integers(0, 2),
)
def test_every_interleaving_keeps_the_bound_and_loses_nothing(
    data: st.DataObject, staleness: int, slots: int, refill: int
) -> None:
    updates = 4
    scheduler = make(updates=updates, staleness=staleness, slots=slots, refill=refill)
    world = World(scheduler, staleness, slots)
    for _ in range(2_000):
        world.obey()
        if scheduler.done:
            break
        moves = world.choices()
        assert moves, "the scheduler waits for something that can't happen"
        fault = data.draw(st.sampled_from([None] * 8 + ["lose" if world.lost is None else "back"]))
        move = fault or data.draw(st.sampled_from(moves))
        if move == "lose":
            world.lose(data.draw(st.integers(0, 1)))
        elif move == "finish":
            outcome = data.draw(st.sampled_from(["graded"] * 5 + ["masked"]))
            world.finish(data.draw(st.integers(0, 50)), outcome, data.draw(st.sampled_from([0, 1])))
        else:
            getattr(world, move)()
    assert scheduler.done
    assert sum(world.trained.values()) == updates * 2
    assert set(world.trained.values()) == {1}
    assert not set(world.trained) & set(world.dropped)
    assert set(world.ended.values()) == {1}
    assert not world.flying


def test_never_more_than_the_bound_is_admitted_ahead_of_the_trainer() -> None:
    scheduler = make(slots=100)
    world = World(scheduler, 1, 100)
    world.obey()
    assert len(world.flying) == (1 + 1) * 4


def test_a_batch_waits_for_the_group_that_would_go_stale() -> None:
    scheduler = make(slots=100)
    world = World(scheduler, 1, 100)
    world.obey()
    straggler = world.flying[0].group_id
    for _ in range(2):  # two updates are made from what is complete, one group lags
        while any(f.group_id != straggler for f in world.flying) and world.training is None:
            index = next(i for i, f in enumerate(world.flying) if f.group_id != straggler)
            world.finish(index, "graded", float(index % 2))
            world.obey()
        if world.training is None:
            break
        world.train()
        world.publish()
        world.obey()
    assert world.trained[straggler] == 0
    assert world.training is None, "update 2 must not start without the group that is due"
    while any(f.group_id == straggler for f in world.flying):
        index = next(i for i, f in enumerate(world.flying) if f.group_id == straggler)
        world.finish(index, "graded", 1.0)
    world.obey()
    assert world.training == 2
    assert world.trained[straggler] == 1


def test_a_masked_attempt_is_relaunched_under_a_new_id_and_version_of_its_group() -> None:
    scheduler = make(slots=1)
    world = World(scheduler, 1, 1)
    world.obey()
    first = world.flying[0]
    world.finish(0, "masked", 0.0)
    world.obey()
    again = world.flying[0]
    assert again.group_id == first.group_id
    assert again.attempt_id != first.attempt_id
    assert again.version == first.version


def test_a_group_with_too_few_graded_attempts_is_dropped_and_replaced() -> None:
    scheduler = make(slots=2, retries=0)
    world = World(scheduler, 1, 2)
    world.obey()
    group = world.flying[0].group_id
    world.finish(0, "masked", 0.0)
    world.finish(0, "graded", 1.0)
    world.obey()
    assert world.dropped[group] == 1
    assert world.flying
    assert world.flying[0].group_id != group


def test_zero_variance_groups_are_refilled_up_to_the_limit_only() -> None:
    scheduler = make(slots=2, refill=1)
    world = World(scheduler, 1, 2)
    for _ in range(2):
        world.obey()
        world.finish(0, "graded", 1.0)
        world.finish(0, "graded", 1.0)
    world.obey()
    assert sum(world.dropped.values()) == 1


def test_attempts_go_to_the_least_loaded_replica_that_serves_their_version() -> None:
    scheduler = make(slots=4)
    world = World(scheduler, 1, 4)
    world.obey()
    assert Counter(flight.replica for flight in world.flying) == {0: 2, 1: 2}
    scheduler.replica_lost(1)
    world.finish(0, "graded", 1.0)
    world.obey()
    assert world.flying[-1].replica == 0
    scheduler.replica_back(1, 0)
    world.finish(0, "graded", 1.0)
    world.obey()
    assert world.flying[-1].replica == 1


def test_a_suspended_replica_gets_nothing_until_it_answers() -> None:
    scheduler = make(slots=4)
    scheduler.suspend_replica(0)
    world = World(scheduler, 1, 4)
    world.obey()
    assert {flight.replica for flight in world.flying} == {1}
    scheduler.resume_replica(0)
    world.finish(0, "graded", 1.0)
    world.obey()
    assert world.flying[-1].replica == 0


def test_nothing_is_dispatched_while_no_replica_serves() -> None:
    scheduler = make(slots=4)
    scheduler.version_current(0, [0, 1])
    scheduler.replica_lost(0)
    scheduler.replica_lost(1)
    assert scheduler.poll() == []


def test_a_version_can_not_be_current_before_its_update_finished() -> None:
    scheduler = make()
    scheduler.version_current(0, [0, 1])
    with pytest.raises(StalenessViolation, match="before update 1 finished"):
        scheduler.version_current(1, [0, 1])


def test_a_resumed_scheduler_draws_what_was_not_trained_and_skips_nothing() -> None:
    scheduler = make(slots=3)
    world = World(scheduler, 1, 3)
    frontier = None
    trained_draws: set[int] = set()
    while frontier is None:
        world.obey()
        if world.training is not None:
            trained_draws = {int(g[1:6]) for g in world.trained}
            world.train()
            frontier = scheduler.frontier()
        else:
            world.finish(0, "graded", 1.0)
    assert frontier["updates_done"] == 1
    drawn = set(range(frontier["next_draw"]))
    assert set(frontier["redraw"]) == drawn - trained_draws

    config = ScheduleConfig(updates=4, batch_size=4, group_size=2)
    resumed = Scheduler.resumed(
        config, TaskOrder(FAMILIES, 0), frontier, slots=100, replicas=2, incarnation=1
    )
    resumed.version_current(1, [0, 1])
    groups = {c.group_id for c in resumed.poll() if isinstance(c, Dispatch)}
    assert {int(group[1:6]) for group in groups} >= set(frontier["redraw"])
    assert not groups & set(world.versions), "a redrawn group must not reuse an id"
