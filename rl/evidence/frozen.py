"""What a campaign is started with, and the proof that it has not changed.

Invariants:
- frozen.json is written once, before the first submission, and never again.
- Everything that decides the campaign's course is pinned by content: the
  configuration, every task, the model's files, the code.
- No training task is held out: the two sets are disjoint by content digest.
- `verify_frozen` names every part that differs; it never says only "changed".
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from rl.config import CampaignConfig, ModelConfig, ServingConfig
from rl.config_file import parse_config
from rl.errors import ConfigurationError, EvidenceError, first_problem
from rl.evidence.code_pin import CodePin, code_differences
from rl.evidence.layout import CampaignDir
from rl.files import create_exclusive, json_bytes, read_errors, sha256_files
from rl.records import Record, TaskRef
from rl.screen_config import ScreenConfig

_SHOWN_PAIRS = 5
_RESTORE: Final = "restore it from an archive, or start a new campaign under another --run-id"


class ModelPin(Record):
    """The base model by content."""

    name: str
    source: str = Field(description="packaged, hub or path")
    pin: str = Field(description="commit, packaged file's sha256, or the local path")
    files: dict[str, str] = Field(description="sha256 by file of the model directory")


class EvaluationPlan(Record):
    """How fixed weights are evaluated."""

    attempts: int = Field(ge=1, description="graded attempts per task and arm")
    shards: int = Field(ge=1, description="disjoint sets of tasks, each on one replica")
    retries: int = Field(ge=0, description="relaunches of a masked attempt")


RunKind = Literal["campaign", "heldout", "screen", "probe"]


class Frozen(Record):
    """All that a run was started with: frozen.json."""

    kind: RunKind = Field(default="campaign", description="what kind of run it is")
    plan: EvaluationPlan | None = Field(
        default=None, description="of a run that evaluates alone; a campaign's is in its config"
    )
    source: str = Field(default="", description="the run that the weights are of, if another")
    run_id: str
    created_at: float = Field(description="unix time, s")
    config: dict[str, Any] = Field(description="the whole configuration")
    config_digest: str
    train: list[TaskRef]
    heldout: list[TaskRef]
    model: ModelPin
    code: CodePin

    @property
    def evaluation(self) -> EvaluationPlan:
        """How the run evaluates fixed weights."""
        return self.plan if self.plan is not None else heldout_plan(self.campaign_config())

    def campaign_config(self) -> CampaignConfig:
        """The configuration as a campaign's typed tree.

        Raises:
            EvidenceError: this version of the project can't read it.
        """
        return self._parsed(CampaignConfig)

    def serving_config(self) -> ServingConfig:
        """The configuration as the typed tree of the run's kind.

        Raises:
            EvidenceError: this version of the project can't read it.
        """
        return self._parsed(ScreenConfig if self.kind == "screen" else CampaignConfig)

    def _parsed[T: ServingConfig](self, model: type[T]) -> T:
        try:
            return parse_config(self.config, where="frozen.json", model=model)
        except ConfigurationError as error:
            raise EvidenceError(
                f"the frozen configuration does not parse: {error.what}",
                "frozen.json",
                f"use the project at commit {self.code.commit or 'that wrote it'}",
            ) from error


def heldout_plan(config: CampaignConfig) -> EvaluationPlan:
    """How a campaign evaluates its base and final weights."""
    return EvaluationPlan(
        attempts=config.heldout.attempts,
        shards=config.heldout.shards,
        retries=config.schedule.attempt_retries,
    )


def freeze(
    directory: CampaignDir,
    config: ServingConfig,
    *,
    train: Sequence[TaskRef],
    heldout: Sequence[TaskRef],
    model: ModelPin,
    code: CodePin,
    kind: RunKind = "campaign",
    plan: EvaluationPlan | None = None,
    source: str = "",
    now: float | None = None,
) -> Frozen:
    """Write frozen.json.

    Raises:
        ConfigurationError: a task is in both sets or twice in one, or a held-out one
            repeats the instruction of a training one.
        EvidenceError: the campaign is frozen already.
    """
    require_disjoint(train, heldout)
    require_distinct(train, heldout, config.tasks.near_duplicate)
    frozen = Frozen(
        kind=kind,
        plan=plan,
        source=source,
        run_id=directory.run_id,
        created_at=time.time() if now is None else now,
        config=config.model_dump(mode="json"),
        config_digest=config.digest(),
        train=list(train),
        heldout=list(heldout),
        model=model,
        code=code,
    )
    create_exclusive(directory.frozen, json_bytes(frozen))
    return frozen


def load_frozen(directory: CampaignDir) -> Frozen:
    """Read frozen.json.

    Raises:
        EvidenceError: it is missing, can't be read, or is no valid record.
    """
    path = directory.frozen
    try:
        with read_errors(path):
            if not path.exists():
                raise EvidenceError(
                    "missing: the campaign stopped before it was frozen",
                    str(path),
                    "start it again under another --run-id",
                )
            return Frozen.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise EvidenceError(
            f"not a valid record: {first_problem(error)}", str(path), _RESTORE
        ) from None


def verify_frozen(
    directory: CampaignDir,
    config: ServingConfig,
    *,
    train: Sequence[TaskRef],
    heldout: Sequence[TaskRef],
    model: ModelPin,
    code: CodePin | None = None,
) -> Frozen:
    """Prove that a campaign continues with what it was started with.

    Args:
        directory: the campaign.
        config: the configuration now.
        train: the training tasks now.
        heldout: the held-out tasks now.
        model: the model now.
        code: the code now; None accepts any.

    Raises:
        EvidenceError: frozen.json contradicts itself or is missing.
        ConfigurationError: something differs; the message names each part.
    """
    frozen = load_frozen(directory)
    if config_digest(frozen.config) != frozen.config_digest:
        raise EvidenceError(
            "the configuration in it does not have the digest in it",
            str(directory.frozen),
            _RESTORE,
        )
    differences = [
        *(
            f"configuration {key}: {difference}"
            for key, difference in config_differences(frozen.config, config.model_dump(mode="json"))
        ),
        *_task_differences("training", frozen.train, train),
        *_task_differences("held-out", frozen.heldout, heldout),
        *model_differences(frozen.model, model),
        *(code_differences(frozen.code, code) if code is not None else []),
    ]
    if differences:
        raise ConfigurationError(
            "\n  - ".join(["differs from what the run was started with", *differences]),
            str(directory.frozen),
            "restore what was frozen, or start a new run under another --run-id",
        )
    return frozen


def require_disjoint(train: Sequence[TaskRef], heldout: Sequence[TaskRef]) -> None:
    """Refuse task sets that share content or name a task twice.

    Raises:
        ConfigurationError: naming the tasks.
    """
    seen: dict[str, str] = {}
    for kind, tasks in (("training", train), ("held-out", heldout)):
        for task in tasks:
            if task.digest in seen:
                raise ConfigurationError(
                    f"{kind} task '{task.name}' has the content of {seen[task.digest]}",
                    f"digest {task.digest[:16]}",
                    "remove one of them: evaluation would measure what was trained on"
                    if kind == "held-out"
                    else "remove one of them",
                )
            seen[task.digest] = f"{kind} task '{task.name}'"


def require_distinct(
    train: Sequence[TaskRef], heldout: Sequence[TaskRef], threshold: float
) -> None:
    """Refuse held-out tasks whose instruction is a training task's with light edits.

    Raises:
        ConfigurationError: naming the pairs.
    """
    from rl.evidence.near_duplicates import near_duplicates

    found = near_duplicates(train, heldout, threshold)
    if found:
        pairs = [
            f"'{pair.heldout.name}' and '{pair.train.name}' ({pair.similarity:.0%} alike)"
            for pair in found[:_SHOWN_PAIRS]
        ]
        if len(found) > len(pairs):
            pairs.append(f"and {len(found) - len(pairs)} more")
        raise ConfigurationError(
            "\n  - ".join(["held-out tasks repeat instructions of training tasks:", *pairs]),
            "tasks",
            "leave one of each pair out; or, if their names or files tell them apart, give "
            "them a metadata.family, or raise tasks.near_duplicate",
        )


def config_digest(config: dict[str, Any]) -> str:
    """The digest of a dumped configuration, as `CampaignConfig.digest` makes it."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def pin_model(config: ModelConfig, directory: Path) -> ModelPin:
    """Pin the model in `directory` by the content of its files."""
    pin = config.revision or config.sha256 or config.path or ""
    return ModelPin(name=config.name, source=config.source, pin=pin, files=sha256_files(directory))


