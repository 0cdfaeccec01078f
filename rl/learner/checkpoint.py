"""Full checkpoints on disk.

Invariants:
- A checkpoint is a directory `update-NNNN`.  It gets that name by one rename,
  after every file in it, the manifest last, has been written and synced: a crash
  at any point leaves either no new checkpoint or a whole one, and the older ones
  as they were.
- `latest` names only directories with a readable manifest of their own update,
  and a manifest names an adapter, the optimizer's state and the scheduler's.
- Nothing is loaded unless every file has the size and sha256 of the manifest and
  no file is there that the manifest does not name.
- A valid checkpoint is never overwritten by a different one of the same update.
- One process at a time writes below a root.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError

from rl.errors import EvidenceError
from rl.files import sha256_file
from rl.learner import durable
from rl.learner.state import LearnerState, files_sha256
from rl.records import AdapterBytes, Probe, Record

MANIFEST = "manifest.json"
ADAPTER = "adapter"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.json"
_NAME = re.compile(r"update-(\d{4,})")


class FileEntry(Record):
    """One file of a checkpoint."""

    bytes: int = Field(ge=0, description="size")
    sha256: str = Field(description="digest of the content, hex")


class CheckpointManifest(Record):
    """What a checkpoint is and what it consists of."""

    update: int = Field(ge=0, description="the last update that is in it; also the version")
    config_digest: str = Field(description="digest of the campaign's configuration")
    adapter_sha256: str = Field(description="over the adapter's sorted names and contents")
    probe: Probe = Field(description="the adapter's logprobs of the probe tokens")
    files: dict[str, FileEntry] = Field(description="by path relative to the checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, read."""

    path: Path
    manifest: CheckpointManifest
    learner: LearnerState
    scheduler: dict[str, Any]


