"""The books of evaluations during a modelled campaign, kept from commands and events alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.records import Outcome
from rl.schedule.commands import DispatchEval, EvalOver
from rl.schedule.evals import EvalPlan
from tests.support.schedule_model.setting import require


@dataclass(slots=True)
class EvalBook:
    """An evaluation under way.

    Attributes:
        owed: by cell, how often it may still be launched; none is left out that waits.
        tries: by cell, further launches after a mask.
    """

    owed: set[int]
    tries: dict[int, int]
    running: dict[str, int] = field(default_factory=dict[str, int])
    graded: set[int] = field(default_factory=set[int])
    lost: bool = False


class EvalBooks:
    """One driver's evaluations.

    Args:
        plan: what is evaluated.
        graded: cells by version that earlier drivers have had graded.
        used_ids: every attempt id so far.
    """

    def __init__(self, plan: EvalPlan, graded: dict[int, set[int]], used_ids: set[str]) -> None:
        self._plan = plan
        self.used_ids = used_ids
        self.graded = graded
        self.begun: set[int] = set()
        self.open: dict[int, EvalBook] = {}

    def resumed(self, finished: int) -> EvalBooks:
        """Those of a driver that starts from a checkpoint: later versions are made again."""
        kept = {
            version: set(cells) for version, cells in self.graded.items() if version <= finished
        }
        return EvalBooks(self._plan, kept, self.used_ids)

    def plan(self) -> EvalPlan:
        """The plan as this driver's scheduler gets it."""
        graded = {version: frozenset(cells) for version, cells in self.graded.items()}
        return EvalPlan(self._plan.versions, self._plan.cells, self._plan.retries, graded)

    @property
    def running(self) -> int:
        """Attempts that run."""
        return sum(len(book.running) for book in self.open.values())

    def version_current(self, version: int) -> None:
        """A version is current: its evaluation begins, if it is planned and not complete."""
        if version not in self._plan.versions or version in self.begun:
            return
        self.begun.add(version)
        done = self.graded.setdefault(version, set())
        left = set(range(self._plan.cells)) - done
        if left:
            tries = dict.fromkeys(left, self._plan.retries)
            self.open[version] = EvalBook(left, tries, graded=set(done))

    def dispatch(self, command: DispatchEval) -> None:
        """An attempt starts."""
        require(command.attempt_id not in self.used_ids, f"{command.attempt_id} is a new id")
        self.used_ids.add(command.attempt_id)
        book = self.open.get(command.version)
        require(book is not None, f"version {command.version} is under evaluation")
        assert book is not None
        require(command.cell in book.owed, f"cell {command.cell} is owed an attempt")
        book.owed.remove(command.cell)
        book.running[command.attempt_id] = command.cell

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        """The terminal event of a running attempt."""
        version, book = next((v, b) for v, b in self.open.items() if attempt_id in b.running)
        cell = book.running.pop(attempt_id)
        if outcome == "graded":
            require(cell not in book.graded, f"cell {cell} of version {version} is graded once")
            book.graded.add(cell)
            self.graded[version].add(cell)
        elif outcome == "masked" and book.tries[cell] and not book.lost:
            book.tries[cell] -= 1
            book.owed.add(cell)

    def stranded(self, version: int) -> None:
        """No replica serves `version` any more, while one serves the current version."""
        if version in self.open and self.open[version].owed:
            self.open[version].owed = set()
            self.open[version].lost = True

    def over(self, command: EvalOver) -> None:
        """An evaluation has ended."""
        book = self.open.pop(command.version, None)
        require(book is not None, f"version {command.version} ends once")
        assert book is not None
        require(not book.owed and not book.running, "nothing of an ended evaluation is left")
        require(command.graded == len(book.graded), "its graded attempts are counted")
        require(bool(command.reason) == (command.graded < command.cells), "it says why it is short")

    def check(self) -> None:
        """What holds between any two events."""
        for version, book in self.open.items():
            left = bool(book.owed or book.running)
            require(left, f"the end of version {version}'s evaluation is told")
