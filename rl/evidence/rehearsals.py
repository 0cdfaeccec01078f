"""What a rehearsal has walked through, and whether a launch may rely on it.

Invariants:
- A rehearsal belongs to one configuration and one state of the code, both by content.
- Every step says what was expected and what was found; it passes only if all do.
- rehearsal.json is written last: a rehearsal that was broken off is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from rl.errors import ConfigurationError, EvidenceError, first_problem
from rl.evidence.code_pin import CodePin
from rl.files import read_errors
from rl.records import Record

REHEARSALS_ROOT: Final = Path("state/rehearsals")
FILE: Final = "rehearsal.json"


class WalkedStep(Record):
    """One thing that a launch would go through."""

    name: str = Field(description="what was walked: a guard, a stage, a failure and its recovery")
    expected: str = Field(description="what had to happen")
    found: str = Field(description="what happened")
    passed: bool
    seconds: float = Field(default=0.0, ge=0, description="how long it took, s")


class DryRun(Record):
    """A part of the campaign that was run to its end: training, or a shard under one arm."""

    name: str = Field(description="train, or ARM/SHARD of the held-out evaluation")
    planned: int = Field(ge=0, description="episodes that the configuration asks for")
    graded: int = Field(ge=0, description="episodes that were graded")

    @property
    def complete(self) -> bool:
        """Whether all of it was run."""
        return self.graded >= self.planned


class Rehearsal(Record):
    """One rehearsal: rehearsal.json."""

    name: str = Field(description="of the configuration")
    config_digest: str = Field(description="of the configuration that was rehearsed")
    code: CodePin
    stood_in: list[str] = Field(description="what was another than at the launch, and why")
    steps: list[WalkedStep]
    dry_runs: list[DryRun]
    began_at: float = Field(description="unix time, s")
    seconds: float = Field(ge=0, description="how long it took, s")

    @property
    def problems(self) -> list[str]:
        """What did not go as it had to."""
        found = [f"{step.name}: {step.found}" for step in self.steps if not step.passed]
        return found + [
            f"dry run {run.name}: {run.graded} of {run.planned} episodes graded"
            for run in self.dry_runs
            if not run.complete
        ]


def load_rehearsals(root: Path) -> list[Rehearsal]:
    """Every rehearsal below `root` that was finished, the newest first.

    Raises:
        EvidenceError: one can't be read.
    """
    found: list[Rehearsal] = []
    with read_errors(root):
        paths = sorted(root.glob(f"*/{FILE}")) if root.is_dir() else []
    for path in paths:
        try:
            with read_errors(path):
                found.append(Rehearsal.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            what = f"not a valid record: {first_problem(error)}"
            raise EvidenceError(what, str(path), "remove it, and rehearse again") from None
    return sorted(found, key=lambda rehearsal: -rehearsal.began_at)


def require_rehearsed(root: Path, config_digest: str, code: CodePin, command: str) -> Rehearsal:
    """The newest rehearsal of this very configuration and code.

    Args:
        root: where rehearsals are kept.
        config_digest: what is to be launched.
        code: the program that is to be launched.
        command: what makes a rehearsal, for the remedy.

    Raises:
        ConfigurationError: there is none, or it did not go as it had to.
    """
    same = [one for one in load_rehearsals(root) if one.config_digest == config_digest]
    remedy = f"run `{command}` (minutes, on this machine)"
    if not same:
        raise ConfigurationError("this configuration has not been rehearsed", str(root), remedy)
    for rehearsal in same:
        if (rehearsal.code.commit, rehearsal.code.diff_sha256) != (code.commit, code.diff_sha256):
            continue
        if rehearsal.problems:
            raise ConfigurationError(
                "its last rehearsal failed:\n  - " + "\n  - ".join(rehearsal.problems),
                str(root),
                f"correct that, then {remedy}",
            )
        return rehearsal
    raise ConfigurationError(
        f"it was rehearsed with other code (commit {same[0].code.commit}"
        f"{', changed' if same[0].code.dirty else ''})",
        str(root),
        remedy,
    )
