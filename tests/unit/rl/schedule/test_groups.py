"""One group of attempts."""

from __future__ import annotations

import pytest

from rl.schedule.groups import PendingGroup


def group(size: int = 3, retries: int = 1) -> PendingGroup:
    return PendingGroup("g00007.0", 7, 7, version=2, due=4, waiting=size, retries=retries)


def launched(pending: PendingGroup) -> list[str]:
    return [pending.launch() for _ in range(pending.waiting)]


def test_every_launch_has_an_id_of_its_own_also_after_a_relaunch() -> None:
    pending = group()
    first = launched(pending)
    pending.finish(first[0], "masked", None)
    assert len({*first, pending.launch()}) == 4


def test_nothing_is_launched_that_does_not_wait() -> None:
    pending = group()
    launched(pending)
    with pytest.raises(ValueError, match="no attempt waiting"):
        pending.launch()


def test_a_masked_attempt_waits_again_while_retries_are_left() -> None:
    pending = group(retries=1)
    first, second, third = launched(pending)
    pending.finish(first, "masked", None)
    assert pending.waiting == 1
    pending.finish(second, "masked", None)
    assert pending.waiting == 1
    pending.finish(third, "graded", 1.0)
    pending.finish(pending.launch(), "graded", 0.0)
    assert pending.complete
    assert list(pending.rewards.values()) == [1.0, 0.0]


def test_a_cancelled_attempt_is_not_relaunched() -> None:
    pending = group(retries=1)
    pending.finish(launched(pending)[0], "cancelled", None)
    assert pending.waiting == 0


def test_a_masked_attempt_has_no_reward_even_if_one_came_with_it() -> None:
    pending = group(retries=0)
    pending.finish(launched(pending)[0], "masked", 1.0)
    assert pending.rewards == {}


def test_a_grade_without_a_reward_is_an_error() -> None:
    pending = group()
    attempt = launched(pending)[0]
    with pytest.raises(ValueError, match="without a reward"):
        pending.finish(attempt, "graded", None)


def test_an_attempt_ends_once() -> None:
    pending = group()
    attempt = launched(pending)[0]
    pending.finish(attempt, "graded", 1.0)
    with pytest.raises(ValueError, match="is not running"):
        pending.finish(attempt, "graded", 1.0)
    with pytest.raises(ValueError, match="is not running"):
        pending.finish("g00007.0-a9", "graded", 1.0)


def test_what_can_still_be_graded_counts_waiting_running_and_graded() -> None:
    pending = group(retries=0)
    first = pending.launch()
    assert pending.can_reach(3)
    pending.finish(first, "masked", None)
    assert pending.can_reach(2)
    assert not pending.can_reach(3)


def test_an_abandoned_group_is_complete_when_its_last_attempt_ends() -> None:
    pending = group(retries=2)
    attempt = pending.launch()
    pending.abandon_waiting()
    assert not pending.complete
    pending.finish(attempt, "masked", None)
    assert pending.complete
    assert not pending.can_reach(1)


@pytest.mark.parametrize(
    ("rewards", "flat"), [([1.0, 1.0, 1.0], True), ([1.0, 0.0, 1.0], False), ([0.5], True)]
)
def test_equal_rewards_hold_no_signal(rewards: list[float], flat: bool) -> None:
    pending = group()
    for attempt, reward in zip(launched(pending), rewards, strict=False):
        pending.finish(attempt, "graded", reward)
    assert pending.zero_variance == flat
