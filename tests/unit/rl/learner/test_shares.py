"""A group's sequences divided among ranks: all of them, evenly, by neighbours."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner.packing import TrainingSequence
from rl.learner.shares import shares
from tests.unit.rl.learner.token_trees import sequences


def training(token_ids: list[int]) -> TrainingSequence:
    """Predicts its last token, so all others are its inputs."""
    tokens = [*token_ids, 0]
    return TrainingSequence(tokens, [len(tokens) - 1], [-1.0], 1.0)


def trie_tokens(group: list[TrainingSequence]) -> int:
    """Distinct non-empty openings: what a rank computes if everything common is shared."""
    return len({tuple(s.inputs[:end]) for s in group for end in range(1, len(s.inputs) + 1)})


def padded_tokens(group: list[TrainingSequence]) -> int:
    return sum(len(s.inputs) for s in group)


def best_by_runs(ordered: list[TrainingSequence], ranks: int, size) -> int:
    """The least possible largest share, over every way to cut the order into runs."""
    found = []
    for count in range(1, min(ranks, len(ordered)) + 1):
        for cuts in combinations(range(1, len(ordered)), count - 1):
            runs = pairwise([0, *cuts, len(ordered)])
            found.append(max(size(ordered[a:b]) for a, b in runs))
    return min(found)


@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=80, deadline=None)
@given(tokens=sequences(), ranks=st.integers(1, 4))
def test_shares_are_all_of_it_and_the_largest_is_least(shared, tokens, ranks):
    group = [training(ids) for ids in tokens]
    divided = shares(group, ranks, shared=shared)
    size = trie_tokens if shared else padded_tokens
    assert len(divided) == ranks
    assert sorted(id(s) for share in divided for s in share) == sorted(id(s) for s in group)
    ordered = sorted(group, key=lambda s: s.inputs)
    assert max(size(share) for share in divided) == best_by_runs(ordered, ranks, size)


def test_nothing_is_divided_into_nothing():
    assert shares([], 3, shared=True) == [[], [], []]


def test_an_order_of_arrival_changes_no_share():
    group = [training([1] * 20 + [tail]) for tail in range(6)]
    there = shares(group, 2, shared=True)
    back = shares(group[::-1], 2, shared=True)
    assert [[s.token_ids for s in share] for share in there] == [
        [s.token_ids for s in share] for share in back
    ]
