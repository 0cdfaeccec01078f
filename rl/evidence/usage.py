"""What a run used: machines by the receipts of its lifecycle, sandboxes by its episodes.

Invariants:
- Nothing is assumed to have run longer than the evidence shows.  Where a driver was
  cut off, its machines count up to the last thing that is known of it, and a note says so.
- Every terminal record counts, graded or not: a failed attempt was paid for as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import from_json

from rl.config import ResourcesConfig, SandboxConfig
from rl.errors import EvidenceError, first_problem
from rl.evidence.events import STAGE, Event, read_events
from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import LifecycleRow
from rl.evidence.rows import Gates
from rl.evidence.traces import read_frames
from rl.files import read_errors

CAMPAIGN = "campaign"
_RESTORE = "restore it from an archive"


@dataclass(frozen=True, slots=True)
class Held:
    """Machines that were held for some time."""

    who: str
    seconds: float
    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """Sandboxes of one purpose."""

    purpose: str
    number: int
    seconds: float


@dataclass
class Usage:
    """What a run used.

    Attributes:
        begun: unix time of the first thing known, s.
        ended: and of the last.
        held: by the trainer, the replicas, the episode workers.
        sandboxes: by purpose.
        sandbox: what each of them asked for, and from whom.
        notes: what is not in here, or is uncertain.
    """

    begun: float
    ended: float
    held: list[Held] = field(default_factory=list[Held])
    sandboxes: list[Sandboxes] = field(default_factory=list[Sandboxes])
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    notes: list[str] = field(default_factory=list[str])

    @property
    def gpus(self) -> float:
        """GPUs held at once, at most."""
        return sum(held.gpus for held in self.held)


@dataclass(frozen=True, slots=True)
class Span:
    """How long the actors of one driver were held."""

    begun: float
    trainer_ended: float
    ended: float
    cut: bool


def usage_of(directory: CampaignDir) -> Usage:
    """Derive what a run used from its directory, also while it runs.

    Raises:
        EvidenceError: frozen.json or a receipt is missing, damaged or unknown.
    """
    frozen = _frozen(directory)
    config = cast(dict[str, Any], frozen["config"])
    events = read_events(directory.events, live=True)
    spans = driver_spans(directory.lifecycle_rows().read(live=True), events)
    times = [event.time for event in events] + [span.ended for span in spans]
    usage = Usage(begun=float(frozen["created_at"]), ended=max([*times, frozen["created_at"]]))
    usage.begun = min([usage.begun, *(event.time for event in events)])
    try:
        resources = ResourcesConfig.model_validate(config.get("resources", {}))
        usage.sandbox = SandboxConfig.model_validate(config.get("sandbox", {}))
        replicas = int(config["engine"]["replicas"])
        workers = int(config["episodes"].get("workers", 1))
    except (ValidationError, LookupError, TypeError, ValueError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        what = f"its configuration can't be read: {problem}"
        raise EvidenceError(what, str(directory.frozen), _RESTORE) from None
    trains = frozen.get("kind", CAMPAIGN) == CAMPAIGN
    whole = sum(span.ended - span.begun for span in spans)
    training = sum(span.trainer_ended - span.begun for span in spans) if trains else 0.0
    usage.held = [
        Held("trainer", training, resources.trainer_gpus * trains, resources.trainer_cpus * trains),
        Held(
            "replicas", whole, replicas * resources.replica_gpus, replicas * resources.replica_cpus
        ),
        Held("episode workers", whole, 0.0, workers * resources.worker_cpus),
    ]
    usage.sandboxes = [*_episodes(directory, usage.notes), *_gates(directory)]
    _note_cuts(spans, usage)
    return usage


def driver_spans(rows: Sequence[LifecycleRow], events: Sequence[Event]) -> list[Span]:
    """For every driver that started actors, how long they were held."""
    starts = [row for row in rows if row.step == "start" and row.ending is None]
    spans: list[Span] = []
    for index, start in enumerate(starts):
        own = [row for row in rows if row.incarnation == start.incarnation]
        later = starts[index + 1].time if index + 1 < len(starts) else float("inf")
        known = [row.time for row in own] + [e.time for e in events if e.time < later]
        last = max(time for time in known if time >= start.time)
        stops = [row for row in own if row.step == "stop" and row.ending is not None]
        whole = [row.time for row in stops if row.detail != "trainer"]
        ended = whole[-1] if whole else last
        trainer = [row.time for row in stops if row.detail == "trainer"]
        if not _trains(events, start.time, later):
            trainer = [start.time]
        spans.append(Span(start.time, trainer[-1] if trainer else ended, ended, not whole))
    return spans


def _trains(events: Sequence[Event], begun: float, ended: float) -> bool:
    """Whether a driver came to train; one that only evaluates starts no trainer."""
    return any(
        event.kind == STAGE and event.fields.get("stage") == "train" and begun <= event.time < ended
        for event in events
    )


def _frozen(directory: CampaignDir) -> dict[str, Any]:
    """frozen.json of any kind of run, whatever else stands in it."""
    path = directory.frozen
    if not path.is_file():
        raise EvidenceError(
            "missing: the run stopped before it was frozen, so it used nothing that is known",
            str(path),
            "name another run: python -m rl.state ls",
        )
    with read_errors(path):
        content = path.read_bytes()
    try:
        found = json.loads(content)
        if isinstance(found["config"], dict) and isinstance(found["created_at"], int | float):
            return cast(dict[str, Any], found)
    except (ValueError, LookupError, TypeError):
        pass
    raise EvidenceError("is no record of what a run was started with", str(path), _RESTORE)


def _episodes(directory: CampaignDir, notes: list[str]) -> list[Sandboxes]:
    """The sandboxes of each trace's attempts."""
    found: list[Sandboxes] = []
    untimed = 0
    for path in directory.traces:
        number, seconds = 0, 0.0
        for frame in read_frames(path, live=True):
            try:
                timings = cast(dict[str, Any], from_json(frame.data)).get("timings", {})
                total = float(timings.get("total", 0.0))
            except (ValueError, TypeError, AttributeError):
                where = f"{path} record {frame.index + 1}"
                raise EvidenceError("is no episode record", where, _RESTORE) from None
            number, seconds = number + (total > 0), seconds + total
            untimed += total <= 0
        if number:
            name = path.name.removesuffix(".jsonl.zst")
            found.append(Sandboxes(f"{name} episodes", number, seconds))
    if untimed:
        notes.append(f"{untimed} attempts have no time: cancelled, or lost with their driver")
    return found


def _gates(directory: CampaignDir) -> list[Sandboxes]:
    if not directory.gates.is_file():
        return []
    with read_errors(directory.gates):
        content = directory.gates.read_bytes()
    try:
        gates = [gate for gate in Gates.model_validate_json(content).gates if not gate.reused]
    except ValidationError as error:
        what = f"not a valid record: {first_problem(error)}"
        raise EvidenceError(what, str(directory.gates), _RESTORE) from None
    seconds = sum(gate.seconds for gate in gates)
    return [Sandboxes("gates", len(gates), seconds)] if seconds else []


def _note_cuts(spans: Sequence[Span], usage: Usage) -> None:
    cut = sum(span.cut for span in spans)
    if cut:
        usage.notes.append(
            f"{cut} of {len(spans)} drivers have no receipt of their stop (cut off, or running): "
            "their machines count up to the last thing known of them"
        )
    if not spans and usage.gpus:
        usage.notes.append("no receipt of a start: no machine was held that is known of")
