"""What every attempt would take, whoever dispatches it.

Invariants:
- The fate of an attempt is a pure function of (workload's seed, task, the how
  manieth group of that task it belongs to, number within its group): every policy
  sees the same trace, in whatever order it dispatches.  Every task is drawn once
  per epoch of the order, so task and occurrence name a draw.
- Nothing is stored but one number per task, or the recorded durations.

A lognormal task has its own mean, and its attempts scatter around that: of the
variance of log(duration), `task_share` lies between tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from struct import Struct
from typing import Protocol

from rl.simulation.workloads import Lognormal, Workload

_KEY = Struct("<4q")
# Bits of a uniform number: with a half added, which keeps it off 0, where the normal
# quantile has no value, any more would round up to 1, where it has none either.
_BITS = 52
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of an attempt that runs alone on a replica.

    Attributes:
        seconds: how long it takes, at most the episode deadline.
        masked_after: when a fault of the infrastructure ends it, s; None: never.
    """

    seconds: float
    masked_after: float | None


class _Durations(Protocol):
    def __call__(self, task: int, uniform: float) -> float:
        """Seconds, for a number drawn uniformly from (0, 1)."""
        ...


class Trace:
    """See the module's invariants."""

    def __init__(self, workload: Workload) -> None:
        durations = workload.durations
        self._seed = workload.seed
        self._deadline_s = math.inf if durations.deadline_s is None else durations.deadline_s
        self._masked_share = workload.failures.masked_share
        self._seconds: _Durations
        if durations.lognormal is not None:
            self._seconds = LognormalDurations(durations.lognormal, workload.seed)
        else:
            self._seconds = RecordedDurations(durations.recordings)

    def fate(self, task: int, occurrence: int, attempt: int) -> Fate:
        """Of attempt `attempt` in the `occurrence`-th group of `task`, both from 0."""
        key = _KEY.pack(self._seed, task, occurrence, attempt)
        word = blake2b(key, digest_size=16).digest()
        seconds = min(self._seconds(task, _uniform(word[:8])), self._deadline_s)
        if not self._masked_share:
            return Fate(seconds, None)
        luck = _uniform(word[8:])
        masked = luck < self._masked_share
        return Fate(seconds, seconds * luck / self._masked_share if masked else None)


def _uniform(word: bytes) -> float:
    """A number in (0, 1) from 8 random bytes."""
    return ((int.from_bytes(word) >> (64 - _BITS)) + 0.5) / 2.0**_BITS


class LognormalDurations:
    """Lognormal over tasks and attempts, with the mean and total spread asked for.

    Task means are the quantiles of their distribution, in seeded order, scaled to
    the mean asked for: a hundred tasks drawn at random would miss it by several
    percent, and every seed by another amount.
    """

    def __init__(self, spec: Lognormal, seed: int) -> None:
        variance = math.log(1 + spec.cv**2)
        between = math.sqrt(variance * spec.task_share)
        within = variance * (1 - spec.task_share)
        quantiles = [(rank + 0.5) / spec.tasks for rank in range(spec.tasks)]
        means = [math.exp(between * _STANDARD.inv_cdf(quantile)) for quantile in quantiles]
        scale = spec.mean_s * spec.tasks / sum(means)
        random.Random(f"tasks/{seed}").shuffle(means)
        self._within = math.sqrt(within)
        self._medians = [scale * mean * math.exp(-within / 2) for mean in means]

    def __call__(self, task: int, uniform: float) -> float:
        """Seconds, for a number drawn uniformly from (0, 1)."""
        return self._medians[task] * math.exp(self._within * _STANDARD.inv_cdf(uniform))


class RecordedDurations:
    """Durations drawn, with replacement, from those recorded of the same task."""

    def __init__(self, by_task: Sequence[Sequence[float]]) -> None:
        self._by_task = by_task

    def __call__(self, task: int, uniform: float) -> float:
        """Seconds, for a number drawn uniformly from (0, 1)."""
        recorded = self._by_task[task]
        return recorded[min(int(uniform * len(recorded)), len(recorded) - 1)]
