"""The scheduler's decisions about versions and replicas, one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from rl.errors import StalenessViolation
from rl.schedule.commands import CancelAttempt, Dispatch, DropGroup, RetireVersion
from tests.support.schedule_model.play import Play


def where(play: Play) -> Counter[int]:
    """Running attempts by replica."""
    return Counter(dispatch.replica for dispatch in play.running.values())


def stepped(play: Play) -> Play:
    """Make the next update; its version is not published."""
    play.train(play.until_step().update)
    return play


# ---- versions -----------------------------------------------------------


def test_nothing_runs_before_a_version_is_current() -> None:
    play = Play(start=False)
    assert play.poll() == []
    assert len(play.publish(0)) == 8


def test_a_version_can_not_be_current_before_its_update_finished() -> None:
    with pytest.raises(StalenessViolation, match="version 1 published before update 1 finished"):
        Play().publish(1)


def test_a_version_does_not_become_current_twice() -> None:
    with pytest.raises(StalenessViolation, match="version 0 after 0"):
        Play().publish(0)


def test_a_group_keeps_its_version_when_a_newer_one_is_current() -> None:
    play = stepped(Play(slots=3))
    (half,) = [group for group in play.groups() if len(play.of(group)) == 1]
    play.publish(1)
    play.end(play.of(half)[0], "masked")
    while half in play.groups():
        assert {d.version for d in play.running.values() if d.group_id == half} == {0}
        play.end(play.of(half)[0])
    play.grade(play.groups()[0])
    assert 1 in {d.version for d in play.running.values()}


def test_attempts_of_older_versions_go_before_new_groups() -> None:
    play = stepped(Play(slots=4, batch=4, group=4))
    assert [d.version for d in play.running.values()] == [0, 0, 0, 0]
    play.publish(1)
    (heard,) = play.end(play.of("g00001.0")[0], "masked")
    assert isinstance(heard, Dispatch)
    assert (heard.group_id, heard.version) == ("g00001.0", 0)


def test_a_version_is_retired_once_when_the_last_group_that_holds_it_is_complete() -> None:
    play = stepped(Play(batch=2))
    older = play.groups()[0]
    assert RetireVersion(0) not in play.publish(1)
    first, second = play.of(older)
    assert RetireVersion(0) not in play.end(first)
    assert RetireVersion(0) in play.end(second, reward=0.0)
    assert play.poll() == []


def test_a_version_without_groups_is_retired_when_a_newer_one_is_current() -> None:
    play = stepped(Play(staleness=0))
    assert RetireVersion(0) in play.publish(1)


def test_a_version_may_be_skipped() -> None:
    play = stepped(stepped(Play(batch=2)))
    assert play.running == {}
    heard = play.publish(2)
    assert RetireVersion(0) in heard
    assert {d.version for d in play.running.values()} == {2}


# ---- replicas -----------------------------------------------------------


def test_attempts_go_to_the_least_loaded_replica_that_serves_their_version() -> None:
    play = Play(slots=4)
    assert where(play) == {0: 2, 1: 2}
    generation = play.scheduler.replica_lost(1)
    play.end("g00000.0-a0")
    assert where(play) == {0: 2, 1: 2}
    play.scheduler.replica_back(1, 0, generation)
    play.end("g00000.0-a1")
    play.end("g00001.0-a1")
    assert where(play) == {0: 2, 1: 2}


def test_a_suspended_replica_gets_nothing_until_it_answers() -> None:
    play = Play(slots=4, start=False)
    play.scheduler.suspend_replica(0)
    play.publish(0)
    assert where(play) == {1: 4}
    play.scheduler.resume_replica(0)
    play.end("g00000.0-a0")
    assert where(play) == {0: 1, 1: 3}


def test_nothing_is_dispatched_while_no_replica_serves() -> None:
    play = Play(start=False)
    assert play.publish(0, {}) == []
    play.scheduler.replica_back(1, 0, 0)
    play.poll()
    assert where(play) == {1: 8}


def test_proofs_from_before_a_loss_count_for_nothing_when_they_come_late() -> None:
    play = Play(start=False)
    generation = play.scheduler.replica_lost(1)
    play.publish(0, {0: 0, 1: 0})
    assert where(play) == {0: 8}
    play.scheduler.replica_back(1, 0, 0)
    play.end("g00000.0-a0")
    assert where(play) == {0: 7}
    play.scheduler.replica_back(1, 0, generation)
    play.end("g00000.0-a1", "masked")
    assert where(play) == {0: 6, 1: 1}


def test_news_that_a_replica_is_back_may_come_before_its_version_is_current() -> None:
    play = stepped(Play(slots=2, batch=2, replicas=1))
    play.scheduler.replica_back(0, 1, play.scheduler.replica_lost(0))
    for attempt_id in list(play.running):
        play.end(attempt_id, "masked")
    play.publish(1, {})
    assert {d.version for d in play.running.values()} == {1}


def test_news_that_a_replica_is_back_with_an_older_version_serves_who_still_holds_it() -> None:
    play = stepped(Play(slots=2, batch=2))
    holder = play.groups()[0]
    generation = play.scheduler.replica_lost(0)
    play.publish(1, {1: 0})
    play.scheduler.replica_back(0, 0, generation)
    play.scheduler.suspend_replica(1)
    play.end(play.of(holder)[0], "masked")
    assert [d.replica for d in play.running.values() if d.attempt_id.endswith("a2")] == [0]


def test_news_that_a_replica_is_back_with_a_retired_version_is_ignored() -> None:
    play = stepped(Play(staleness=0, replicas=1))
    generation = play.scheduler.replica_lost(0)
    play.publish(1, {})
    play.scheduler.replica_back(0, 0, generation)
    assert play.poll() == []
    assert play.running == {}


def held_by_replica_0(slots: int) -> tuple[Play, str]:
    """Version 1 is current on replica 1, a group holds version 0, on replica 0 only."""
    play = stepped(Play(batch=2, slots=slots))
    holder = play.groups()[0]
    play.scheduler.replica_back(1, 1, play.scheduler.replica_lost(1))
    play.publish(1, {0: 0, 1: 1})
    return play, holder


def test_attempts_that_wait_for_a_version_that_no_replica_serves_are_given_up() -> None:
    play, holder = held_by_replica_0(slots=1)
    (running,) = play.of(holder)
    play.scheduler.replica_lost(0)
    heard = play.poll()
    assert [c.attempt_id for c in heard if isinstance(c, CancelAttempt)] == [running]
    heard = play.end(running, "cancelled")
    assert [c.group_id for c in heard if isinstance(c, DropGroup)] == [holder]
    assert RetireVersion(0) in heard


def test_attempts_that_end_masked_after_their_version_was_lost_are_given_up_too() -> None:
    play, holder = held_by_replica_0(slots=2)
    first, second = play.of(holder)
    play.scheduler.replica_lost(0)
    assert play.poll() == []
    assert [c for c in play.end(first, "masked") if isinstance(c, CancelAttempt)]
    heard = play.end(second, "masked")
    assert [c.group_id for c in heard if isinstance(c, DropGroup)] == [holder]
    assert RetireVersion(0) in heard
    assert {d.version for d in play.running.values()} == {1}


def test_a_group_whose_version_was_lost_is_kept_if_enough_of_it_is_graded() -> None:
    play = stepped(Play(group=3, batch=3, slots=3))
    holder = play.groups()[0]
    play.scheduler.replica_back(1, 1, play.scheduler.replica_lost(1))
    play.publish(1, {0: 0, 1: 1})
    first, second, third = play.of(holder)
    play.scheduler.replica_lost(0)
    play.end(first, "masked")
    play.end(second)
    heard = play.end(third, reward=0.0)
    assert not [c for c in heard if isinstance(c, DropGroup)]
    assert play.scheduler.streamed_groups == 1


def test_nothing_is_given_up_while_no_replica_serves_the_current_version() -> None:
    play = Play(slots=2, replicas=1, retries=2)
    generation = play.scheduler.replica_lost(0)
    for attempt_id in list(play.running):
        assert play.end(attempt_id, "masked") == []
    play.scheduler.replica_back(0, 0, generation)
    heard = play.poll()
    assert [c.group_id for c in heard if isinstance(c, Dispatch)] == ["g00000.0"] * 2
