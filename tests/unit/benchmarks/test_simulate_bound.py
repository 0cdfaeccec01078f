"""The lower bound, against hand computations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.schedule.order import TaskOrder
from rl.simulation.bound import Recurrence, batches_in_order, lower_bound
from rl.simulation.trace import Trace
from tests.unit.benchmarks.simulated import small


def test_recurrence_matches_a_hand_computation() -> None:
    recurrence = Recurrence(max_staleness=1, train_s=10.0, sync_s=1.0, group_s=2.0)
    # F(1) = max(0 + 10, 0 + 1 + 20 + 2) = 23    F(2) = max(23 + 10, 0 + 1 + 5 + 2) = 33
    # F(3) = max(33 + 10, 23 + 1 + 30 + 2) = 56  F(4) = max(56 + 10, 33 + 1 + 4 + 2) = 66
    assert [recurrence.advance(longest) for longest in (20, 5, 30, 4)] == [23, 33, 56, 66]
    assert recurrence.end == 66


@given(
    staleness=st.integers(0, 4),
    longest=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    train=st.integers(1, 50),
    sync=st.integers(0, 9),
    group=st.integers(0, 9),
)
def test_recurrence_matches_its_definition(
    staleness: int, longest: list[int], train: int, sync: int, group: int
) -> None:
    def end(k: int) -> float:
        if k < 1:
            return 0.0
        return max(end(k - 1) + train, end(k - staleness - 1) + sync + longest[k - 1] + group)

    recurrence = Recurrence(max_staleness=staleness, train_s=train, sync_s=sync, group_s=group)
    assert [recurrence.advance(value) for value in longest] == [
        end(k) for k in range(1, len(longest) + 1)
    ]


def test_blocks_follow_the_order_of_draws() -> None:
    workload = small(schedule__updates=5)
    trace, order = Trace(workload), TaskOrder([""] * 12, 0)
    blocks = list(batches_in_order(workload))
    assert len(blocks) == 5
    third = [
        trace.fate(order.task(draw), draw // 12, attempt).seconds
        for draw in (8, 9, 10, 11)
        for attempt in range(4)
    ]
    assert blocks[2] == (max(third), pytest.approx(sum(third)))


def test_equal_durations_bound_a_step_in_closed_form() -> None:
    workload = small(durations__lognormal__cv=0.0, schedule__max_staleness=0)
    bound = lower_bound(workload)
    assert bound.recurrence_s == pytest.approx(5 + 300 + 150 / 4)
    assert bound.slots_s == pytest.approx(16 * 300 / 32)
    assert bound.step_s == bound.recurrence_s


def test_few_slots_bound_a_step() -> None:
    bound = lower_bound(small(durations__lognormal__cv=0.0, slots=4))
    assert bound.step_s == bound.slots_s == pytest.approx(16 * 300 / 4)
