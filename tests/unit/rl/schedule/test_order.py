"""The order of tasks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rl.schedule.order import TaskOrder
from tests.support.schedule_model.unhurried import unhurried


@unhurried
@given(families=st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), seed=st.integers())
def test_every_epoch_draws_every_task_once(families: list[str], seed: int) -> None:
    order = TaskOrder(families, seed)
    for epoch in range(3):
        draws = [order.task(epoch * len(families) + i) for i in range(len(families))]
        assert sorted(draws) == list(range(len(families)))


def test_any_window_of_an_epoch_holds_each_family_once() -> None:
    families = [f for f in "abcdef" for _ in range(16)]
    order = TaskOrder(families, 7)
    for start in range(0, 96, 6):
        window = Counter(families[order.task(start + i)] for i in range(6))
        assert set(window.values()) == {1}


def test_draws_depend_on_the_seed_and_on_nothing_else() -> None:
    families = list("abc") * 10
    first = [TaskOrder(families, 1).task(i) for i in range(90)]
    assert first == [TaskOrder(families, 1).task(i) for i in range(90)]
    assert first != [TaskOrder(families, 2).task(i) for i in range(90)]
    assert TaskOrder(families, 1).task(75) == first[75]
