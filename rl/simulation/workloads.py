"""Workloads as data: one strict typed tree, read from TOML.

A file holds a `description`, any number of `[[workload]]` tables, and a `[common]`
table that every one of them starts from; `configs/simulate/` holds the shipped ones.

Invariants:
- Unknown keys are refused, with the nearest known one; every wrong key is named.
- A loaded workload is frozen and consistent; whatever reading finds wrong is a
  `ConfigurationError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, ValidationError, model_validator

from rl.config import ScheduleConfig
from rl.config_file import describe, read_toml
from rl.errors import ConfigurationError
from rl.simulation.recorded import read_recordings
from rl.values import (
    Amount,
    Fraction,
    NonNegative,
    Positive,
    PositiveAmount,
    Seconds,
    Section,
    Share,
    Text,
)

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "simulate"
_OWN = "workload"  # the array of tables
_COMMON = "common"  # what each of them starts from

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,60}$")]


class Lognormal(Section):
    """Durations drawn from a lognormal distribution, per task and attempt."""

    tasks: Positive = Field(description="number of tasks")
    mean_s: Seconds = Field(description="mean duration over tasks and attempts, s")
    cv: Amount = Field(description="standard deviation over mean, of all attempts")
    task_share: Share = Field(
        description="share of the variance of log(duration) that lies between tasks: "
        "0: nobody can know which attempt will be long; 1: a task's attempts take the same"
    )


class Durations(Section):
    """How long an attempt takes, alone on a replica."""

    deadline_s: Seconds | None = Field(
        default=None,
        description="an episode is ended after this, graded as it is, s; none if absent",
    )
    lognormal: Lognormal | None = Field(default=None, description="drawn from a distribution")
    recorded: Text | None = Field(
        default=None,
        description="drawn from what was recorded: a campaign's directory, or a file of JSON "
        'lines {"task": NAME, "seconds": S}; relative to the current directory',
    )

    @model_validator(mode="after")
    def _one_source(self) -> Durations:
        if (self.lognormal is None) == (self.recorded is None):
            raise ValueError("either lognormal or recorded is given")
        return self

    @property
    def recordings(self) -> Sequence[Sequence[float]]:
        """Recorded seconds by task; none if they are drawn."""
        return () if self.recorded is None else read_recordings(Path(self.recorded))

    @property
    def task_count(self) -> int:
        """Number of tasks."""
        return len(self.recordings) if self.lognormal is None else self.lognormal.tasks


class EngineModel(Section):
    """The replicas."""

    replicas: Positive = Field(description="number of replicas")
    speed: tuple[tuple[Positive, Fraction], ...] = Field(
        default=(),
        description="pairs (attempts on a replica, speed of each), from (1, 1.0) on, piecewise "
        "linear, then constant; empty: attempts never slow each other down",
    )

    @model_validator(mode="after")
    def _falls_from_one(self) -> EngineModel:
        if not self.speed:
            return self
        if self.speed[0] != (1, 1.0):
            raise ValueError("speed begins with (1, 1.0)")
        for (low, fast), (high, slow) in pairwise(self.speed):
            if high <= low or slow > fast:
                raise ValueError("speed goes on in rising attempts and never rises itself")
        return self


class TrainerModel(Section):
    """The trainer and the way of its weights."""

    update_s: Seconds = Field(description="T_train: a full batch, accumulated and stepped, s")
    sync_s: Amount = Field(description="T_sync: a publication, from step to served, s")
    ahead_cost: PositiveAmount = Field(
        default=1.15,
        description="an attempt that is worked on before its group is complete, over one in a "
        "whole group, which shares its prompt; 1.5 for a loss with a term beside the advantage's",
    )


class Failures(Section):
    """What goes wrong."""

    masked_share: Share = Field(
        default=0.0,
        description="share of attempts that a fault of the infrastructure ends, at a moment "
        "drawn uniformly from their duration",
    )
    mtbf_s: Seconds | None = Field(
        default=None,
        description="mean time between a replica's return and its next failure, exponential, s; "
        "none if absent",
    )
    restart_s: Seconds = Field(default=120.0, description="until a failed replica serves again, s")


class Workload(Section):
    """One thing to simulate."""

    name: Name = Field(description="names it in results")
    seed: NonNegative = Field(default=0, description="seed of the trace and of the task order")
    slots: Positive = Field(description="attempts that may run at once, over all replicas")
    schedule: ScheduleConfig = Field(description="updates, batches, staleness: a campaign's own")
    engine: EngineModel = Field(description="the replicas")
    durations: Durations = Field(description="how long attempts take")
    trainer: TrainerModel = Field(description="the trainer")
    failures: Failures = Field(default=Failures(), description="what goes wrong")

    @model_validator(mode="after")
    def _can_run(self) -> Workload:
        if self.schedule.refill_zero_variance:
            raise ValueError("schedule.refill_zero_variance must be 0: rewards are not simulated")
        if self.slots < self.engine.replicas:
            raise ValueError("slots may not be fewer than engine.replicas")
        return self


class WorkloadSet(Section):
    """The workloads of one file."""

    description: Text = Field(description="what they show")
    workload: tuple[Workload, ...] = Field(min_length=1, description="the workloads")

    @model_validator(mode="after")
    def _names_differ(self) -> WorkloadSet:
        names = [workload.name for workload in self.workload]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two workloads have the same name: {', '.join(doubled)}")
        return self


def shipped() -> dict[str, Path]:
    """The shipped files by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def find_workloads(wanted: str) -> tuple[Workload, ...]:
    """The workloads that `wanted` names: a shipped set or a file, then perhaps `:NAME`.

    Raises:
        ConfigurationError: there is no such set, file or workload, or it is wrong.
    """
    source, colon, name = wanted.partition(":")
    found = load_set(_locate(source)).workload
    if not colon:
        return found
    names = [workload.name for workload in found]
    if name not in names:
        raise ConfigurationError(
            f"there is no workload '{name}'", source, _nearest(name, names, "its workloads are")
        )
    return (found[names.index(name)],)


