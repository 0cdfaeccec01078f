"""The groups that every contender trains on: agents' attempts of one task each.

Invariants:
- A case and a seed decide every token, so separate processes make equal groups.
- Attempts of a group have the prompt in common and nothing else; behind it stand turns,
  the sampled tokens of each before those that a command printed.
- A group of even lengths and one of uneven lengths hold equally many tokens, up to
  rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Lengths = Literal["even", "uneven"]

TURN = 32  # tokens sampled and printed in a turn
# Uneven attempts go from a quarter to seven quarters of the mean behind the prompt.
SPREAD = 0.75


@dataclass(frozen=True)
class Case:
    """What one update is made of."""

    share: float  # of an attempt of mean length that is the prompt, the p
    lengths: Lengths
    tokens: int  # of an attempt of mean length
    group: int  # attempts of a group
    groups: int
    sampled: float  # share of the tokens behind the prompt
    seed: int = 0

    @property
    def ideal(self) -> float:
        """Tokens of all attempts over those that differ: the saving by sharing alone."""
        return self.group / (self.share + self.group * (1 - self.share))


@dataclass(frozen=True)
class Attempt:
    """One trajectory."""

    prompt: list[int]
    tail: list[int]
    sampled: list[bool]  # of the tail
    reward: float


def make_groups(case: Case, vocabulary: int) -> list[list[Attempt]]:
    """The groups of `case`, of token ids below `vocabulary`."""
    draw = random.Random(f"{case.seed}/{case.share}/{case.lengths}")
    prompt_tokens = round(case.share * case.tokens)
    groups: list[list[Attempt]] = []
    for _ in range(case.groups):
        prompt = [draw.randrange(vocabulary) for _ in range(prompt_tokens)]
        lengths = _tail_lengths(case, case.tokens - prompt_tokens)
        draw.shuffle(lengths)
        groups.append(
            [
                Attempt(
                    prompt,
                    [draw.randrange(vocabulary) for _ in range(length)],
                    _sampled(length, case.sampled),
                    float(index % 2),
                )
                for index, length in enumerate(lengths)
            ]
        )
    return groups


def _tail_lengths(case: Case, mean: int) -> list[int]:
    if case.lengths == "even":
        return [mean] * case.group
    steps = [2 * index / (case.group - 1) - 1 for index in range(case.group)]
    return [max(1, round(mean * (1 + SPREAD * step))) for step in steps]


def _sampled(length: int, share: float) -> list[bool]:
    """Whether each token behind the prompt was sampled: the first part of every turn."""
    return [place % TURN < max(1, round(share * TURN)) for place in range(length)]
