"""How long tasks take."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.schedule.estimates import DurationEstimates
from tests.support.schedule_model.unhurried import unhurried

SECONDS = st.floats(0.1, 1e4)


def observed(*durations: tuple[int, float]) -> DurationEstimates:
    estimates = DurationEstimates()
    for task, seconds in durations:
        estimates.observe(task, seconds)
    return estimates


def test_nothing_is_known_at_first() -> None:
    assert DurationEstimates().estimate(3) == 0.0


def test_a_task_never_seen_counts_as_an_average_one() -> None:
    assert observed((0, 10.0), (1, 30.0)).estimate(2) == 20.0


def test_a_task_seen_once_lies_between_its_duration_and_the_average() -> None:
    estimates = observed((0, 10.0), (1, 30.0))
    assert estimates.estimate(0) == 15.0
    assert estimates.estimate(1) == 25.0


def test_a_task_seen_often_is_known_by_its_own_durations() -> None:
    estimates = observed((0, 10.0), *[(1, 100.0)] * 99)
    assert estimates.estimate(1) == pytest.approx(100.0, rel=0.01)


@unhurried
@given(durations=st.lists(st.tuples(st.integers(0, 5), SECONDS), min_size=1))
def test_estimates_stay_within_what_was_seen(durations: list[tuple[int, float]]) -> None:
    estimates = observed(*durations)
    seen = [seconds for _, seconds in durations]
    for task in range(7):
        assert min(seen) * 0.999 <= estimates.estimate(task) <= max(seen) * 1.001


@unhurried
@given(durations=st.lists(st.tuples(st.integers(0, 5), SECONDS)), more=SECONDS)
def test_a_snapshot_survives_json_and_is_learned_on_from(
    durations: list[tuple[int, float]], more: float
) -> None:
    estimates = observed(*durations)
    restored = DurationEstimates(json.loads(json.dumps(estimates.snapshot())))
    for either in (estimates, restored):
        either.observe(2, more)
    for task in range(7):
        assert restored.estimate(task) == pytest.approx(estimates.estimate(task))
