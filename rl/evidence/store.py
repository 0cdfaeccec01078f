"""What lies in a state directory: runs, archives, records and caches.

Invariants:
- Nothing is changed, locked or unpacked: a listing is quick, and disturbs no run.
- Whatever can't be read is listed with what is wrong, and hides nothing else.
- A folder that is not known is never called replaceable.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import Field

from rl.errors import EvidenceError
from rl.evidence.archive import REMOVING, RUN_FOLDERS
from rl.evidence.archive_manifest import ARCHIVES, ROOT, SUFFIX, ArchiveManifest, read_sidecar
from rl.evidence.archive_read import RESTORING
from rl.evidence.billing import BILLING
from rl.evidence.events import STAGE, STAGE_DONE
from rl.evidence.frames import count_frames
from rl.evidence.layout import CampaignDir
from rl.records import Record

IRREPLACEABLE: Final = (*RUN_FOLDERS, ARCHIVES, BILLING, "receipts", "cohorts")
CACHES: Final = ("models", "tasks", "git", "gates", "benchmarks")
_LOCKS = Path("/proc/locks")

type Status = Literal["finished", "running", "unfinished", "not frozen"]


class RunRow(Record):
    """One run."""

    kind: str = Field(description="its folder: campaigns, heldout, screens, probes")
    run_id: str
    path: str
    begun: float | None = Field(description="unix time, s; None: nothing says it")
    status: Status
    stage: str = Field(description="the last one that it entered; empty before the first")
    graded: dict[str, int] = Field(description="graded episodes by trace")
    failed: int = Field(description="masked and cancelled episodes")
    checkpoints: int
    findings: int | None = Field(description="of its audit; None: not audited")
    bytes: int
    archived: Literal["yes", "changed since", "no"] = Field(
        description="whether an archive has all of it, by sizes and times; `verify` reads it"
    )
    problems: list[str] = Field(description="torn or unreadable files")


class ArchiveRow(Record):
    """One archive."""

    name: str
    path: str = Field(description="where it is restored to, below the state directory")
    bytes: int
    made_at: float | None
    original: Literal["in place", "removed", "unknown"]
    problem: str = ""


class FolderRow(Record):
    """One folder of the state directory."""

    name: str
    entries: int
    bytes: int
    keep: Literal["irreplaceable", "can be made again", "not known"]


class Store(Record):
    """A state directory."""

    root: str
    runs: list[RunRow]
    archives: list[ArchiveRow]
    folders: list[FolderRow]
    left_over: list[str] = Field(description="of what is at work, or was cut off")


def survey_store(state: Path) -> Store:
    """List a state directory."""
    manifests: dict[str, list[ArchiveManifest]] = {}
    archives = [_archive_row(path, state, manifests) for path in archives_in(state / ARCHIVES)]
    runs = [run_row(path, manifests) for path in runs_in(state)]
    folders = sorted(path for path in _children(state) if path.is_dir() and path.name[0] != ".")
    places = [state, *(state / kind for kind in (*RUN_FOLDERS, ARCHIVES))]
    left = [path for place in places for path in _children(place) if is_left_over(path)]
    return Store(
        root=str(state),
        runs=runs,
        archives=archives,
        folders=[_folder_row(path) for path in folders],
        left_over=[str(path) for path in left],
    )


def runs_in(state: Path) -> list[Path]:
    """The folders of all runs, by kind and name."""
    return [
        path
        for kind in RUN_FOLDERS
        for path in _children(state / kind)
        if path.is_dir() and not path.name.startswith(".")
    ]


def archives_in(folder: Path) -> list[Path]:
    """Archives, and those of which only a manifest is left, by the archive's path."""
    names = {path.name for path in _children(folder) if path.name.endswith(SUFFIX)}
    names |= {path.stem + SUFFIX for path in _children(folder) if path.suffix == ".json"}
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def is_left_over(path: Path) -> bool:
    """Whether this is of an archiving or restoration at work, or of one that was cut off."""
    unfinished = path.name.startswith(".") and path.name.endswith(".tmp")
    return unfinished or path.name.startswith((REMOVING, RESTORING))


