from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner.tree import SHORTEST_SHARED, plant, unshared
from tests.unit.rl.learner.token_trees import sequences


@settings(max_examples=200, deadline=None)
@given(sequences(), st.sampled_from([1, 4, SHORTEST_SHARED]))
def test_every_sequence_is_a_path_and_sees_itself_alone(drawn, shortest):
    tree = plant(drawn, shortest)
    ends = [s.end for s in tree.segments for _ in range(s.start, s.stop)]
    positions = tree.positions()
    used: set[int] = set()
    for index, sequence in enumerate(drawn):
        places = tree.places(index)
        assert [tree.token_ids[place] for place in places] == sequence
        assert [positions[place] for place in places] == list(range(len(sequence)))
        for depth, q in enumerate(places):
            seen = [k for k in range(len(tree.token_ids)) if k <= q < ends[k]]
            assert seen == places[: depth + 1]
        used.update(places)
    assert used == set(range(len(tree.token_ids)))


@settings(max_examples=100, deadline=None)
@given(sequences(), st.sampled_from([1, SHORTEST_SHARED]))
def test_segments_tile_the_row_and_equal_sequences_are_laid_out_once(drawn, shortest):
    tree = plant(drawn, shortest)
    edges = [0, *(segment.stop for segment in tree.segments)]
    assert edges[-1] == len(tree.token_ids)
    for segment, (start, stop) in zip(tree.segments, itertools.pairwise(edges), strict=True):
        assert (segment.start, segment.stop) == (start, stop)
        assert start < stop <= segment.end
    assert len(tree.token_ids) <= sum(len(s) for s in {tuple(s) for s in drawn})
    if shortest == 1:
        assert len(tree.token_ids) == len({tuple(s[: i + 1]) for s in drawn for i in range(len(s))})


def test_turns_that_the_branches_of_an_attempt_share_are_laid_out_once():
    prompt, turns = [1] * 30, [2] * 20
    kept, compacted = [*prompt, *turns, *[3] * 25], [*prompt, *turns, *[4] * 18]
    tree = plant([[*prompt, *[5] * 40], kept, compacted])
    spans = [(s.start, s.stop, s.end, s.depth) for s in tree.segments]
    assert spans == [
        (0, 30, 133, 0),  # the prompt
        (30, 50, 93, 30),  # the turns
        (50, 75, 75, 50),
        (75, 93, 93, 50),
        (93, 133, 133, 30),  # the other attempt
    ]
    assert tree.paths == [[0, 4], [0, 1, 2], [0, 1, 3]]


def test_a_short_run_in_common_is_no_branch():
    a, b = [1] * (SHORTEST_SHARED - 1) + [2], [1] * (SHORTEST_SHARED - 1) + [3]
    assert len(plant([a, b]).segments) == 2
    assert len(plant([[1, *a], [1, *b]]).segments) == 3


def test_nothing_is_shared_on_request():
    tree = unshared([[1, 2, 3], [1, 2]])
    assert tree.token_ids == [1, 2, 3, 1, 2]
    assert tree.positions() == [0, 1, 2, 0, 1]
    assert [tree.places(0), tree.places(1)] == [[0, 1, 2], [3, 4]]
