"""Where everything of a campaign lies on disk.

Invariants:
- A campaign owns one directory, named by its run id; nobody else writes there.
- `create` succeeds for exactly one of two processes that want the same run id.
- Names of files are written here and nowhere else.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from pydantic_core import from_json

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.events import Event
from rl.evidence.lifecycle import LifecycleRow
from rl.evidence.lines import JsonLines
from rl.evidence.rows import Arms, Gates, UpdateRow
from rl.evidence.traces import read_traces, repair
from rl.files import (
    append_bytes,
    disk_errors,
    read_errors,
    sync_directory,
    write_bytes,
    write_json,
)
from rl.records import EpisodeRecord, Stage, UpdateMetrics

CAMPAIGNS_ROOT: Final = Path("state/campaigns")
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class CampaignDir:
    """The paths of one campaign."""

    root: Path

    @property
    def run_id(self) -> str:
        """The campaign's name: its directory's."""
        return self.root.resolve().name

    @property
    def frozen(self) -> Path:
        """What the campaign was started with, a `Frozen`."""
        return self.root / "frozen.json"

    @property
    def gates(self) -> Path:
        """Results of the task gates, a `Gates`."""
        return self.root / "gates.json"

    @property
    def events(self) -> Path:
        """What happened, `Event` rows."""
        return self.root / "events.jsonl"

    @property
    def lifecycle(self) -> Path:
        """Intents and receipts of the training's lifecycle, `LifecycleRow` rows."""
        return self.root / "lifecycle.jsonl"

    def trace(self, stage: Stage) -> Path:
        """Graded episodes of a stage, `EpisodeRecord` frames."""
        return self.root / "traces" / f"{stage}.jsonl.zst"

    @property
    def failed_trace(self) -> Path:
        """Masked and cancelled episodes of every stage, `EpisodeRecord` frames."""
        return self.root / "traces" / "failed.jsonl.zst"

    @property
    def traces(self) -> tuple[Path, ...]:
        """All traces of its own, whether they are there or not."""
        return (*map(self.trace, STAGES), self.failed_trace)

    def episodes(self, stage: Stage, *, live: bool = False) -> Iterator[EpisodeRecord]:
        """Every terminal record of a stage: the graded ones, then the others.

        The held-out stage's include those of shards that were taken in.

        Raises:
            EvidenceError: as for `read_traces`.
        """
        yield from self.own_episodes(stage, live=live)
        if stage == "heldout":
            for shard in self.shards:
                yield from shard.own_episodes(stage, live=live)

    def own_episodes(self, stage: Stage, *, live: bool = False) -> Iterator[EpisodeRecord]:
        """The same, of what this run has dispatched itself."""
        yield from read_traces(self.trace(stage), live=live)
        for record in read_traces(self.failed_trace, live=live):
            if record.stage == stage:
                yield record

    @property
    def shards_folder(self) -> Path:
        """Folder of the held-out shards that runs of their own have evaluated."""
        return self.root / "shards"

    @property
    def shards(self) -> tuple[CampaignDir, ...]:
        """The shards that were taken in, each the whole directory of its run."""
        folder = self.shards_folder
        if not folder.is_dir():
            return ()
        return tuple(
            CampaignDir(path)
            for path in sorted(folder.iterdir())
            if path.is_dir() and not path.name.startswith(".")
        )

    @property
    def metrics(self) -> Path:
        """One `UpdateMetrics` row per update."""
        return self.root / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        """One `UpdateRow` per update: what it was trained on."""
        return self.root / "updates.jsonl"

    @property
    def superseded(self) -> Path:
        """Rows of updates that were made again after a resume."""
        return self.root / "superseded.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of full checkpoints."""
        return self.root / "checkpoints"

    @property
    def arms(self) -> Path:
        """The weights under evaluation, an `Arms`."""
        return self.root / "arms.json"

    @property
    def audit(self) -> Path:
        """What the audit found, an `Audit`."""
        return self.root / "audit.json"

    @property
    def summary(self) -> Path:
        """The headline numbers, a `Summary`."""
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.root / "logs"

    def metrics_rows(self) -> JsonLines[UpdateMetrics]:
        """Reader and writer of `metrics`."""
        return JsonLines(self.metrics, UpdateMetrics)

    def update_rows(self) -> JsonLines[UpdateRow]:
        """Reader and writer of `updates`."""
        return JsonLines(self.updates, UpdateRow)

    def lifecycle_rows(self) -> JsonLines[LifecycleRow]:
        """Reader and writer of `lifecycle`."""
        return JsonLines(self.lifecycle, LifecycleRow)

    def write_arms(self, arms: Arms) -> None:
        """Write arms.json."""
        write_json(self.arms, arms)

    def write_gates(self, gates: Gates) -> None:
        """Write gates.json."""
        write_json(self.gates, gates)

    def superseded_adapters(self) -> set[str]:
        """Digests of adapters whose updates were made again after a resume.

        Raises:
            EvidenceError: a row is no JSON.
        """
        with read_errors(self.superseded):
            if not self.superseded.exists():
                return set()
            lines = self.superseded.read_bytes().splitlines()
        try:
            rows = [from_json(line) for line in lines]
        except ValueError as error:
            raise EvidenceError(f"not JSON: {error}", str(self.superseded)) from None
        return {str(row["adapter_sha256"]) for row in rows if row.get("adapter_sha256")}

    def repair(self) -> dict[str, int]:
        """Cut the torn tails that a crash left; returns bytes cut by file, if any.

        Raises:
            EvidenceError: a trace is damaged elsewhere than at its end.
        """
        logs = (
            JsonLines(self.events, Event),
            self.lifecycle_rows(),
            self.metrics_rows(),
            self.update_rows(),
        )
        cut = {log.path: log.repair() for log in logs}
        cut |= {path: repair(path) for path in self.traces}
        return {path.relative_to(self.root).as_posix(): n for path, n in cut.items() if n}

    def rewind(self, updates_done: int) -> int:
        """Set rows of later updates aside, because a resume makes these again.

        They move to `superseded`, so each update stays once in `metrics` and
        `updates`; a crash in between leaves a row in both, which loses nothing.

        Returns:
            The number of rows moved.
        """
        moved = 0
        for lines in (self.metrics_rows(), self.update_rows()):
            rows = lines.read()
            kept = [row for row in rows if row.update <= updates_done]
            later = [row for row in rows if row.update > updates_done]
            if not later:
                continue
            _append_plain(self.superseded, "".join(f"{r.model_dump_json()}\n" for r in later))
            write_bytes(lines.path, "".join(f"{r.model_dump_json()}\n" for r in kept).encode())
            moved += len(later)
        return moved