def run_row(path: Path, manifests: dict[str, list[ArchiveManifest]] | None = None) -> RunRow:
    """One run's row; `manifests` are the archives by what they restore to."""
    directory, problems = CampaignDir(path), list[str]()
    frozen = _json(directory.frozen, problems)
    audit = _json(directory.audit, problems)
    begun, stage = _stages(directory.events, problems)
    counts: Counter[str] = Counter()
    for trace in (t for run in (directory, *directory.shards) for t in run.traces if t.exists()):
        counts[trace.name.removesuffix(".jsonl.zst")] += _count(trace, problems)
    created = frozen.get("created_at") if frozen else None
    checkpoints = [entry for entry in _children(directory.checkpoints) if entry.is_dir()]
    findings = audit.get("findings") if audit else None
    key = f"{path.parent.name}/{path.name}"
    return RunRow(
        kind=path.parent.name,
        run_id=path.name,
        path=str(path),
        begun=float(created) if isinstance(created, int | float) else begun,
        status=_status(directory, frozen is not None, stage),
        stage=stage,
        failed=counts.pop("failed", 0),
        graded=dict(counts),
        checkpoints=sum(entry.name.startswith("update-") for entry in checkpoints),
        findings=len(findings) if isinstance(findings, list) else None,
        bytes=size_of(path),
        archived=_archived(path, (manifests or {}).get(key, [])),
        problems=problems,
    )


def is_running(directory: CampaignDir) -> bool:
    """Whether a process of this machine holds one of the run's traces.

    The kernel's list is read instead of the lock being tried, because a try that
    succeeds would keep a run from starting for a moment.
    """
    try:
        locks = _LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    held = {line.split()[5].rpartition(":")[2] for line in locks if " FLOCK " in line}
    return any(str(path.stat().st_ino) in held for path in directory.traces if path.exists())


def size_of(path: Path) -> int:
    """Size of a file, or of all files of a folder; links are not followed."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        return info.st_size
    return sum(size_of(child) for child in _children(path))


def _count(path: Path, problems: list[str]) -> int:
    try:
        frames, rest = count_frames(path)
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return 0
    if rest:
        problems.append(f"{path.name}: {rest} bytes at its end hold no whole record")
    return frames


def _stages(path: Path, problems: list[str]) -> tuple[float | None, str]:
    """When the first event was, and the last stage that was entered."""
    if not path.is_file():
        return None, ""
    begun, stage = None, ""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if begun is not None and b'"stage"' not in line:
                continue
            try:
                event = json.loads(line)
                begun = begun if begun is not None else float(event["time"])
                if event["kind"] == STAGE:
                    stage = str(event["fields"]["stage"])
            except (ValueError, LookupError, TypeError):
                problems.append(f"{path.name}:{number} is no event")
    return begun, stage


def _status(directory: CampaignDir, frozen: bool, stage: str) -> Status:
    if is_running(directory):
        return "running"
    if not frozen:
        return "not frozen"
    return "finished" if stage == STAGE_DONE else "unfinished"


def _archived(
    path: Path, manifests: list[ArchiveManifest]
) -> Literal["yes", "changed since", "no"]:
    """Whether an archive holds the run as it is now."""
    if not manifests:
        return "no"
    now = {(ROOT if child == path else child.relative_to(path).as_posix()): child.lstat()
           for child in _all(path)}  # fmt: skip
    for manifest in manifests:
        entries = {entry.path: entry for entry in manifest.entries}
        if entries.keys() == now.keys() and all(
            entry.mtime_ns == now[name].st_mtime_ns
            and (entry.kind != "file" or entry.bytes == now[name].st_size)
            for name, entry in entries.items()
        ):
            return "yes"
    return "changed since"


def _archive_row(
    path: Path, state: Path, manifests: dict[str, list[ArchiveManifest]]
) -> ArchiveRow:
    size = path.stat().st_size if path.exists() else 0
    row = ArchiveRow(name=path.name, path="", bytes=size, made_at=None, original="unknown")
    try:
        manifest = read_sidecar(path.with_name(path.name.removesuffix(SUFFIX) + ".json"))
    except EvidenceError as error:
        return row.model_copy(update={"problem": f"{Path(error.where).name}: {error.what}"})
    problem = ""
    if not path.exists():
        problem = "is gone: only its manifest is left"
    elif manifest.archive is None or size != manifest.archive.bytes:
        problem = "has another size than its manifest says"
    else:
        manifests.setdefault(manifest.path, []).append(manifest)
    there = os.path.lexists(state / manifest.path)
    return ArchiveRow(
        name=path.name,
        path=manifest.path,
        bytes=size,
        made_at=manifest.made_at,
        original="in place" if there else "removed",
        problem=problem,
    )


def _folder_row(path: Path) -> FolderRow:
    known = "can be made again" if path.name in CACHES else "not known"
    return FolderRow(
        name=path.name,
        entries=len(_children(path)),
        bytes=size_of(path),
        keep="irreplaceable" if path.name in IRREPLACEABLE else known,
    )


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A file that should hold a JSON object; None if it is absent or does not."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def _all(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for child in _children(path):
            yield from _all(child)


def _children(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
