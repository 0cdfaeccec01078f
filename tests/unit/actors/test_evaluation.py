"""Shards of the held-out tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.evaluation import shards
from rl.records import TaskRef


def refs(count: int) -> list[TaskRef]:
    return [
        TaskRef(name=f"t{i}", digest=f"{i:064x}", path=f"t{i}", instruction="x")
        for i in range(count)
    ]


def test_the_reference_split_is_twelve_and_eleven() -> None:
    assert [len(part) for part in shards(refs(23), 2)] == [12, 11]


@given(tasks=st.integers(1, 60), count=st.integers(1, 8))
def test_shards_are_disjoint_complete_and_even(tasks: int, count: int) -> None:
    parts = shards(refs(tasks), count)
    names = [task.name for part in parts for task in part]
    assert sorted(names) == sorted(f"t{i}" for i in range(tasks))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
