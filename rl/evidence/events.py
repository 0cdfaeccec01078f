"""What happened in a campaign, in order: one JSON line per event.

Invariants:
- Events are only appended; the order in the file is the order of `append`.
- A `stage` event is on disk before `append` returns; others reach the kernel at
  once, so they survive the process but not the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pydantic import Field, JsonValue

from rl.evidence.lines import JsonLines
from rl.records import Record

# Kinds that audit and report read; a campaign may write any other as well.
STAGE: Final = "stage"  # {"stage": name}: gates, freeze, start, train, checkpoint, heldout, done
# {"incarnation": how many did before, "frozen": sha256 of frozen.json}: a driver took over
BEGIN: Final = "begin"
PINNED: Final = "pinned"  # {"file": name, "sha256": its digest}: it is not changed from here on
REPORTED: Final = "reported"  # audit.json is written, and summary.json is next
PUBLISH: Final = "publish"  # {"version": int, "seconds": float}: from adapter to current
DISPATCH: Final = "dispatch"  # {"attempt_id": str}: an attempt was handed to a worker
# {"attempt_id", "outcome", "reward", "sha256" of the record's line}: its record is on disk
ENDED: Final = "ended"
# {"worker": int, "replicas": [...]}: its key, name and a real generation, at each replica
PROVEN: Final = "proven"
# {"problems": [...], "left": [...]}: every actor was stopped; what did not stop by itself,
# and which engine processes of this machine are still there
STOPPED: Final = "stopped"
# {"replica": int, "when": "begin" | "end", "values": {...}}: the engine's own counters
COUNTERS: Final = "engine_counters"
# {"version", "graded", "cells", "reason"}: an evaluation during training has ended
EVAL_OVER: Final = "eval_over"
# {"run": name, "sha256": of all its files}: a held-out shard of another run was taken in
TAKEN_IN: Final = "taken_in"
STAGE_DONE: Final = "done"


class Event(Record):
    """One thing that happened."""

    time: float = Field(description="unix time, s")
    kind: str
    fields: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])


class EventLog:
    """Appends events to one file.

    Args:
        path: the file; created with the first event.
        clock: unix time in seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path, Event)
        self._clock = clock

    def append(self, kind: str, **fields: JsonValue) -> Event:
        """Record that `kind` happened now.

        Raises:
            InfrastructureError: the disk is full or failed.
            EvidenceError: the file has a torn tail.
        """
        event = Event(time=self._clock(), kind=kind, fields=fields)
        self._lines.append(event, sync=kind == STAGE)
        return event

    def stage(self, name: str) -> Event:
        """Record that the campaign entered a stage."""
        return self.append(STAGE, stage=name)


def read_events(path: Path, *, live: bool = False) -> list[Event]:
    """All events; with `live`, without a torn last one.

    Raises:
        EvidenceError: a line is no event.
    """
    return JsonLines(path, Event).read(live=live)
