"""Full checkpoints on disk.

Invariants:
- A checkpoint is a directory `update-NNNN`.  It gets that name by one rename,
  after every file in it, the manifest last, has been written and synced: a crash
  at any point leaves either no new checkpoint or a whole one, and the older ones
  as they were.
- `latest` names only directories with a valid manifest of their own update and
  every file that it names: an adapter, the optimizer's state, the scheduler's.
- Nothing is loaded unless every file has the size and sha256 of the manifest and
  nothing is there that the manifest does not name.
- A valid checkpoint is never overwritten by a different one of the same update.
- One process at a time writes below a root.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl.errors import EvidenceError
from rl.files import sha256_file
from rl.learner import durable
from rl.learner.manifest import (
    ADAPTER,
    MANIFEST,
    OPTIMIZER,
    SCHEDULER,
    CheckpointManifest,
    FileEntry,
    damaged,
    directory_name,
    read_manifest,
    update_of,
    versions,
)
from rl.learner.state import LearnerState, files_sha256
from rl.records import AdapterBytes


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
    final = root / directory_name(update)
    if final.exists() and _is_same(final, manifest):
        return final
    temporary = root / f"{durable.TEMPORARY}{final.name}-{os.getpid()}"
    try:
        _write(temporary, contents, manifest)
        if final.exists():
            durable.remove(final)  # found to be damaged above
        durable.publish(temporary, final)
    except OSError:
        with suppress(OSError):  # the first failure is the one to tell
            durable.discard(temporary)  # give the space back
        raise
    return final


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the greatest update below `root`, hashes not yet verified.

    One that was altered after it was written is still named: `verify` refuses it, and
    whoever reads it hears of the damage instead of silently getting an older one.
    """
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
    manifest = read_manifest(path)
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
        if file.is_symlink() or not file.is_dir()
    }
    for name in sorted(present - set(manifest.files) - {MANIFEST}):
        raise damaged(path / name, "is not in the manifest")
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
    if files_sha256(adapter) != manifest.adapter_sha256:
        raise damaged(path / MANIFEST, "has another digest of the adapter than its files")
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
    _verify_file(path / SCHEDULER, read_manifest(path).files[SCHEDULER])
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
    manifest = CheckpointManifest(
        update=update,
        config_digest=config_digest,
        versions=versions(),
        adapter_sha256=files_sha256(adapter.files),
        probe=adapter.probe,
        files={
            name: FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in sorted(contents.items())
        },
    )
    return manifest.sealed()


def _write(directory: Path, contents: dict[str, bytes], manifest: CheckpointManifest) -> None:
    durable.make_directory(directory)
    durable.make_directory(directory / ADAPTER)
    for name, data in sorted(contents.items()):
        durable.write_file(directory / name, data)
    durable.sync(directory / ADAPTER)
    durable.write_file(directory / MANIFEST, manifest.content())
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
        update = update_of(path)
        if update is None:
            continue
        try:
            manifest = read_manifest(path)
        except EvidenceError:
            continue  # not complete, by definition
        if all((path / name).is_file() for name in manifest.files):
            found[update] = path
    return found


def _parse_scheduler(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise damaged(file, "holds no scheduler's state")
    return cast(dict[str, Any], state)


def _verify_file(file: Path, entry: FileEntry) -> None:
    if file.is_symlink() or not file.is_file():
        raise damaged(file, "is missing" if not file.is_symlink() else "is a symbolic link")
    size = file.stat().st_size
    if size != entry.bytes:
        raise damaged(file, f"has {size} bytes, the manifest says {entry.bytes}")
    if sha256_file(file) != entry.sha256:
        raise damaged(file, "has another sha256 than the manifest says")
