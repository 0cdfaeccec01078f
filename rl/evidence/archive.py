"""Put a tree of a state directory into one file, and only then, if asked, remove the tree.

Invariants:
- An archive is whole or absent: it is written under a temporary name, synced, and
  given its name when every byte of every file went in as its manifest says; the
  manifest beside it comes last.  An existing archive is never overwritten.
- What changes while it is archived is refused, and so is what a run is writing: the
  locks of its traces are held, so that no writer begins meanwhile either.
- A tree is removed only after its archive was read back from the disk, and after the
  tree was compared with it once more.  It is renamed before the first file of it is
  deleted, so at any moment it is whole, or an archive that verifies exists.
- Memory does not grow with the size of files.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.archive_manifest import (
    ARCHIVES,
    MANIFEST_MEMBER,
    SUFFIX,
    ArchivedEntry,
    ArchiveFile,
    ArchiveManifest,
    Meter,
    discard,
    no_room,
    sidecar_of,
    tool,
)
from rl.evidence.archive_read import verify_archive
from rl.evidence.archive_survey import changed, hold_still, place_of, require_unchanged, survey
from rl.files import create_exclusive, json_bytes, sync_directory

LEVEL: Final = 6  # as for traces, most of which can't be compressed once more
LEVELS: Final = range(1, 20)  # beyond 19 reading needs more memory than a laptop may have
REMOVING: Final = ".removing-"  # a tree under this name is archived, and half deleted
RUN_FOLDERS: Final = ("campaigns", "heldout", "screens", "probes")
_CHUNK_BYTES = 1 << 20
_TYPES = {"folder": tarfile.DIRTYPE, "file": tarfile.REGTYPE, "link": tarfile.SYMTYPE}


@dataclass(frozen=True, slots=True)
class Archived:
    """An archive on disk with its manifest."""

    path: Path
    sidecar: Path
    manifest: ArchiveManifest


def archive(
    target: Path,
    state: Path,
    out: Path | None = None,
    *,
    level: int = LEVEL,
    remove: bool = False,
    meter: Meter | None = None,
) -> Archived:
    """Archive the folder or file `target` of the state directory `state`.

    Args:
        target: what to archive.
        state: the state directory that it lies in.
        out: where the archive goes; by default the state directory's archives.
        level: of zstandard.
        remove: delete `target` once its archive is proven.
        meter: hears how far it is.

    Raises:
        ConfigurationError: `target` is missing, or is nothing that can be archived.
        EvidenceError: it is being written, changed meanwhile, or holds what can't be kept.
        InfrastructureError: the disk is full or failed; there is no archive then.
    """
    meter = meter or Meter()
    folder = out or state / ARCHIVES
    path = _path_below(target, state, folder)
    with hold_still(target):
        entries = survey(target, meter)
        manifest = _manifest(path, entries)
        made = _write(target, manifest, folder, level, meter)
        if remove:
            _remove(target, made, meter)
    return made


def _path_below(target: Path, state: Path, out: Path) -> str:
    """Where `target` lies below the state directory."""
    if not target.exists():
        raise ConfigurationError("no such run, folder or file", str(target), "see: rl.state ls")
    if target.is_symlink():
        raise ConfigurationError("is a link", str(target), "name what it points to")
    real, base, folder = target.resolve(), state.resolve(), out.resolve()
    if not real.is_relative_to(base) or real == base:
        raise ConfigurationError(
            f"lies not below the state directory {state}",
            str(target),
            "name a folder or file in it, or the right state directory by --state",
        )
    if folder.is_relative_to(real) or real.is_relative_to(base / ARCHIVES):
        raise ConfigurationError(
            "is, or holds, the folder of archives",
            str(target),
            "archives are not archived again: copy them elsewhere",
        )
    return real.relative_to(base).as_posix()


def _manifest(path: str, entries: list[ArchivedEntry]) -> ArchiveManifest:
    kind, _, rest = path.partition("/")
    run_id = rest if kind in RUN_FOLDERS and rest and "/" not in rest else None
    return ArchiveManifest(
        kind=kind, run_id=run_id, path=path, made_at=time.time(), tool=tool(), entries=entries
    )


def _write(
    target: Path, manifest: ArchiveManifest, folder: Path, level: int, meter: Meter
) -> Archived:
    """Write archive and manifest into `folder`."""
    with no_room(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = _free_name(folder, manifest)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                sink = _HashingFile(file)
                _fill(sink, target, manifest, level, meter)
                file.flush()
                os.fsync(file.fileno())
            require_unchanged(target, manifest)
            os.link(temporary, path)  # unlike a rename, never over another archive
        finally:
            temporary.unlink(missing_ok=True)
        own = ArchiveFile(name=path.name, bytes=sink.bytes, sha256=sink.digest.hexdigest())
        full = manifest.model_copy(update={"archive": own})
        try:
            sync_directory(folder)
            create_exclusive(sidecar_of(path), json_bytes(full))
        except BaseException as error:
            path.unlink()
            if not isinstance(error, EvidenceError):  # that manifest is another archive's
                sidecar_of(path).unlink(missing_ok=True)
            raise
    return Archived(path, sidecar_of(path), full)


def _free_name(folder: Path, manifest: ArchiveManifest) -> Path:
    """A name that says what and when, and that no archive has."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(manifest.made_at))
    stem = f"{Path(manifest.path).name}-{stamp}"
    number = 1
    while True:
        name = stem if number == 1 else f"{stem}.{number}"
        path = folder / f"{name}{SUFFIX}"
        if not path.exists() and not sidecar_of(path).exists():
            return path
        number += 1


