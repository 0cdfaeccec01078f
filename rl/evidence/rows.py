"""The records of a campaign directory besides episodes, metrics and events.

Invariants:
- Every record is frozen and carries `schema_version`, as all of `rl.records`.
- An `UpdateRow` names exactly the attempts that the update trained on.
- In `Arms`, names and versions are unique, and `base` is version 0.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from rl.records import Record

BASE_ARM: Final = "base"


def eval_arm(version: int) -> str:
    """The arm of a version that is evaluated during training."""
    return f"update{version}"


class TrainedGroup(Record):
    """One group of a batch."""

    group_id: str
    version: int = Field(ge=0, description="policy version that sampled it")
    attempt_ids: list[str] = Field(description="the attempts trained on, in order")


class UpdateRow(Record):
    """What one update was trained on: a line of updates.jsonl."""

    update: int = Field(ge=1)
    groups: list[TrainedGroup]
    adapter_sha256: str | None = Field(
        default=None, description="digest of the adapter that the update made"
    )


class ArmPin(Record):
    """One set of weights under evaluation."""

    arm: str = Field(description="name, such as base or step10")
    version: int = Field(ge=0, description="policy version of the weights")
    adapter_sha256: str | None = Field(
        description="the trainer's digest of the adapter; None: the base model without one"
    )
    directory: str | None = Field(
        default=None, description="adapter folder, relative to the campaign's"
    )
    files: dict[str, str] = Field(
        default_factory=dict[str, str], description="sha256 by file of that folder"
    )


class Arms(Record):
    """All arms, base first: arms.json, written before the evaluation starts."""

    arms: list[ArmPin] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Arms:
        if len({pin.arm for pin in self.arms}) < len(self.arms):
            raise ValueError("two arms have one name")
        if len({pin.version for pin in self.arms}) < len(self.arms):
            raise ValueError("two arms have one version")
        if self.arms[0].arm != BASE_ARM or self.arms[0].version != 0:
            raise ValueError("the first arm is base, of version 0")
        return self

    @property
    def final(self) -> ArmPin:
        """The arm with the newest weights."""
        return max(self.arms, key=lambda pin: pin.version)


class GateResult(Record):
    """One task's gate: the reference solution scores 1, doing nothing scores 0."""

    task_name: str
    digest: str
    passed: bool
    oracle_reward: float | None = None
    nothing_reward: float | None = None
    reused: bool = Field(default=False, description="proven before for this very digest")
    seconds: float = 0.0
    message: str = ""


class Gates(Record):
    """All gates: gates.json."""

    gates: list[GateResult]


class Finding(Record):
    """One thing that is wrong with a campaign's evidence."""

    code: str = Field(description="kind of finding, such as stale-episode")
    where: str = Field(description="the record concerned")
    message: str


class Audit(Record):
    """What an audit looked at and found: audit.json."""

    run_id: str
    checked: dict[str, int] = Field(description="number of records by kind")
    findings: list[Finding]
