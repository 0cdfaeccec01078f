"""Which screened tasks are kept, and the split that they are frozen into: a record.

Invariants:
- A selection names the screen that it rests on by content: the digests of its
  frozen.json and of its traces.
- Every screened task is in it with its pass rate and its verdict; those of the two
  sets were kept, and are in one of them only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from rl.errors import ConfigurationError, first_problem
from rl.evidence.stats import Interval
from rl.records import Record

Verdict = Literal[
    "kept",
    "too hard",  # its pass rate is below the bound
    "too easy",  # above it
]


class ScreenedTask(Record):
    """One task as the screen found it."""

    name: str
    digest: str = Field(description="Harbor content digest, sha256 hex")
    family: str
    tier: int | None
    attempts: int = Field(description="graded attempts")
    solved: int
    rate: float = Field(description="solved share of the graded attempts")
    interval: Interval = Field(description="95% Wilson interval of the rate")
    verdict: Verdict


class SelectionRule(Record):
    """By what the tasks were chosen."""

    low: float = Field(ge=0, le=1, description="least pass rate that is kept")
    high: float = Field(ge=0, le=1, description="largest pass rate that is kept")
    train: int = Field(ge=1, description="training tasks wanted")
    heldout: int = Field(ge=1, description="held-out tasks wanted")
    seed: int = Field(description="of the draw within each family and tier")


class Provenance(Record):
    """What the selection rests on."""

    screen: str = Field(description="run id")
    frozen_sha256: str = Field(description="of the screen's frozen.json")
    traces: dict[str, str] = Field(description="sha256 by trace of the screen")
    model: str = Field(description="name and pin of the screened model")
    attempts: int = Field(description="attempts per task")


class Selection(Record):
    """A frozen split with where it comes from: a file that `tasks.split` names."""

    provenance: Provenance
    rule: SelectionRule
    tasks: list[ScreenedTask]
    train: list[str] = Field(description="content digests of the training tasks, in order")
    heldout: list[str] = Field(description="content digests of the held-out tasks, in order")

    @model_validator(mode="after")
    def _consistent(self) -> Selection:
        chosen = [*self.train, *self.heldout]
        if len(set(chosen)) < len(chosen):
            raise ValueError("a task is named twice in train and heldout")
        digests = [task.digest for task in self.tasks]
        if len(set(digests)) < len(digests):
            raise ValueError("two screened tasks have one content")
        if (len(self.train), len(self.heldout)) != (self.rule.train, self.rule.heldout):
            raise ValueError("the sets are not as large as the rule says")
        for task in self.tasks:
            if not 0 <= task.solved <= task.attempts or task.attempts < 1:
                raise ValueError(f"task '{task.name}' has {task.solved} of {task.attempts} solved")
            if task.rate != task.solved / task.attempts:
                raise ValueError(f"task '{task.name}' has another pass rate than its attempts")
            if task.verdict != verdict_of(task.rate, self.rule):
                raise ValueError(f"task '{task.name}' is '{task.verdict}' against the rule")
        kept = {task.digest for task in self.tasks if task.verdict == "kept"}
        strangers = [digest for digest in chosen if digest not in kept]
        if strangers:
            raise ValueError(f"task {strangers[0][:16]} was not kept, yet is in the split")
        return self


def verdict_of(rate: float, rule: SelectionRule) -> Verdict:
    """The rule's verdict on a pass rate; both bounds are inside."""
    if rate < rule.low:
        return "too hard"
    return "too easy" if rate > rule.high else "kept"


def read_selection(path: Path) -> Selection:
    """Read a selection file.

    Raises:
        ConfigurationError: it can't be read, or is no valid selection.
    """
    try:
        return Selection.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"cannot be read: {(error.strerror or str(error)).lower()}",
            str(path),
            "name the selection.json of a screen: python -m rl.screen",
        ) from None
    except ValidationError as error:
        raise ConfigurationError(
            f"no valid selection: {first_problem(error)}",
            str(path),
            "make it again: python -m rl.screen --select RUN",
        ) from None
