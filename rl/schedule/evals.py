"""Evaluations during training: attempts of one version, between those of training.

A pure state machine; the scheduler gives it slots, and holds the version for it.

Invariants:
- A version is evaluated when it becomes current, which it does once, if it is planned.
- Each of its cells (a task, and which attempt at it) is launched until it is graded, at
  most `retries` times more; a cell that was graded before is not launched.
- An evaluation is over once: when nothing of it waits or runs.  What is missing then
  was masked too often, was cancelled, or nobody served the version any more.
- Nothing here is ever streamed to the trainer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl.records import Outcome
from rl.schedule.commands import EvalOver

# eval0004.1-c012-2: version 4, the campaign's second driver, cell 12, its third launch.
_ATTEMPT = re.compile(r"^eval(\d+)\.\d+-c(\d+)-\d+$")


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated during training.

    Attributes:
        versions: which versions.
        cells: attempts at each version.
        retries: relaunches of a masked attempt.
        graded: by version, the cells that an earlier driver has had graded.
    """

    versions: frozenset[int] = frozenset()
    cells: int = 0
    retries: int = 0
    graded: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])


NO_EVALS = EvalPlan()


@dataclass
class _Open:
    """An evaluation under way."""

    waiting: deque[tuple[int, int]]  # (cell, how often it was launched)
    running: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    graded: int = 0
    lost: str = ""


class Evaluations:
    """See the module's invariants.

    Args:
        plan: what is evaluated.
        incarnation: how many drivers the campaign had before; part of attempt ids.
    """

    def __init__(self, plan: EvalPlan, incarnation: int) -> None:
        self._plan = plan
        self._incarnation = incarnation
        self._open: dict[int, _Open] = {}
        self._of: dict[str, int] = {}  # version by running attempt

    @property
    def active(self) -> bool:
        """Whether an evaluation is under way."""
        return bool(self._open)

    @property
    def running(self) -> int:
        """Attempts that run now."""
        return len(self._of)

    def waiting(self) -> list[int]:
        """Versions that wait for a slot, oldest first."""
        return sorted(version for version, one in self._open.items() if one.waiting)

    def begin(self, version: int) -> bool:
        """`version` has become current; whether an evaluation of it begins."""
        if version not in self._plan.versions:
            return False
        done = self._plan.graded.get(version, frozenset())
        left = [cell for cell in range(self._plan.cells) if cell not in done]
        if left:
            graded = self._plan.cells - len(left)
            self._open[version] = _Open(deque((cell, 0) for cell in left), graded=graded)
        return bool(left)

    def launch(self, version: int) -> tuple[str, int]:
        """Take the next attempt at a waiting version: its id and its cell."""
        one = self._open[version]
        cell, before = one.waiting.popleft()
        attempt_id = f"eval{version:04d}.{self._incarnation}-c{cell:03d}-{before}"
        one.running[attempt_id] = cell, before
        self._of[attempt_id] = version
        return attempt_id, cell

    def owns(self, attempt_id: str) -> bool:
        """Whether a running attempt is of an evaluation."""
        return attempt_id in self._of

    def finished(self, attempt_id: str, outcome: Outcome) -> EvalOver | None:
        """A running attempt ended; the end of its evaluation, if it was the last."""
        version = self._of.pop(attempt_id)
        one = self._open[version]
        cell, before = one.running.pop(attempt_id)
        if outcome == "graded":
            one.graded += 1
        elif outcome == "masked" and before < self._plan.retries and not one.lost:
            one.waiting.appendleft((cell, before + 1))
        return self._end(version)

    def give_up(self, version: int) -> EvalOver | None:
        """No replica serves the version any more; the end of its evaluation, if nothing runs."""
        one = self._open[version]
        one.lost = "no replica serves the version any more"
        one.waiting.clear()
        return self._end(version)

    def _end(self, version: int) -> EvalOver | None:
        one = self._open[version]
        if one.waiting or one.running:
            return None
        del self._open[version]
        short = self._plan.cells - one.graded
        reason = (one.lost or "infrastructure failed too often") if short else ""
        return EvalOver(version, one.graded, self._plan.cells, reason)


def graded_cells(attempt_ids: Iterable[str]) -> dict[int, frozenset[int]]:
    """By version, the cells of these graded attempts.

    Raises:
        ValueError: one is no attempt of an evaluation.
    """
    found: dict[int, set[int]] = {}
    for attempt_id in attempt_ids:
        named = _ATTEMPT.fullmatch(attempt_id)
        if named is None:
            raise ValueError(f"'{attempt_id}' is no attempt of an evaluation")
        found.setdefault(int(named[1]), set()).add(int(named[2]))
    return {version: frozenset(cells) for version, cells in found.items()}
