"""Statistics of held-out evaluation.

Invariants:
- Only graded attempts count; masked and cancelled ones are reported beside them.
- An attempt is solved when its reward is at least `SOLVED_REWARD`.
- Attempts at one task are not independent, so whatever compares arms resamples
  tasks: the test flips the sign of each task's difference, the interval draws
  tasks with replacement.  Wilson intervals describe one arm on these very tasks.
- Counts stay integers, and differences fractions, until a result is written.
- Everything is deterministic: equal records give equal numbers, seeds included.

What is computed and why, with a worked example: docs/statistics.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final

from pydantic import Field

from rl.errors import EvidenceError
from rl.evidence.intervals import Interval, bootstrap_mean, bootstrap_rate, wilson
from rl.evidence.permutation import EXACT_TASKS as EXACT_TASKS
from rl.evidence.permutation import sign_flip_p
from rl.records import EpisodeRecord, Record

SOLVED_REWARD: Final = 1.0
SIGNIFICANCE: Final = 0.05
MAX_K: Final = 8
_ROUNDING: Final = 1e-9  # of a reward that was averaged over checks


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
    task_interval: Interval | None = Field(
        default=None,
        description="95% bootstrap interval of the pass rate over tasks. None: not recorded",
    )


class TaskRate(Record):
    """One task under one arm."""

    task_name: str
    task_digest: str
    attempts: int = Field(description="graded attempts")
    solved: int
    rate: float | None = Field(description="solved share; None without a graded attempt")
    interval: Interval = Field(description="95% Wilson interval of the rate")
    masked: int
    cancelled: int


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


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased chance that one of `k` attempts solves, from `attempts` of them.

    Source: Chen et al., Evaluating large language models trained on code, 2021,
    arXiv:2107.03374, equation 1.
    """
    if not (0 <= successes <= attempts and 1 <= k <= attempts):
        raise ValueError(f"pass@{k} of {successes} in {attempts}")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def summarize_arm(records: Iterable[EpisodeRecord], arm: str, seed: int = 0) -> ArmSummary:
    """The figures of one arm.

    Raises:
        EvidenceError: it has no graded attempt, or mixes versions.
    """
    mine = _of_arm(records, arm)
    graded = [record for record in mine if record.outcome == "graded"]
    if not graded:
        raise EvidenceError(f"arm '{arm}' has no graded attempt", "held-out evaluation")
    cells = [cell for _, cell in sorted(_cells(graded).items())]
    wins = sum(solved(record) for record in graded)
    depth = min(MAX_K, *(attempts for _, attempts in cells))
    return ArmSummary(
        arm=arm,
        version=mine[0].version,
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
        task_interval=bootstrap_rate(cells, seed),
    )


def task_rates(records: Iterable[EpisodeRecord], arm: str) -> list[TaskRate]:
    """How one arm does at each task that it attempted, by task name.

    Raises:
        EvidenceError: the arm mixes versions, or a task's content.
    """
    tasks: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in _of_arm(records, arm):
        tasks[record.task_name].append(record)
    return [_task_rate(name, tasks[name]) for name in sorted(tasks)]


def compare_arms(
    records: Iterable[EpisodeRecord], base: str, final: str, seed: int = 0
) -> HeldoutComparison:
    """Compare two arms over the tasks that both attempted.

    Raises:
        EvidenceError: an arm has no graded attempt, or they share no task.
    """
    held = list(records)
    summaries = summarize_arm(held, base, seed), summarize_arm(held, final, seed)
    graded = [record for record in held if record.outcome == "graded"]
    before = _cells(record for record in graded if record.arm == base)
    after = _cells(record for record in graded if record.arm == final)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise EvidenceError(f"arms '{base}' and '{final}' share no task", "held-out evaluation")
    tasks = [_compare_task(name, before[name], after[name]) for name in shared]
    differences = [task.difference for task in tasks]
    p_value, exact = sign_flip_p(
        [Fraction(*after[name]) - Fraction(*before[name]) for name in shared], seed
    )
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


def _of_arm(records: Iterable[EpisodeRecord], arm: str) -> list[EpisodeRecord]:
    mine = [record for record in records if record.arm == arm]
    versions = sorted({record.version for record in mine})
    if len(versions) > 1:
        raise EvidenceError(f"arm '{arm}' mixes policy versions {versions}", "held-out evaluation")
    return mine


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


def _task_rate(name: str, records: Sequence[EpisodeRecord]) -> TaskRate:
    digests = sorted({record.task_digest for record in records})
    if len(digests) > 1:
        raise EvidenceError(f"task '{name}' has several digests {digests}", "held-out evaluation")
    graded = [record for record in records if record.outcome == "graded"]
    wins = sum(solved(record) for record in graded)
    return TaskRate(
        task_name=name,
        task_digest=digests[0],
        attempts=len(graded),
        solved=wins,
        rate=wins / len(graded) if graded else None,
        interval=wilson(wins, len(graded)),
        masked=sum(record.outcome == "masked" for record in records),
        cancelled=sum(record.outcome == "cancelled" for record in records),
    )
