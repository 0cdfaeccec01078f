"""The scheduler's decisions about groups and batches, one by one.

Its invariants under every interleaving are for `test_exhaustive` and
`test_state_machine`; versions and replicas for `test_scheduler_versions`.
"""

from __future__ import annotations

import json

import pytest

from rl.errors import StalenessViolation
from rl.schedule.commands import (
    CancelAttempt,
    Command,
    Dispatch,
    DropGroup,
    StepUpdate,
    StreamAttempt,
    StreamGroup,
)
from rl.schedule.scheduler import Frontier
from tests.support.schedule_model.play import Play


def kinds(commands: list[Command], *wanted: type) -> list[Command]:
    return [command for command in commands if isinstance(command, wanted)]


def reached(frontier: Frontier, batch: int = 4) -> Play:
    """A new driver's scheduler, from a frontier that has been on disk."""
    read = json.loads(json.dumps(frontier))
    return Play(frontier=read, incarnation=1, slots=100, batch=batch)


# ---- admission ----------------------------------------------------------


def test_no_more_is_admitted_ahead_of_the_trainer_than_the_bound() -> None:
    assert len(Play(slots=100, staleness=0).running) == 4
    assert len(Play(slots=100, staleness=1).running) == 8
    assert len(Play(slots=100, staleness=3).running) == 16


def test_a_finished_group_makes_no_room_until_its_batch_is_trained() -> None:
    play = Play(slots=100, staleness=0)
    step = play.until_step()
    assert play.poll() == []
    play.train(step.update)
    assert play.running == {}, "version 0 is too old for update 2"
    assert len(kinds(play.publish(1), Dispatch)) == 4


def test_no_group_is_admitted_that_no_update_is_left_for() -> None:
    play = Play(updates=2, slots=100, staleness=3)
    opened = set(play.groups())
    for update in (1, 2):
        assert play.until_step().update == update
        play.train(update)
        opened |= set(play.groups())
    assert len(opened) == 4
    assert play.scheduler.done
    assert play.running == {}


def test_slots_are_filled_group_by_group() -> None:
    play = Play(slots=3)
    assert [d.group_id for d in play.running.values()] == ["g00000.0", "g00000.0", "g00001.0"]
    heard = play.end(play.of("g00000.0")[0])
    assert [c.group_id for c in heard if isinstance(c, Dispatch)] == ["g00001.0"]


def test_long_tasks_go_first_inside_a_block_of_one_batch() -> None:
    durations = {"0": (1, 10.0), "1": (1, 90.0), "2": (1, 10.0), "3": (1, 500.0)}
    play = Play(frontier=Frontier(updates_done=0, next_draw=0, redraw=[], durations=durations))
    assert play.groups() == ["g00001.0", "g00000.0", "g00003.0", "g00002.0"]


def test_a_task_takes_as_long_as_its_graded_attempts_from_dispatch() -> None:
    play = Play(slots=2)
    first, second = play.of("g00000.0")
    play.clock = 5.0
    play.end(first, "masked")
    play.clock = 7.0
    play.end(second)
    (relaunched,) = play.of("g00000.0")
    play.clock = 11.0
    play.end(relaunched)
    assert play.scheduler.frontier()["durations"] == {"0": (2, 7.0 + 6.0)}


# ---- batches ------------------------------------------------------------


def test_a_group_is_streamed_when_it_completes_and_a_step_follows_the_last() -> None:
    play = Play()
    first, second = play.of("g00002.0")
    assert kinds(play.end(first), StreamGroup) == []
    assert kinds(play.end(second, reward=0.0), StreamGroup, StepUpdate) == [
        StreamGroup(1, "g00002.0")
    ]
    assert kinds(play.grade("g00000.0"), StreamGroup, StepUpdate) == [
        StreamGroup(1, "g00000.0"),
        StepUpdate(1, ("g00002.0", "g00000.0")),
    ]
    assert play.scheduler.training


def test_groups_that_complete_during_a_step_are_streamed_after_it() -> None:
    play = Play()
    play.until_step()
    later = play.groups()[0]
    assert kinds(play.grade(later), StreamGroup) == []
    assert play.scheduler.ready_groups == 1
    assert StreamGroup(2, later) in play.train(1)


