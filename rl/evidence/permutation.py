"""The sign-flip permutation test of paired differences, exact.

Under the null hypothesis each task's difference is as likely to have one sign as the
other, so all 2**n patterns of signs are equally likely, and the p-value is the share of
patterns whose sum is at least as far from 0 as the observed one (Fisher, The Design of
Experiments, 1935, chapter 3; Pitman 1937).

Invariants:
- Differences are rational and are compared as integers, over their common denominator:
  sums that tie are equal, with no tolerance.
- "Exact" counts every pattern.  The table of sums is in float64, whose entries are
  multiples of 2**-n: for n up to 53 nothing is rounded, beyond that the p-value's
  relative error is below (n + 40) * 2**-53, which is 1e-12 at 9,000 differences.
- Only beyond the bounds below is it Monte Carlo: seeded, never 0, and said so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np

# Largest sum of the integer differences, so the table's length: 64 MB.  1,000 tasks of 8
# attempts have at most 8,000, and 840,000 if tasks of 1 to 8 graded attempts are among them.
EXACT_SUMS: Final = 2**23
EXACT_TASKS: Final = 20  # always exact up to here: 2**20 patterns in a dictionary, a second
SAMPLES: Final = 20_000  # Monte Carlo error of a p-value at 0.05: 0.0015
_BLOCK: Final = 2**20  # signs held at a time: 9 MB with the floats they become
_ROUNDING: Final = 1e-9  # of float sums, which only Monte Carlo compares


def sign_flip_p(differences: Sequence[Fraction], seed: int = 0) -> tuple[float, bool]:
    """Two-sided p-value that paired differences are symmetric about 0.

    A difference of 0 has no sign, so it changes no pattern's share.

    Returns:
        The p-value, and whether it is exact.
    """
    sizes, observed = _integers(differences)
    if observed == 0:
        return 1.0, True
    if sum(sizes) <= EXACT_SUMS:
        return _from_table(sizes, observed), True
    if len(sizes) <= EXACT_TASKS:
        return _from_patterns(sizes, observed), True
    return _sampled(differences, seed), False


def _integers(differences: Sequence[Fraction]) -> tuple[list[int], int]:
    """Sizes of the differences other than 0, and that of their sum, in a common unit."""
    scale = math.lcm(*(value.denominator for value in differences))
    scaled = [int(value * scale) for value in differences if value]
    unit = math.gcd(*scaled) or 1
    return sorted(abs(value) // unit for value in scaled), abs(sum(scaled)) // unit


def _from_table(sizes: Sequence[int], observed: int) -> float:
    """By the distribution of the sum of the positive ones, which takes in one size at a time.

    If the positive ones sum to x, the signed sum is 2x - total, so the upper tail is
    x >= (total + observed) / 2; total and observed are both odd or both even.
    """
    total, reached = sum(sizes), 0
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for size in sizes:
        reached += size
        chance[size : reached + 1] += chance[: reached + 1 - size]
        chance[: reached + 1] /= 2
    return 2 * float(chance[(total + observed) // 2 :].sum())


def _from_patterns(sizes: Sequence[int], observed: int) -> float:
    """By counting the patterns of each sum that occurs."""
    patterns: Counter[int] = Counter({0: 1})
    for size in sizes:
        longer: Counter[int] = Counter()
        for reached, count in patterns.items():
            longer[reached + size] += count
            longer[reached - size] += count
        patterns = longer
    extreme = sum(count for reached, count in patterns.items() if abs(reached) >= observed)
    return extreme / 2 ** len(sizes)


def _sampled(differences: Sequence[Fraction], seed: int) -> float:
    """By random patterns; the observed one is counted with them (Phipson and Smyth 2010)."""
    values = np.array([float(value) for value in differences if value])
    observed = abs(float(values.sum())) - _ROUNDING
    generator = np.random.default_rng(seed)
    extreme, step = 0, max(1, _BLOCK // len(values))
    for start in range(0, SAMPLES, step):
        shape = min(step, SAMPLES - start), len(values)
        signs = generator.integers(0, 2, size=shape, dtype=np.int8) * 2 - 1
        extreme += int(np.count_nonzero(np.abs(signs @ values) >= observed))
    return (1 + extreme) / (1 + SAMPLES)