def new_run_id(name: str, now: float | None = None) -> str:
    """`name` with the local time behind it, such as local-20260131-093005."""
    moment = time.localtime(time.time() if now is None else now)
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', moment)}"


def create(run_id: str, root: Path = CAMPAIGNS_ROOT) -> CampaignDir:
    """Make the directory of a new campaign.

    Raises:
        ConfigurationError: the run id is taken, or is no plain name.
        InfrastructureError: the disk is full or `root` can't be written.
    """
    directory = CampaignDir(_path_of(run_id, root))
    with disk_errors(directory.root):
        root.mkdir(parents=True, exist_ok=True)
        try:
            directory.root.mkdir()
        except FileExistsError:
            raise ConfigurationError(
                f"run id '{run_id}' is taken {_occupant(directory)}",
                str(directory.root),
                "continue it with --resume, or choose another --run-id"
                if directory.frozen.exists()
                else "choose another --run-id, or remove the directory: nothing was frozen in it",
            ) from None
        for folder in (directory.failed_trace.parent, directory.checkpoints, directory.logs):
            folder.mkdir()
        sync_directory(directory.root)
        sync_directory(root)
    return directory


def open_existing(run_id: str, root: Path = CAMPAIGNS_ROOT) -> CampaignDir:
    """The directory of a campaign that was begun.

    Raises:
        ConfigurationError: there is none of this name; the newest ones are named.
    """
    path = _path_of(run_id, root)
    if path.is_dir():
        return CampaignDir(path)
    known = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    newest = sorted(known, key=lambda entry: entry.stat().st_mtime, reverse=True)[:3]
    names = ", ".join(entry.name for entry in newest)
    raise ConfigurationError(
        f"no run '{run_id}'",
        str(path),
        f"the newest ones are: {names}" if names else f"{root} holds no run yet",
    )


def find_run(named: str, root: Path) -> CampaignDir:
    """The run of a name in `root`, or of a directory.

    Raises:
        ConfigurationError: there is none of this name.
        EvidenceError: the directory is no run's.
    """
    if "/" in named or Path(named).is_dir():
        return open_path(Path(named))
    return open_existing(named, root)


def open_path(path: Path) -> CampaignDir:
    """The campaign directory at `path`, wherever it was copied to.

    Raises:
        EvidenceError: it is no campaign directory.
    """
    directory = CampaignDir(path)
    if not directory.frozen.is_file():
        what = "holds no frozen.json" if path.is_dir() else "no such directory"
        if path.is_file():
            what = "is a file"
        raise EvidenceError(
            what, str(path), "give the directory of a run, such as state/campaigns/RUN_ID"
        )
    return directory


def _path_of(run_id: str, root: Path) -> Path:
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(
            f"{run_id!r} can't be a run id",
            "run id",
            "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return root / run_id


def _occupant(directory: CampaignDir) -> str:
    """Who has the directory, and since when, for a message."""
    try:
        begun = directory.frozen.stat().st_mtime
    except OSError:
        return "by a run that was not frozen"
    return f"by a run of {time.strftime('%Y-%m-%d %H:%M', time.localtime(begun))}"


def _append_plain(path: Path, text: str) -> None:
    """Append lines of mixed record types."""
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        append_bytes(descriptor, path, text.encode())
    finally:
        os.close(descriptor)