def test_a_place_owed_to_an_older_group_is_not_given_to_a_younger_one() -> None:
    play = Play(batch=2, slots=100)
    oldest = play.groups()[1]
    play.grade(play.groups()[0])
    play.train(1)
    younger = next(c.group_id for c in play.publish(1) if isinstance(c, Dispatch))
    assert kinds(play.grade(younger), StreamGroup) == []
    heard = play.grade(oldest)
    assert kinds(heard, StreamGroup, StepUpdate) == [
        StreamGroup(2, oldest),
        StepUpdate(2, (oldest,)),
    ]


def test_attempts_of_a_due_group_are_streamed_as_they_are_graded() -> None:
    play = Play(staleness=0, group=4, batch=4, min_group=4)
    first, second, third, fourth = play.of("g00000.0")
    assert play.end(first) == [StreamAttempt(1, "g00000.0", first)]
    assert kinds(play.end(second, "masked"), StreamAttempt) == []
    assert play.end(third) == [StreamAttempt(1, "g00000.0", third)]
    assert play.end(fourth) == [StreamAttempt(1, "g00000.0", fourth)]
    (last,) = play.of("g00000.0")
    heard = play.end(last, reward=0.0)
    assert heard == [StreamGroup(1, "g00000.0"), StepUpdate(1, ("g00000.0",))]


def test_attempts_graded_before_their_group_was_due_are_streamed_when_it_is() -> None:
    play = Play(batch=2)
    waiting = play.groups()[1]
    first, second = play.of(waiting)
    assert kinds(play.end(first), StreamAttempt) == []
    play.grade(play.groups()[0])
    assert kinds(play.train(1), StreamAttempt) == [StreamAttempt(2, waiting, first)]
    assert StreamGroup(2, waiting) in play.end(second, reward=0.0)


def test_updates_finish_in_order_and_after_their_step() -> None:
    play = Play()
    with pytest.raises(StalenessViolation, match="out of order"):
        play.train(1)
    play.until_step()
    with pytest.raises(StalenessViolation, match="out of order"):
        play.train(2)
    play.train(1)
    with pytest.raises(StalenessViolation, match="out of order"):
        play.train(1)


# ---- attempts that fail -------------------------------------------------


def test_a_masked_attempt_is_relaunched_ahead_of_younger_groups_under_a_new_id() -> None:
    play = Play(slots=2)
    first = play.running["g00000.0-a0"]
    (again,) = play.end("g00000.0-a0", "masked")
    assert isinstance(again, Dispatch)
    assert again.attempt_id == "g00000.0-a2"
    assert (again.group_id, again.task) == (first.group_id, first.task)


def test_a_group_with_too_few_graded_attempts_is_dropped_and_replaced_by_a_fresh_draw() -> None:
    play = Play(staleness=0, retries=0, slots=100)
    first, second = play.of("g00000.0")
    assert play.end(first) == [StreamAttempt(1, "g00000.0", first)]
    heard = play.end(second, "masked")
    assert kinds(heard, DropGroup) == [DropGroup("g00000.0", "only 1 of its attempts were graded")]
    assert [c.task for c in heard if isinstance(c, Dispatch)] == [2, 2]


def test_a_group_that_lost_some_attempts_is_kept_while_enough_are_graded() -> None:
    play = Play(group=3, batch=3, retries=0)
    first, second, third = play.of("g00000.0")
    play.end(first, "masked")
    play.end(second, reward=0.0)
    assert StreamGroup(1, "g00000.0") in play.end(third)


def test_what_runs_of_a_hopeless_group_is_cancelled_once() -> None:
    play = Play(group=4, batch=4, min_group=3, retries=0, slots=4)
    first, second, third, fourth = play.of("g00000.0")
    assert kinds(play.end(first, "masked"), CancelAttempt) == []
    heard = play.end(second, "masked")
    reason = "too few of its group can still be graded"
    assert kinds(heard, CancelAttempt) == [
        CancelAttempt(third, reason),
        CancelAttempt(fourth, reason),
    ]
    assert kinds(play.end(third, "cancelled"), CancelAttempt, DropGroup) == []
    assert kinds(play.end(fourth, "graded"), DropGroup) == [
        DropGroup("g00000.0", "only 1 of its attempts were graded")
    ]


