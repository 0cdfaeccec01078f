"""The engine's model, against closed forms and a slow, obvious model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.simulation.engine import Agenda, Engine, Run, SpeedCurve

CURVE = ((1, 1.0), (4, 0.7), (8, 0.3))


class Bench:
    """An engine whose ends are written down."""

    def __init__(
        self, points: tuple[tuple[int, float], ...] = CURVE, deadline_s: float | None = None
    ) -> None:
        self.agenda = Agenda()
        self.ends: dict[str, float] = {}
        self.masked: set[str] = set()
        self.engine = Engine(2, SpeedCurve(points), deadline_s, self.agenda, self._ended)

    def _ended(self, run: Run) -> None:
        assert run.attempt_id not in self.ends
        self.ends[run.attempt_id] = self.agenda.now
        if run.masked:
            self.masked.add(run.attempt_id)

    def start(self, name: str, work: float, replica: int = 0, masked: bool = False) -> Run:
        run = Run(name, None, replica, work, masked)
        self.engine.start(run)
        return run

    def settle(self) -> dict[str, float]:
        while True:
            try:
                self.agenda.step()
            except IndexError:
                return self.ends


def test_curve_is_piecewise_linear_and_then_constant() -> None:
    curve = SpeedCurve(CURVE)
    assert [curve(n) for n in (1, 2, 4, 6, 8, 100)] == pytest.approx([1, 0.9, 0.7, 0.5, 0.3, 0.3])
    assert SpeedCurve()(1000) == 1.0
    assert SpeedCurve().constant and not curve.constant


@pytest.mark.parametrize("n", [1, 3, 4, 6, 20])
def test_equal_attempts_end_together_at_the_speed_of_their_number(n: int) -> None:
    bench = Bench()
    for index in range(n):
        bench.start(str(index), 100.0)
    expected = 100.0 / SpeedCurve(CURVE)(n)
    assert list(bench.settle().values()) == pytest.approx([expected] * n)


def test_attempts_on_another_replica_do_not_matter() -> None:
    bench = Bench()
    bench.start("alone", 100.0, replica=0)
    for index in range(5):
        bench.start(str(index), 1000.0, replica=1)
    assert bench.settle()["alone"] == pytest.approx(100.0)


def test_a_cancelled_attempt_makes_the_others_faster() -> None:
    bench = Bench(((1, 1.0), (2, 0.5)))
    bench.start("kept", 100.0)
    other = bench.start("cancelled", 500.0)
    bench.agenda.at(100.0, bench.engine.cancel, other)
    assert bench.settle() == {"kept": pytest.approx(150.0)}  # 50 of work by 100 s, then alone
    assert bench.engine.running == 0


def test_the_deadline_counts_the_time_that_has_passed() -> None:
    bench = Bench(((1, 1.0), (2, 0.5)), deadline_s=150.0)
    bench.start("long", 100.0)
    bench.start("short", 50.0)
    # Both at half speed until 100 s, when the short one ends; then 50 s are left.
    assert bench.settle() == pytest.approx({"short": 100.0, "long": 150.0})
    late = Bench(((1, 1.0), (2, 0.5)), deadline_s=150.0)
    late.start("a", 140.0)
    late.start("b", 140.0, masked=True)
    assert late.settle() == pytest.approx({"a": 150.0, "b": 150.0})
    assert late.masked == set()  # out of time before the fault struck


def test_a_lost_replica_gives_back_what_ran_on_it_and_serves_again() -> None:
    bench = Bench()
    bench.start("a", 100.0)
    bench.start("b", 5.0)
    bench.start("c", 100.0, replica=1)
    lost: list[str] = []
    bench.agenda.at(50.0, lambda: lost.extend(run.attempt_id for run in bench.engine.lose(0)))
    bench.agenda.at(60.0, lambda: bench.start("d", 10.0))
    ends = bench.settle()
    assert lost == ["a"]
    assert set(ends) == {"b", "c", "d"}
    assert ends["d"] == pytest.approx(70.0)


def slow_model(
    jobs: list[tuple[float, float]], curve: SpeedCurve, deadline_s: float | None
) -> list[float]:
    """Ends of (start, work) jobs on one replica, recomputed whole at every change."""
    left = [work for _, work in jobs]
    ends: list[float | None] = [None] * len(jobs)
    now = 0.0
    while any(end is None for end in ends):
        on = [i for i, (start, _) in enumerate(jobs) if start <= now and ends[i] is None]
        speed = curve(len(on)) if on else 1.0
        moments = [start for start, _ in jobs if start > now]
        moments += [now + left[i] / speed for i in on]
        if deadline_s is not None:
            moments += [jobs[i][0] + deadline_s for i in on]
        then = min(moments)
        for i in on:
            left[i] -= (then - now) * speed
            out_of_time = deadline_s is not None and then >= jobs[i][0] + deadline_s - 1e-9
            if left[i] <= 1e-9 or out_of_time:
                ends[i] = then
        now = then
    return [end for end in ends if end is not None]


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 50).map(float), st.integers(1, 80).map(float)),
        min_size=1,
        max_size=12,
    ),
    deadline=st.sampled_from([None, 60.0, 200.0]),
)
def test_any_arrivals_end_as_in_the_slow_model(
    jobs: list[tuple[float, float]], deadline: float | None
) -> None:
    bench = Bench(deadline_s=deadline)
    for index, (start, work) in enumerate(jobs):
        capped = work if deadline is None else min(work, deadline)
        bench.agenda.at(start, bench.start, str(index), capped)
    ends = bench.settle()
    expected = slow_model(jobs, SpeedCurve(CURVE), deadline)
    assert [ends[str(index)] for index in range(len(jobs))] == pytest.approx(expected)