def load_set(path: Path) -> WorkloadSet:
    """Read and validate one file.

    Raises:
        ConfigurationError: naming every wrong key and the nearest right one.
    """
    data = read_toml(path)
    common = _table(data.pop(_COMMON, {}), _COMMON, path)
    own = data.get(_OWN, [])
    if isinstance(own, list):
        data[_OWN] = [_merged(common, _table(table, _OWN, path)) for table in cast(list[Any], own)]
    return _validated(WorkloadSet, data, str(path))


def revise(workload: Workload, changes: Mapping[str, Any], where: str) -> Workload:
    """The workload with other values, by dotted key; validated anew.

    Raises:
        ConfigurationError: they don't fit; `where` names their origin.
    """
    data = workload.model_dump(exclude_none=True)
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = data
        for name in tables:
            table = table[name]
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return _validated(Workload, data, where)


def _locate(source: str) -> Path:
    files = shipped()
    if source in files:
        return files[source]
    path = Path(source)
    if path.suffix == ".toml" or path.exists():
        return path
    hint = _nearest(source, list(files), "shipped are")
    raise ConfigurationError(
        "there is no such workload", source, f"{hint}; or give the path of a .toml file"
    )


def _nearest(wanted: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"{otherwise} {', '.join(known)}"


def _table(value: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"'{key}' is not a table", str(path), f"see {SHIPPED} for the shape of such a file"
        )
    return cast(dict[str, Any], value)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `base`, table by table."""
    merged = dict(base)
    for key, value in own.items():
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = _merged(cast(dict[str, Any], under), cast(dict[str, Any], value))
        else:
            merged[key] = value
    return merged


def _validated[ModelT: BaseModel](model: type[ModelT], data: Any, where: str) -> ModelT:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # What [common] has wrong is wrong in every workload: it is said once.
        lines = list(dict.fromkeys(_explain(item, model) for item in error.errors()))
        what = lines[0] if len(lines) == 1 else "\n  - ".join(["several keys are wrong", *lines])
        raise ConfigurationError(
            what, where, "correct it; `python -m benchmarks.simulate --describe` lists every key"
        ) from None


def _explain(item: Any, model: type[BaseModel]) -> str:
    """One line for one validation error, with the nearest key for an unknown one."""
    loc = tuple(item["loc"])
    parts = [part for part in loc if isinstance(part, str)]
    in_entry = len(loc) > 1 and isinstance(loc[1], int)  # inside one [[workload]]
    shown = ".".join(parts[1:] if in_entry else parts) or "(whole workload)"
    if item["type"] != "extra_forbidden":
        message = str(item["msg"]).removeprefix("Value error, ")
        given = item.get("input")
        suffix = f" (given: {given!r:.100})" if isinstance(given, str | int | float) else ""
        return f"'{shown}': {message}{suffix}"
    *tables, last = parts
    keys = [key for key, _ in describe(model)]
    here = [key.split(".")[-1] for key in keys if key.split(".")[:-1] == tables]
    elsewhere = [key for key in keys if key.split(".")[-1] == last]
    if not difflib.get_close_matches(last, here, n=1, cutoff=0.5) and elsewhere:
        return f"unknown key '{shown}'; did you mean '{elsewhere[0]}'?"
    return f"unknown key '{shown}'; {_nearest(last, here, 'known here:')}"
