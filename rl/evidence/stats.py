"""Statistics of held-out evaluation.

Invariants:
- Only graded attempts count; masked and cancelled ones are reported beside them.
- An attempt is solved when its reward is at least `SOLVED_REWARD`.
- Attempts at one task are not independent, so whatever compares arms resamples
  tasks: the test flips the sign of each task's difference, the interval draws
  tasks with replacement.  Wilson intervals describe one arm on these very tasks.
- Everything is deterministic: equal records give equal numbers, seeds included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from pydantic import Field

from rl.errors import EvidenceError
from rl.records import EpisodeRecord, Record

SOLVED_REWARD: Final = 1.0
CONFIDENCE: Final = 0.95
SIGNIFICANCE: Final = 0.05
EXACT_TASKS: Final = 20  # 2**20 sign patterns: 8 MB and milliseconds
SAMPLES: Final = 20_000  # Monte Carlo error of a p-value at 0.05: 0.0015
MAX_K: Final = 8
_ROUNDING: Final = 1e-9  # sums that should tie differ by this much at most


class Interval(Record):
    """A confidence interval."""

    low: float
    high: float


class ArmSummary(Record):
    """One arm over all its tasks."""

    arm: str
    version: int
    tasks: int
    attempts: int = Field(description="graded attempts")
    solved: int
    pass_rate: float
    interval: Interval = Field(description="95% Wilson interval of the pass rate")
    mean_reward: float
    masked: int
    cancelled: int
    pass_at_k: dict[int, float] = Field(
        description="mean over tasks of the unbiased estimate, up to the fewest attempts"
    )


class TaskComparison(Record):
    """One task under both arms."""

    task_name: str
    base_solved: int
    base_attempts: int
    final_solved: int
    final_attempts: int
    difference: float = Field(description="final pass rate less base pass rate")


class HeldoutComparison(Record):
    """The final arm against the base arm on the same tasks."""

    base: ArmSummary
    final: ArmSummary
    tasks: list[TaskComparison]
    difference: float = Field(description="mean over tasks of the difference in pass rate")
    interval: Interval = Field(description="95% bootstrap interval over tasks")
    p_value: float = Field(description="two-sided sign-flip permutation test over tasks")
    exact: bool = Field(description="whether all sign patterns were counted")
    significant: bool = Field(description="whether p is below 0.05")


def solved(record: EpisodeRecord) -> bool:
    """Whether a graded episode has the full reward."""
    return record.reward is not None and record.reward >= SOLVED_REWARD - _ROUNDING


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson score interval of a proportion; all of [0, 1] without trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return Interval(low=0.0, high=1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, spread = successes / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low=low, high=high)


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased chance that one of `k` attempts solves, from `attempts` of them."""
    if not (0 <= successes <= attempts and 1 <= k <= attempts):
        raise ValueError(f"pass@{k} of {successes} in {attempts}")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> tuple[float, bool]:
    """Two-sided p-value that paired differences are symmetric about 0.

    Exact for up to `EXACT_TASKS` differences other than 0 (a 0 has no sign, so
    it changes no pattern's share), seeded Monte Carlo beyond.

    Returns:
        The p-value, and whether it is exact.
    """
    values = np.array([value for value in differences if value != 0.0], dtype=np.float64)
    observed = abs(float(values.sum())) - _ROUNDING
    if len(values) <= EXACT_TASKS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= observed)), True
    generator = np.random.default_rng(seed)
    signs = generator.integers(0, 2, size=(SAMPLES, len(values)), dtype=np.int8) * 2 - 1
    extreme = int(np.count_nonzero(np.abs(signs @ values) >= observed))
    return (1 + extreme) / (1 + SAMPLES), False


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """95% percentile bootstrap interval of a mean."""
    if not values:
        raise ValueError("no values")
    data = np.array(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(data), size=(SAMPLES, len(data)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(data[picks].mean(axis=1), [tail, 1 - tail])
    return Interval(low=float(low), high=float(high))


def summarize_arm(records: Iterable[EpisodeRecord], arm: str) -> ArmSummary:
    """The figures of one arm.

    Raises:
        EvidenceError: it has no graded attempt, or mixes versions.
    """
    mine = [record for record in records if record.arm == arm]
    graded = [record for record in mine if record.outcome == "graded"]
    if not graded:
        raise EvidenceError(f"arm '{arm}' has no graded attempt", "held-out evaluation")
    versions = sorted({record.version for record in mine})
    if len(versions) > 1:
        raise EvidenceError(f"arm '{arm}' mixes policy versions {versions}", "held-out evaluation")
    cells = list(_cells(graded).values())
    wins = sum(solved(record) for record in graded)
    depth = min(MAX_K, *(attempts for _, attempts in cells))
    return ArmSummary(
        arm=arm,
        version=versions[0],
        tasks=len(cells),
        attempts=len(graded),
        solved=wins,
        pass_rate=wins / len(graded),
        interval=wilson(wins, len(graded)),
        mean_reward=math.fsum(r.reward for r in graded if r.reward is not None) / len(graded),
        masked=sum(record.outcome == "masked" for record in mine),
        cancelled=sum(record.outcome == "cancelled" for record in mine),
        pass_at_k={
            k: math.fsum(pass_at_k(n, c, k) for c, n in cells) / len(cells)
            for k in range(1, depth + 1)
        },
    )


def compare_arms(
    records: Iterable[EpisodeRecord], base: str, final: str, seed: int = 0
) -> HeldoutComparison:
    """Compare two arms over the tasks that both attempted.

    Raises:
        EvidenceError: an arm has no graded attempt, or they share no task.
    """
    held = list(records)
    summaries = summarize_arm(held, base), summarize_arm(held, final)
    graded = [record for record in held if record.outcome == "graded"]
    before = _cells(record for record in graded if record.arm == base)
    after = _cells(record for record in graded if record.arm == final)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise EvidenceError(f"arms '{base}' and '{final}' share no task", "held-out evaluation")
    tasks = [_compare_task(name, before[name], after[name]) for name in shared]
    differences = [task.difference for task in tasks]
    p_value, exact = sign_flip_p(differences, seed)
    return HeldoutComparison(
        base=summaries[0],
        final=summaries[1],
        tasks=tasks,
        difference=math.fsum(differences) / len(differences),
        interval=bootstrap_mean(differences, seed),
        p_value=p_value,
        exact=exact,
        significant=p_value < SIGNIFICANCE,
    )


def _cells(graded: Iterable[EpisodeRecord]) -> dict[str, tuple[int, int]]:
    """Solved and graded attempts by task."""
    cells: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in graded:
        wins, attempts = cells[record.task_name]
        cells[record.task_name] = wins + solved(record), attempts + 1
    return dict(cells)


def _compare_task(name: str, base: tuple[int, int], final: tuple[int, int]) -> TaskComparison:
    return TaskComparison(
        task_name=name,
        base_solved=base[0],
        base_attempts=base[1],
        final_solved=final[0],
        final_attempts=final[1],
        difference=final[0] / final[1] - base[0] / base[1],
    )
