"""Confidence intervals of a proportion, and of means and rates over tasks.

Invariants:
- Every interval covers `CONFIDENCE` of the probability, half of the rest on each side.
- A bootstrap draws whole rows, one for each task, and equal seeds draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rl.records import Record

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 20_000  # Monte Carlo error of an interval's end: 0.5% of its width
_BLOCK: Final = 2**22  # draws held at a time: 32 MB


class Interval(Record):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion; all of [0, 1] without trials.

    Source: Wilson, JASA 22 (1927) 209-212.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return Interval(low=0.0, high=1.0)
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    rate, spread = successes / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    low = max(0.0, centre - half)  # exactly 0 without successes: sqrt(x * x) is x
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low=low, high=high)


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """95% percentile bootstrap interval of a mean.

    Source: Efron and Tibshirani, An introduction to the bootstrap, 1993, chapter 13.
    """
    if not values:
        raise ValueError("no values")
    sums = _resampled_sums(np.array(values, dtype=np.float64)[:, None], seed)
    return _middle(sums[:, 0] / len(values))


def bootstrap_rate(cells: Sequence[tuple[int, int]], seed: int = 0) -> Interval:
    """95% percentile bootstrap interval of a pooled rate; whole tasks are drawn.

    Args:
        cells: solved and graded attempts of each task.
        seed: of the draws.
    """
    if not cells or any(attempts < 1 for _, attempts in cells):
        raise ValueError("a task without attempts")
    sums = _resampled_sums(np.array(cells, dtype=np.float64), seed)
    return _middle(sums[:, 0] / sums[:, 1])


def _resampled_sums(rows: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Column sums of as many rows as there are, drawn with replacement, `RESAMPLES` times."""
    generator = np.random.default_rng(seed)
    sums = np.empty((RESAMPLES, rows.shape[1]))
    step = max(1, _BLOCK // len(rows))
    for start in range(0, RESAMPLES, step):
        count = min(step, RESAMPLES - start)
        picks = generator.integers(0, len(rows), size=(count, len(rows)))
        sums[start : start + count] = rows[picks].sum(axis=1)
    return sums


def _middle(values: NDArray[np.float64]) -> Interval:
    """The middle 95% of some values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(low=float(low), high=float(high))