def config_differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> list[tuple[str, str]]:
    """What differs between two dumped configurations: each key, and how."""
    found: list[tuple[str, str]] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found.extend(config_differences(before, after, f"{prefix}{key}."))
        elif before != after:
            found.append((f"{prefix}{key}", f"{before!r} -> {after!r}"))
    return found


def _task_differences(kind: str, old: Sequence[TaskRef], new: Sequence[TaskRef]) -> list[str]:
    before = {task.name: task.digest for task in old}
    after = {task.name: task.digest for task in new}
    found = [f"{kind} task '{name}' is gone" for name in sorted(before.keys() - after.keys())]
    found += [f"{kind} task '{name}' is new" for name in sorted(after.keys() - before.keys())]
    changed = [name for name in before if name in after and before[name] != after[name]]
    found += [f"{kind} task '{name}' has other content" for name in changed]
    if not found and list(before) != list(after):
        found.append(f"the {kind} tasks are in another order")
    return found


def model_differences(old: ModelPin, new: ModelPin) -> list[str]:
    """What differs between two pins, in words."""
    found = [
        f"model {field}: {getattr(old, field)!r} -> {getattr(new, field)!r}"
        for field in ("name", "source", "pin")
        if getattr(old, field) != getattr(new, field)
    ]
    names = sorted(old.files.keys() | new.files.keys())
    changed = [name for name in names if old.files.get(name) != new.files.get(name)]
    return found + [f"model file {name} differs" for name in changed]
