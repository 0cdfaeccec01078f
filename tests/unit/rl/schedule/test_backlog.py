"""Which draw is admitted next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl.schedule.backlog import Backlog
from rl.schedule.estimates import DurationEstimates
from tests.support.schedule_model.setting import DrawOrder
from tests.support.schedule_model.unhurried import unhurried

DRAWS = 12


def backlog(
    block: int = 4,
    next_draw: int = 0,
    redraw: tuple[int, ...] = (),
    seconds: dict[int, float] | None = None,
) -> Backlog:
    """Draw `n` is task `n`."""
    estimates = DurationEstimates()
    for task, duration in (seconds or {}).items():
        estimates.observe(task, duration)
    return Backlog(DrawOrder(), estimates, block, next_draw, redraw)


def taken(source: Backlog, count: int = DRAWS) -> list[int]:
    return [source.take()[0] for _ in range(count)]


def test_draws_come_in_order_while_nothing_is_known_of_their_tasks() -> None:
    assert taken(backlog()) == list(range(DRAWS))


def test_a_draw_comes_with_its_task() -> None:
    assert backlog(next_draw=5).take() == (5, 5)


def test_longer_tasks_come_first_but_only_inside_a_block() -> None:
    seconds = {0: 1.0, 1: 2.0, 2: 4.0, 3: 3.0, 7: 9.0}
    assert taken(backlog(block=4, seconds=seconds), 8) == [2, 3, 1, 0, 7, 4, 5, 6]


def test_what_is_learned_counts_from_the_next_block_on() -> None:
    estimates = DurationEstimates()
    source = Backlog(DrawOrder(), estimates, block=2)
    first = source.take()[0]
    estimates.observe(2, 1.0)
    estimates.observe(3, 100.0)
    assert [first, *taken(source, 3)] == [0, 1, 3, 2]


def test_draws_that_are_owed_are_opened_before_new_ones() -> None:
    source = backlog(block=2, next_draw=9, redraw=(7, 3, 4))
    assert taken(source, 5) == [3, 4, 7, 9, 10]
    assert source.next_draw == 12


def test_what_was_opened_and_not_taken_is_owed() -> None:
    source = backlog(block=3, next_draw=5, redraw=(1, 2, 3, 4))
    source.take()
    assert sorted(source.owed) == [2, 3, 4]
    assert source.next_draw == 5
    taken(source, 4)
    assert sorted(source.owed) == [6]
    assert source.next_draw == 7


@unhurried
@given(
    block=st.integers(1, 6),
    redraw=st.sets(st.integers(0, 9)),
    seconds=st.dictionaries(st.integers(0, 30), st.floats(0.1, 100.0)),
    count=st.integers(0, 30),
)
def test_every_draw_is_handed_out_once_or_still_owed(
    block: int, redraw: set[int], seconds: dict[int, float], count: int
) -> None:
    source = backlog(block, 10, tuple(redraw), seconds)
    out = taken(source, count)
    everything = [*out, *source.owed]
    assert len(set(everything)) == len(everything)
    assert set(everything) == redraw | set(range(10, source.next_draw))


@unhurried
@given(block=st.integers(1, 6), seconds=st.dictionaries(st.integers(0, 30), st.floats(0.1, 100.0)))
def test_no_draw_waits_longer_than_a_block(block: int, seconds: dict[int, float]) -> None:
    out = taken(backlog(block, seconds=seconds), 5 * block)
    for start in range(0, len(out), block):
        assert sorted(out[start : start + block]) == list(range(start, start + block))