def _fill(
    sink: _HashingFile, target: Path, manifest: ArchiveManifest, level: int, meter: Meter
) -> None:
    """Write the compressed tar, its manifest first."""
    meter.begin("archive", manifest.bytes)
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    with (
        compressor.stream_writer(cast(BinaryIO, sink), closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        content = json_bytes(manifest)
        head = tarfile.TarInfo(MANIFEST_MEMBER)
        head.size, head.mode, head.mtime = len(content), 0o644, int(manifest.made_at)
        tar.addfile(head, _Bytes(content))
        for entry in manifest.entries:
            path = place_of(target, entry)
            try:
                _add(tar, manifest.member(entry), entry, path, meter)
            except FileNotFoundError:
                raise changed(path) from None
            tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue] # it keeps them all


def _add(tar: tarfile.TarFile, name: str, entry: ArchivedEntry, path: Path, meter: Meter) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = _TYPES[entry.kind], entry.mode, entry.mtime_ns // 10**9
    info = path.lstat()
    member.uid, member.gid = info.st_uid, info.st_gid
    if entry.kind == "link":
        member.linkname = entry.target or ""
    if entry.kind != "file":
        tar.addfile(member)
        return
    member.size = entry.bytes
    with path.open("rb") as file:
        reader = _HashingReader(file, meter)
        try:
            tar.addfile(member, reader)
        except OSError as error:
            if error.errno is None:  # tarfile's own: the file ended early
                raise changed(path) from None
            raise
        grown = bool(file.read(1))
    if grown or reader.digest.hexdigest() != entry.sha256:
        raise changed(path)


def _remove(target: Path, made: Archived, meter: Meter) -> None:
    """Delete `target` after proving that its archive holds all of it."""
    verify_archive(made.path, meter=meter)
    if survey(target, meter) != made.manifest.entries:
        raise changed(target)
    doomed = target.with_name(f"{REMOVING}{target.name}-{secrets.token_hex(4)}")
    target.rename(doomed)
    try:
        require_unchanged(doomed, made.manifest)  # since it was compared
    except EvidenceError:
        doomed.rename(target)
        raise
    sync_directory(target.parent)
    discard(doomed)
    sync_directory(target.parent)


class _Bytes:
    """A member's content out of memory."""

    def __init__(self, content: bytes) -> None:
        self._left = memoryview(content)

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        size = len(self._left) if size < 0 else size
        taken, self._left = self._left[:size], self._left[size:]
        return bytes(taken)


class _HashingReader:
    """A file that hashes what is read of it."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self.digest = hashlib.sha256()
        self._file = file
        self._meter = meter

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        chunk = self._file.read(size)
        self.digest.update(chunk)
        self._meter.advance(len(chunk))
        return chunk


class _HashingFile:
    """A file that hashes and counts what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.bytes = 0
        self._file = file

    def write(self, data: bytes, /) -> int:
        """Write all of `data`."""
        self.digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)
