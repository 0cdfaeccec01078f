"""The replicas as the scheduler sees them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rl.schedule.replicas import ReplicaPool
from tests.support.schedule_model.unhurried import unhurried


def pool(count: int = 2, version: int = 0) -> ReplicaPool:
    """A pool whose replicas all serve a version."""
    made = ReplicaPool(count)
    for index in range(count):
        made.proven(index, version, 0)
    return made


def test_work_goes_to_a_least_loaded_replica_lowest_index_first() -> None:
    replicas = pool(3)
    placed: list[int | None] = []
    for _ in range(4):
        index = replicas.least_loaded(0)
        assert index is not None
        replicas.took(index)
        placed.append(index)
    assert placed == [0, 1, 2, 0]
    replicas.gave(2)
    assert replicas.least_loaded(0) == 2
    assert [replicas.load(index) for index in range(3)] == [2, 1, 0]


def test_a_version_that_nobody_serves_has_no_replica() -> None:
    replicas = pool()
    assert replicas.least_loaded(1) is None
    assert not replicas.serves(1)


def test_a_suspended_replica_gets_nothing_though_it_serves() -> None:
    replicas = pool(1)
    replicas.suspend(0)
    assert replicas.least_loaded(0) is None
    assert replicas.serves(0)
    replicas.resume(0)
    assert replicas.least_loaded(0) == 0


def test_a_lost_replica_serves_nothing_until_it_proves_itself_in_its_new_generation() -> None:
    replicas = pool(1)
    generation = replicas.lost(0)
    assert replicas.least_loaded(0) is None
    assert not replicas.serves(0)
    assert not replicas.proven(0, 0, generation - 1)
    assert replicas.least_loaded(0) is None
    assert replicas.proven(0, 0, generation)
    assert replicas.least_loaded(0) == 0


def test_a_lost_replica_is_suspended_no_more() -> None:
    replicas = pool(1)
    replicas.suspend(0)
    replicas.proven(0, 0, replicas.lost(0))
    assert replicas.least_loaded(0) == 0


def test_what_ran_on_a_lost_replica_weighs_on_it_until_it_ends() -> None:
    replicas = pool(2)
    replicas.took(0)
    replicas.proven(0, 0, replicas.lost(0))
    assert replicas.least_loaded(0) == 1
    replicas.gave(0)
    assert replicas.least_loaded(0) == 0


def test_a_retired_version_is_served_by_nobody() -> None:
    replicas = pool(2)
    replicas.proven(0, 1, 0)
    replicas.retired(0)
    assert replicas.least_loaded(0) is None
    assert not replicas.serves(0)
    assert replicas.least_loaded(1) == 0


@dataclass
class Naive:
    """What `ReplicaPool` does, by looking at every replica."""

    versions: list[set[int]]
    load: list[int] = field(default_factory=list[int])
    suspended: set[int] = field(default_factory=set[int])

    def least_loaded(self, version: int) -> int | None:
        able = [
            index
            for index, versions in enumerate(self.versions)
            if version in versions and index not in self.suspended
        ]
        return min(able, key=lambda index: (self.load[index], index), default=None)


def compare(count: int, steps: list[tuple[int, int, int]]) -> None:
    """Do the same to a pool and to the naive one; versions are 0, 1 and 2."""
    real = ReplicaPool(count)
    naive = Naive([set() for _ in range(count)], [0] * count)
    for action, which, version in steps:
        index = which % count
        if action == 0:
            real.proven(index, version, real.generation(index))
            naive.versions[index].add(version)
        elif action == 1:
            real.lost(index)
            naive.versions[index].clear()
            naive.suspended.discard(index)
        elif action == 2:
            real.suspend(index)
            naive.suspended.add(index)
        elif action == 3:
            real.resume(index)
            naive.suspended.discard(index)
        elif action == 4 and naive.load[index]:
            real.gave(index)
            naive.load[index] -= 1
        elif action == 5:
            real.retired(version)
            for versions in naive.versions:
                versions.discard(version)
        elif action > 5:
            target = real.least_loaded(version)
            assert target == naive.least_loaded(version)
            if target is not None:
                real.took(target)
                naive.load[target] += 1
        for every in range(3):
            assert real.serves(every) == any(every in have for have in naive.versions)
            assert real.least_loaded(every) == naive.least_loaded(every)
        assert [real.load(i) for i in range(count)] == naive.load


STEP = st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 2))


@unhurried
@given(count=st.integers(1, 5), steps=st.lists(STEP, max_size=60))
def test_the_pool_places_as_a_naive_one_would(
    count: int, steps: list[tuple[int, int, int]]
) -> None:
    compare(count, steps)


def test_the_pool_places_as_a_naive_one_would_for_long() -> None:
    """Long enough for its index to be built anew, with few losses and retirements."""
    rng = random.Random(0)
    actions = [0, 2, 3, 3] + [4] * 10 + [6] * 12
    for count in (1, 4):
        steps = [
            (rng.choice(actions), rng.randrange(count), rng.randrange(3)) for _ in range(4_000)
        ]
        compare(count, steps)
