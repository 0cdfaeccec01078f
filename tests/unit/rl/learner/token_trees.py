"""Sequences that share what attempts share, drawn at random for the learner's tests."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from tests.unit.rl.learner.tiny_policy import VOCABULARY

LONGEST = 120  # tokens; the tiny model's limit is 128


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    """Up to seven paths of a random tree: twice the same one, or a part of another, too."""
    tokens = random.Random(draw(st.integers(0, 2**16)))
    nodes: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 7))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        length = draw(st.sampled_from([1, 3, 15, 16, 17, 40]))
        nodes.append((parent + [tokens.randrange(VOCABULARY) for _ in range(length)])[:LONGEST])
    chosen = draw(st.lists(st.integers(1, len(nodes) - 1), min_size=1, max_size=7))
    return [nodes[index] for index in chosen]
