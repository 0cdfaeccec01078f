"""What the simulator finds out about the policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.policy import POLICIES, PolicyName, make_policy
from benchmarks.simulation.results import Result, throttled
from benchmarks.simulation.upstream import Upstream
from rl.errors import StalenessViolation
from rl.schedule.groups import PendingGroup
from rl.schedule.order import TaskOrder
from rl.simulation.bound import lower_bound
from rl.simulation.trace import Fate, Trace
from rl.simulation.workloads import Workload
from rl.simulation.world import ProtocolViolation, World
from tests.unit.benchmarks.simulated import run, small

Key = tuple[int, int, int]


def without_time(result: Result) -> Result:
    return replace(result, computed_s=0.0)


def fates(workload: Workload, policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every fate that was asked for in a run, by task, occurrence and attempt."""
    seen: dict[Key, Fate] = {}
    original = Trace.fate

    def fate(self: Trace, *key: int) -> Fate:
        task, occurrence, attempt = key
        assert key not in seen, "two attempts shared a fate"
        seen[task, occurrence, attempt] = original(self, *key)
        return seen[task, occurrence, attempt]

    bound = lower_bound(workload)
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "fate", fate)
        World(workload, make_policy(policy, workload), lambda update: None).run()
    assert bound == lower_bound(workload)
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_deterministic(policy: PolicyName) -> None:
    workload = small(failures={"masked_share": 0.05, "mtbf_s": 5000.0})
    assert without_time(run(workload, policy)) == without_time(run(workload, policy))
    other = workload.model_copy(update={"seed": 1})
    assert run(other, policy).end_s != run(workload, policy).end_s


def test_all_policies_see_the_same_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = small(durations__deadline_s=600.0)
    seen = {policy: fates(workload, policy, monkeypatch) for policy in POLICIES}
    draws = range(workload.schedule.updates * 4)
    order = TaskOrder([""] * 12, 0)
    trained = {(order.task(draw), draw // 12, attempt) for draw in draws for attempt in range(4)}
    # What never drops a group runs exactly the first draws; upstream's rule runs more.
    assert set(seen["ours"]) == set(seen["sync"]) == set(seen["one_step_off"]) == trained
    assert set(seen["upstream"]) > trained
    assert all(seen["upstream"][key] == fate for key, fate in seen["ours"].items())


@pytest.mark.parametrize("deadline", [None, 600.0])
def test_upstream_wastes_what_is_slow_and_ours_wastes_nothing(deadline: float | None) -> None:
    workload = small(durations__deadline_s=deadline)
    ours, upstream = run(workload, "ours"), run(workload, "upstream")
    assert ours.tally.wasted == ours.tally.left_over == 0
    assert ours.tally.duration_bias == pytest.approx(0, abs=1e-9)
    assert upstream.tally.waste > 0.2
    assert upstream.tally.duration_bias < -0.05


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_update_has_its_batch_and_nothing_is_too_stale(
    policy: PolicyName, staleness: int
) -> None:
    workload = small(schedule__max_staleness=staleness)
    result = run(workload, policy)
    assert result.tally.trained == 40 * 16
    assert result.max_staleness <= staleness
    tally = result.tally
    assert tally.dispatched == tally.trained + tally.wasted + tally.left_over
    assert 0 < result.trainer_utilisation <= 1
    assert 0 < result.replica_utilisation <= 1


def test_equal_durations_give_closed_forms() -> None:
    workload = small(durations__lognormal__cv=0.0, slots=16)
    # A publication, 300 s of sampling, 150 s of training, one after the other.
    assert run(workload, "sync").step_time_s == pytest.approx(5 + 300 + 150)
    # Two batches in three phases of sampling: one waits for the sampling before it and
    # for the update before that, and the trainer's work on it is seen 150 s later.
    updates = 40
    assert run(workload, "one_step_off").end_s == pytest.approx(5 + updates * 300 + 150)


def test_ours_is_close_to_the_bound_where_the_trainer_is_the_bottleneck() -> None:
    workload = small(trainer__update_s=600.0)
    result = run(workload, "ours")
    assert result.step_time_s == pytest.approx(result.bound.step_s, rel=0.05)
    assert result.trainer_utilisation > 0.95


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
    mtbf=st.sampled_from([None, 400.0, 3000.0]),
    masked=st.sampled_from([0.0, 0.2]),
    slots=st.sampled_from([2, 9, 32]),
    staleness=st.integers(0, 2),
    sync=st.sampled_from([0.0, 5.0, 400.0]),
)
def test_no_policy_stalls_or_loses_an_attempt_when_things_fail(
    policy: PolicyName,
    seed: int,
    mtbf: float | None,
    masked: float,
    slots: int,
    staleness: int,
    sync: float,
) -> None:
    workload = small(
        seed=seed,
        slots=slots,
        schedule__updates=6,
        schedule__max_staleness=staleness,
        trainer__sync_s=sync,
        engine__speed=((1, 1.0), (8, 0.5)),
        durations__lognormal__mean_s=60.0,
        durations__deadline_s=200.0,
        failures={"masked_share": masked, "mtbf_s": mtbf, "restart_s": 90.0},
    )
    tally = run(workload, policy).tally
    assert tally.left_over >= 0
    if not mtbf and not masked:
        assert tally.masked == 0 and tally.trained == 6 * 16
    if policy == "ours":
        assert tally.left_over == 0


def test_a_throttled_upstream_wastes_nothing_and_is_slower_than_ours() -> None:
    workload = small()
    best = throttled(workload, lower_bound(workload))
    assert best is not None
    assert best.tally.waste <= 0.005
    assert best.slots < workload.slots
    assert best.trained_per_hour < run(workload, "ours").trained_per_hour


class NeverDrops(Upstream):
    """Upstream's rule without its sink."""

    def _drop_stale(self, update: int) -> None:
        pass

    def _keep(self, group: PendingGroup) -> None:
        self._complete.append(group)


class Idle(Upstream):
    """Never opens anything."""

    def _may_open(self) -> bool:
        return False


def world_of(kind: type[Upstream], slots: int = 32) -> World:
    workload = small()
    order = TaskOrder([""] * 12, 0)
    policy = kind(workload.schedule, order, slots=slots, replicas=2)
    return World(workload, policy, lambda update: None)


def test_the_world_measures_staleness_itself() -> None:
    with pytest.raises(StalenessViolation, match="takes a group of version"):
        world_of(NeverDrops).run()


def test_the_world_refuses_a_policy_that_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolViolation, match="waits for nothing"):
        world_of(Idle).run()
    with pytest.raises(ProtocolViolation, match="has no slot"):
        world_of(Upstream, slots=33).run()


def test_nothing_is_kept_of_what_has_ended() -> None:
    workload = small()
    world = World(workload, make_policy("ours", workload), lambda update: None)
    world.run()
    assert not world._groups and not world._runs