def test_waiting_attempts_of_a_hopeless_group_are_not_dispatched() -> None:
    play = Play(group=4, batch=4, min_group=4, retries=0, slots=2)
    assert kinds(play.end("g00000.0-a0", "masked"), Dispatch)[0] == play.running["g00001.0-a0"]
    assert kinds(play.end("g00000.0-a1", "cancelled"), DropGroup)


def test_equal_rewards_are_replaced_up_to_the_limit_of_each_update_only() -> None:
    play = Play(batch=2, staleness=0, refill=1)
    heard = play.grade(play.groups()[0], 1.0, 1.0)
    assert kinds(heard, DropGroup) == [DropGroup("g00000.0", "all rewards are equal")]
    assert StepUpdate(1, ("g00001.0",)) in play.grade("g00001.0", 0.0, 0.0)
    play.train(1)
    play.publish(1)
    assert kinds(play.grade("g00002.0", 1.0, 1.0), DropGroup)
    assert play.scheduler.counts.refilled_groups == 2


def test_an_attempt_ends_once() -> None:
    play = Play()
    attempt_id = next(iter(play.running))
    play.end(attempt_id)
    with pytest.raises(KeyError):
        play.scheduler.attempt_finished(attempt_id, "graded", 1.0, 0.0)


def test_ends_are_counted_by_their_outcome() -> None:
    play = Play(slots=4, retries=0)
    first, second, third, fourth = play.running
    play.end(first)
    play.end(second, "masked")
    play.end(third, "cancelled")
    play.end(fourth)
    counts = play.scheduler.counts
    assert (counts.graded, counts.masked, counts.cancelled) == (2, 1, 1)
    assert counts.dropped_groups == 2
    assert counts.dispatched == 4 + play.scheduler.in_flight


# ---- resume -------------------------------------------------------------


def test_a_frontier_owes_every_draw_that_was_opened_and_not_trained_or_dropped() -> None:
    play = Play(retries=0)
    play.grade("g00001.0")
    play.end("g00000.0-a0", "masked")
    play.end("g00000.0-a1")
    assert play.scheduler.frontier()["redraw"] == [1, 2, 3, 4, 5]
    play.grade("g00002.0")
    assert play.scheduler.training
    frontier = play.scheduler.frontier()
    assert frontier["redraw"] == [1, 2, 3, 4, 5], "the batch is not trained yet"
    assert (frontier["updates_done"], frontier["next_draw"]) == (0, 6)
    play.train(1)
    frontier = play.scheduler.frontier()
    assert (frontier["updates_done"], frontier["redraw"]) == (1, [3, 4, 5])


def test_a_resumed_scheduler_draws_what_is_owed_first_and_reuses_no_id() -> None:
    play = Play()
    before = set(play.running)
    play.until_step()
    play.train(1)
    before |= set(play.running)
    resumed = reached(play.scheduler.frontier())
    assert [d.task for d in resumed.running.values()] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert not set(resumed.running) & before
    assert {d.version for d in resumed.running.values()} == {1}


def test_a_resumed_scheduler_goes_on_with_the_next_update_and_knows_durations() -> None:
    play = Play(batch=2)
    play.clock = 30.0
    play.until_step()
    play.train(1)
    resumed = reached(play.scheduler.frontier(), batch=2)
    assert resumed.until_step().update == 2
    assert list(resumed.scheduler.frontier()["durations"]["0"]) == [2, 60.0]
    with pytest.raises(StalenessViolation, match="before update 2 finished"):
        resumed.publish(2)


def test_a_scheduler_resumed_at_its_last_update_is_done() -> None:
    frontier = Frontier(updates_done=4, next_draw=9, redraw=[8], durations={})
    resumed = reached(frontier)
    assert resumed.scheduler.done
    assert resumed.heard == []
