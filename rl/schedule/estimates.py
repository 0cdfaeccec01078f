"""How long a task's attempts take: an estimate per task, learned from those that ended.

A task's estimate is the mean of its own durations, drawn towards the mean of all
tasks as if `PRIOR_WEIGHT` attempts of that length had been seen: a task that was
never seen counts as an average one.
"""

from __future__ import annotations

PRIOR_WEIGHT = 1.0


class DurationEstimates:
    """Mean duration by task, s."""

    def __init__(self, known: dict[str, tuple[int, float]] | None = None) -> None:
        """`known`: from `snapshot` of an earlier one."""
        self._tasks = {int(task): (count, total) for task, (count, total) in (known or {}).items()}
        self._count = sum(count for count, _ in self._tasks.values())
        self._sum = sum(total for _, total in self._tasks.values())

    def observe(self, task: int, seconds: float) -> None:
        """An attempt at `task` ended by itself after `seconds`."""
        count, total = self._tasks.get(task, (0, 0.0))
        self._tasks[task] = (count + 1, total + seconds)
        self._count += 1
        self._sum += seconds

    def estimate(self, task: int) -> float:
        """Expected duration of the next attempt, s; 0 while nothing is known at all."""
        if not self._count:
            return 0.0
        count, total = self._tasks.get(task, (0, 0.0))
        mean = self._sum / self._count
        return (total + PRIOR_WEIGHT * mean) / (count + PRIOR_WEIGHT)

    def snapshot(self) -> dict[str, tuple[int, float]]:
        """Count and summed seconds by task, ready for JSON."""
        return {str(task): value for task, value in self._tasks.items()}
