"""The feasibility window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import StalenessViolation
from rl.schedule.window import DueWindow
from tests.support.schedule_model.unhurried import unhurried

UPDATES = 6


def filled(window: DueWindow, version: int) -> int:
    """Admit all that the window allows of a version."""
    count = 0
    while window.can_admit(version):
        window.admit(version)
        count += 1
    return count


def train(window: DueWindow, version: int, groups: int) -> None:
    """Make one update of so many groups of a version."""
    for _ in range(groups):
        window.place(version, window.due(version))
    window.advance()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_as_many_groups_are_admitted_ahead_as_the_bound_allows(staleness: int) -> None:
    window = DueWindow(batch=3, max_staleness=staleness, updates=UPDATES)
    assert filled(window, 0) == 3 * (staleness + 1)
    assert window.open == 3 * (staleness + 1)


def test_a_refused_admission_is_an_error() -> None:
    window = DueWindow(batch=1, max_staleness=0, updates=UPDATES)
    window.admit(0)
    with pytest.raises(StalenessViolation, match="could go stale"):
        window.admit(0)


def test_a_dropped_group_makes_room_for_another() -> None:
    window = DueWindow(batch=1, max_staleness=0, updates=UPDATES)
    window.close(window.admit(0))
    assert window.can_admit(0)


def test_a_version_too_old_for_the_forming_batch_admits_nothing() -> None:
    window = DueWindow(batch=1, max_staleness=0, updates=UPDATES)
    window.admit(0)
    train(window, 0, 1)
    assert not window.can_admit(0)
    assert window.can_admit(1)


def test_no_group_is_due_after_the_last_update() -> None:
    window = DueWindow(batch=2, max_staleness=3, updates=UPDATES, done=UPDATES - 1)
    assert window.due(UPDATES - 1) == UPDATES
    assert filled(window, UPDATES - 1) == 2


def test_a_newer_group_may_not_take_the_last_place_of_an_older_one() -> None:
    window = DueWindow(batch=2, max_staleness=1, updates=UPDATES)
    for _ in range(3):
        window.admit(0)
    train(window, 0, 2)
    newer = window.admit(1)
    assert window.can_place(newer)
    window.place(1, newer)
    newer = window.admit(1)
    assert not window.can_place(newer)
    with pytest.raises(StalenessViolation, match="can't take a group of version 1"):
        window.place(1, newer)
    window.place(0, window.due(0))
    assert window.full


@pytest.mark.parametrize("version", [0, 3])
def test_a_group_is_placed_neither_beyond_the_bound_nor_from_the_future(version: int) -> None:
    window = DueWindow(batch=1, max_staleness=1, updates=UPDATES, done=2)
    with pytest.raises(StalenessViolation, match=f"can't take a group of version {version}"):
        window.place(version, window.forming)


def test_a_full_batch_takes_no_more() -> None:
    window = DueWindow(batch=1, max_staleness=1, updates=UPDATES)
    due = window.admit(0)
    window.admit(0)
    window.place(0, due)
    assert window.full
    assert not window.can_place(due)


def test_the_next_batch_begins_only_after_a_full_one() -> None:
    window = DueWindow(batch=2, max_staleness=0, updates=UPDATES)
    window.place(0, window.admit(0))
    with pytest.raises(StalenessViolation, match="batch 1 is not full"):
        window.advance()
    assert window.forming == 1


def placeable_in_time(batch: int, forming: int, placed: int, dues: list[int]) -> bool:
    """Naive: hand out places, earliest due first."""
    places = [forming + (placed + index) // batch for index in range(len(dues))]
    return all(place <= due for place, due in zip(places, sorted(dues), strict=True))


@unhurried
@given(
    batch=st.integers(1, 3),
    staleness=st.integers(0, 3),
    lag=st.integers(0, 2),
    choices=st.lists(st.integers(0, 99), max_size=80),
)
def test_whatever_is_open_can_always_be_placed_in_time(
    batch: int, staleness: int, lag: int, choices: list[int]
) -> None:
    window = DueWindow(batch, staleness, UPDATES)
    open_groups: list[int] = []  # versions
    version = placed = 0
    for choice in choices:
        if choice % 3 == 0:
            admitted = [*open_groups, version]
            dues = [window.due(v) for v in admitted]
            fits = placeable_in_time(batch, window.forming, placed, dues)
            assert window.can_admit(version) == fits
            if fits:
                window.admit(version)
                open_groups = admitted
        elif choice % 3 == 1 and open_groups:
            group = open_groups[choice % len(open_groups)]
            if window.can_place(window.due(group)):
                window.place(group, window.due(group))
                open_groups.remove(group)
                placed += 1
        elif open_groups and choice % 2:
            window.close(window.due(open_groups.pop(choice % len(open_groups))))
        if window.full and window.forming < UPDATES:
            window.advance()
            placed = 0
            version = max(version, window.forming - 1 - lag)
        dues = [window.due(v) for v in open_groups]
        assert placeable_in_time(batch, window.forming, placed, dues)
        assert window.open == len(open_groups)