def save_checkpoint(
    root: Path,
    update: int,
    learner: LearnerState,
    scheduler_state: dict[str, Any],
    config_digest: str,
) -> Path:
    """Write the checkpoint of `update` below `root`; return its directory.

    Saving the same content again is no error and changes nothing.

    Raises:
        EvidenceError: the learner is at another version, or a different, valid
            checkpoint of this update exists.
        OSError: the disk refused; older checkpoints are as they were.
    """
    if learner.adapter.version != update:
        raise EvidenceError(
            f"the learner is at version {learner.adapter.version}", f"checkpoint of update {update}"
        )
    contents = _contents(learner, scheduler_state)
    manifest = _manifest(update, learner.adapter, contents, config_digest)
    durable.ensure_directory(root)
    durable.clear_temporary(root)
    final = root / f"update-{update:04d}"
    if final.exists() and _is_same(final, manifest):
        return final
    temporary = root / f"{durable.TEMPORARY}{final.name}-{os.getpid()}"
    try:
        _write(temporary, contents, manifest)
        if final.exists():
            durable.remove(final)  # found to be damaged above
        durable.publish(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # give the space back
        raise
    return final


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the greatest update below `root`, hashes not yet verified."""
    complete = _complete(root)
    return complete[max(complete)] if complete else None


def verify(path: Path, config_digest: str | None = None) -> CheckpointManifest:
    """Check every file of the checkpoint at `path` against its manifest; return that.

    Args:
        path: a checkpoint directory.
        config_digest: the campaign's; None accepts any campaign's checkpoint.

    Raises:
        EvidenceError: naming the first file that is missing, foreign, truncated
            or altered, or the campaign's digest that differs.
    """
    manifest = _read_manifest(path)
    if config_digest is not None and manifest.config_digest != config_digest:
        raise EvidenceError(
            f"belongs to a campaign of configuration {manifest.config_digest[:12]}, "
            f"not {config_digest[:12]}",
            str(path / MANIFEST),
            "resume with the configuration that the campaign was started with",
        )
    present = {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_symlink() or file.is_file()
    }
    for name in sorted(present - set(manifest.files) - {MANIFEST}):
        raise _damaged(path / name, "is not in the manifest")
    for name, entry in sorted(manifest.files.items()):
        _verify_file(path / name, entry)
    return manifest


def load(path: Path, config_digest: str | None = None) -> Checkpoint:
    """Verify and read the checkpoint at `path`.

    Raises:
        EvidenceError: as `verify`.
    """
    manifest = verify(path, config_digest)
    adapter = {
        name.removeprefix(f"{ADAPTER}/"): (path / name).read_bytes()
        for name in manifest.files
        if name.startswith(f"{ADAPTER}/")
    }
    state = LearnerState(
        adapter=AdapterBytes(
            version=manifest.update,
            files=adapter,
            sha256=manifest.adapter_sha256,
            probe=manifest.probe,
        ),
        optimizer=(path / OPTIMIZER).read_bytes(),
    )
    return Checkpoint(path, manifest, state, _parse_scheduler(path / SCHEDULER))


def read_scheduler(path: Path) -> dict[str, Any]:
    """The scheduler's state in the checkpoint at `path`, verified.

    Raises:
        EvidenceError: that file is damaged.
    """
    _verify_file(path / SCHEDULER, _read_manifest(path).files[SCHEDULER])
    return _parse_scheduler(path / SCHEDULER)


def prune(root: Path, keep: Set[int]) -> list[Path]:
    """Remove the complete checkpoints whose updates are not in `keep`, except the newest.

    Returns:
        What was removed, oldest first.
    """
    complete = _complete(root)
    removed: list[Path] = []
    for update in sorted(complete)[:-1]:
        if update not in keep:
            durable.remove(complete[update])
            removed.append(complete[update])
    return removed


def _contents(learner: LearnerState, scheduler_state: dict[str, Any]) -> dict[str, bytes]:
    adapter = {f"{ADAPTER}/{name}": data for name, data in learner.adapter.files.items()}
    scheduler = json.dumps(scheduler_state, sort_keys=True, allow_nan=False)
    return {**adapter, OPTIMIZER: learner.optimizer, SCHEDULER: scheduler.encode()}


def _manifest(
    update: int, adapter: AdapterBytes, contents: dict[str, bytes], config_digest: str
) -> CheckpointManifest:
    return CheckpointManifest(
        update=update,
        config_digest=config_digest,
        adapter_sha256=files_sha256(adapter.files),
        probe=adapter.probe,
        files={
            name: FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in sorted(contents.items())
        },
    )


def _write(directory: Path, contents: dict[str, bytes], manifest: CheckpointManifest) -> None:
    durable.make_directory(directory)
    durable.make_directory(directory / ADAPTER)
    for name, data in sorted(contents.items()):
        durable.write_file(directory / name, data)
    durable.sync(directory / ADAPTER)
    durable.write_file(directory / MANIFEST, manifest.model_dump_json(indent=2).encode())
    durable.sync(directory)


def _is_same(path: Path, wanted: CheckpointManifest) -> bool:
    """Whether `path` holds just that checkpoint; False if it is damaged.

    Raises:
        EvidenceError: it is valid and something else.
    """
    try:
        found = verify(path)
    except EvidenceError:
        return False
    if found != wanted:
        raise EvidenceError(
            "a different, valid checkpoint of this update exists",
            str(path),
            "resume from it, or move it away",
        )
    return True


def _complete(root: Path) -> dict[int, Path]:
    """Complete checkpoints below `root`, by update."""
    found: dict[int, Path] = {}
    for path in root.glob("update-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or not (path / MANIFEST).is_file():
            continue
        try:
            manifest = _read_manifest(path)
        except EvidenceError:
            continue  # not complete, by definition
        if manifest.update == int(match[1]):
            found[manifest.update] = path
    return found


def _read_manifest(path: Path) -> CheckpointManifest:
    file = path / MANIFEST
    if file.is_symlink():
        raise _damaged(file, "is a symbolic link")
    try:
        manifest = CheckpointManifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise _damaged(file, "is missing: no complete checkpoint") from None
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = f"is no manifest of ours: {error.errors()[0]['msg']}"
        raise _damaged(file, problem) from None
    for name in (OPTIMIZER, SCHEDULER):
        if name not in manifest.files:
            raise _damaged(file, f"names no {name}")
    if not any(name.startswith(f"{ADAPTER}/") for name in manifest.files):
        raise _damaged(file, "names no file of an adapter")
    return manifest


def _parse_scheduler(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise _damaged(file, "holds no scheduler's state")
    return cast(dict[str, Any], state)


def _verify_file(file: Path, entry: FileEntry) -> None:
    if file.is_symlink() or not file.is_file():
        raise _damaged(file, "is missing" if not file.is_symlink() else "is a symbolic link")
    size = file.stat().st_size
    if size != entry.bytes:
        raise _damaged(file, f"has {size} bytes, the manifest says {entry.bytes}")
    if sha256_file(file) != entry.sha256:
        raise _damaged(file, "has another sha256 than the manifest says")


def _damaged(file: Path, problem: str) -> EvidenceError:
    return EvidenceError(
        problem, str(file), "remove this checkpoint's directory to go on from the one before"
    )
