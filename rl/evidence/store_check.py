"""Prove what lies in a state directory, file by file, without changing any of it.

Invariants:
- Every file whose format is ours is read to its end: traces, JSON Lines, JSON,
  archives, cohorts, checkpoints.  What else lies there (logs, pages) is passed over.
- One damaged file hides no other; each is a finding that names the file and, where
  there is one, the remedy.
- A torn tail is told apart from damage: a crash leaves it, and a resume repairs it.
- Where a run is being written, a torn tail is its writer's next record, and no finding.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import zstandard
from pydantic import BaseModel, Field, ValidationError

from rl.errors import CampaignError, EvidenceError, first_problem
from rl.evidence.archive_manifest import ARCHIVES, SUFFIX, Meter, sidecar_of
from rl.evidence.archive_read import verify_archive
from rl.evidence.billing import BILLING, Billing
from rl.evidence.events import Event
from rl.evidence.frozen import config_digest
from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import LifecycleRow
from rl.evidence.lines import JsonLines
from rl.evidence.rows import Arms, Audit, Finding, Gates, UpdateRow
from rl.evidence.store import CACHES, is_left_over, is_running, size_of
from rl.evidence.traces import TornTraceError, read_traces
from rl.files import read_errors
from rl.records import Record, UpdateMetrics

TRACE: Final = ".jsonl.zst"
COHORTS: Final = "cohorts"
_RESTORE = "restore the file from an archive"
_CHECKPOINT = re.compile(r"update-\d{4,}")
_LINES: dict[str, type[BaseModel]] = {
    "events.jsonl": Event,
    "lifecycle.jsonl": LifecycleRow,
    "metrics.jsonl": UpdateMetrics,
    "updates.jsonl": UpdateRow,
}
_RECORDS: dict[str, type[BaseModel]] = {"gates.json": Gates, "arms.json": Arms, "audit.json": Audit}
_CHUNK_BYTES = 1 << 20

type Checker = Callable[[Path], str]


class StoreCheck(Record):
    """What was checked, and what is wrong."""

    checked: dict[str, int] = Field(description="number of files, checkpoints, ... by kind")
    findings: list[Finding]
    notes: list[str] = Field(description="worth knowing, and not wrong")


@dataclass
class StoreChecker:
    """Checks files and folders.

    Args:
        checkpoint: raises `EvidenceError` for a checkpoint's folder that is not whole.
        cohort: raises a `CampaignError` for a cohort's manifest that does not hold; what
            it returns is a note.
        meter: hears how far it is.
    """

    checkpoint: Checker
    cohort: Checker
    meter: Meter = field(default_factory=Meter)
    _checked: Counter[str] = field(default_factory=Counter[str])
    _findings: list[Finding] = field(default_factory=list[Finding])
    _notes: list[str] = field(default_factory=list[str])

    def check(self, paths: Sequence[Path]) -> StoreCheck:
        """Check everything at and below `paths`."""
        for path in paths:
            self.meter.begin(f"verify {path}", size_of(path))
            self._visit(path, live=_is_live(path))
        return StoreCheck(
            checked=dict(sorted(self._checked.items())),
            findings=self._findings,
            notes=self._notes,
        )

    def _visit(self, path: Path, *, live: bool) -> None:
        if is_left_over(path):
            self._notes.append(f"{path}: of a command at work, or of one that was cut off")
        elif path.is_symlink():
            self._notes.append(f"{path}: a link, not followed")
        elif path.is_dir():
            self._folder(path, live=live)
        elif path.is_file() and not path.name.startswith("."):
            self._file(path, live=live)
            self.meter.advance(path.stat().st_size)

    def _folder(self, path: Path, *, live: bool) -> None:
        if _CHECKPOINT.fullmatch(path.name):
            self._try("checkpoint", path, lambda: self.checkpoint(path))
            self.meter.advance(size_of(path))
            return
        if path.name.startswith("."):
            self._notes.append(f"{path}: unfinished, of a writer at work or of one that died")
            return
        live = live or _is_live(path)
        with read_errors(path):
            children = sorted(path.iterdir())
        for child in children:
            self._visit(child, live=live)

    def _file(self, path: Path, *, live: bool) -> None:
        name = path.name
        if name.endswith(TRACE):
            self._try("trace", path, lambda: self._trace(path, live=live))
        elif name.endswith(SUFFIX):
            self._try("archive", path, lambda: self._packed(path))
        elif path.parent.name == ARCHIVES and path.suffix == ".json":
            if not path.with_name(path.stem + SUFFIX).exists():
                missing = "the archive that it describes is gone"
                self._find("archive", EvidenceError(missing, str(path), "look for a copy of it"))
        elif name.endswith(".jsonl"):
            self._try("JSON Lines", path, lambda: self._lines(path, live=live))
        elif path.parent.name == COHORTS and path.suffix == ".json":
            self._try("cohort", path, lambda: self.cohort(path))
        elif name.endswith(".json"):
            self._try("JSON", path, lambda: _json(path))

    def _try(self, kind: str, path: Path, check: Callable[[], str]) -> None:
        """Run one check; what it refuses is a finding, what it returns a note."""
        try:
            note = check()
        except CampaignError as error:
            self._find(kind, error)
        else:
            if note:
                self._notes.append(f"{path}: {note}")
        self._checked[kind] += 1

    def _find(self, kind: str, error: CampaignError) -> None:
        damage = "torn" if isinstance(error, TornTraceError) else "damaged"
        code = f"{damage}-{kind.lower().replace(' ', '-')}"
        message = f"{error.what}; {error.remedy}" if error.remedy else error.what
        self._findings.append(Finding(code=code, where=error.where, message=message))

    def _trace(self, path: Path, *, live: bool) -> str:
        records = sum(1 for _ in read_traces(path, live=live))
        self._checked["episode"] += records
        return ""

    def _packed(self, path: Path) -> str:
        """An archive of ours, or another packed file, such as a snapshot of sources."""
        if path.parent.name == ARCHIVES or sidecar_of(path).exists():
            verify_archive(path)
            return "" if sidecar_of(path).exists() else "whole, but has no manifest beside it"
        _unpack(path)
        return ""

    def _lines(self, path: Path, *, live: bool) -> str:
        row = _LINES.get(path.name)
        if row is not None:
            JsonLines(path, row).read(live=live)
            return ""
        with read_errors(path):
            *lines, tail = path.read_bytes().split(b"\n")
        if tail and not live:
            what = f"its last row is torn: {len(tail)} bytes without an end"
            remedy = "resume the run, which repairs it"
            raise EvidenceError(what, f"{path}:{len(lines) + 1}", remedy)
        for number, line in enumerate(lines, start=1):
            _object(line, f"{path}:{number}")
        return ""


def whole_store(state: Path) -> list[Path]:
    """What there is to check in a state directory: all but caches."""
    with read_errors(state):
        return sorted(path for path in state.iterdir() if path.name not in CACHES)


def _is_live(path: Path) -> bool:
    directory = CampaignDir(path)
    return directory.failed_trace.parent.is_dir() and is_running(directory)


def _json(path: Path) -> str:
    """A JSON file, as the record that it should be where that is known."""
    with read_errors(path):
        content = path.read_bytes()
    record = Billing if path.parent.name == BILLING else _RECORDS.get(path.name)
    if record is not None and (record is Billing or (path.parent / "frozen.json").exists()):
        try:
            record.model_validate_json(content)
        except ValidationError as error:
            what = f"not a valid {record.__name__}: {first_problem(error)}"
            raise EvidenceError(what, str(path), _RESTORE) from None
    elif path.name == "frozen.json":
        _frozen(_object(content, str(path)), path)
    else:
        _parsed(content, str(path))
    return ""


def _frozen(found: dict[str, Any], path: Path) -> None:
    config, digest = found.get("config"), found.get("config_digest")
    if not isinstance(config, dict) or not isinstance(digest, str):
        raise EvidenceError("holds no configuration with its digest", str(path), _RESTORE)
    if config_digest(cast(dict[str, Any], config)) != digest:
        what = "the configuration in it does not have the digest in it"
        raise EvidenceError(what, str(path), _RESTORE)


def _object(content: bytes, where: str) -> dict[str, Any]:
    found = _parsed(content, where)
    if not isinstance(found, dict):
        raise EvidenceError("is no JSON object", where, _RESTORE)
    return cast(dict[str, Any], found)


def _parsed(content: bytes, where: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"is no JSON: {error}", where, _RESTORE) from None


def _unpack(path: Path) -> None:
    """Decompress a file to its end."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    with read_errors(path), path.open("rb") as file:
        try:
            while chunk := file.read(_CHUNK_BYTES):
                decoder.decompress(chunk)
                if decoder.eof:
                    break
        except zstandard.ZstdError as error:
            raise EvidenceError(f"is damaged: {error}", str(path), _RESTORE) from None
        if not decoder.eof or decoder.unused_data or file.read(1):
            raise EvidenceError("is cut off, or goes on behind its end", str(path), _RESTORE)
