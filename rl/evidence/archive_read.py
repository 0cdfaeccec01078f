"""Read an archive through: to verify it, or to restore what it holds.

Invariants:
- The archive is read once, front to back, in memory that neither it nor its files
  determine, also if it was made to do harm.
- Its members are exactly its manifest's entries, in their order, each of the same
  kind, size, mode and sha256; nothing stands before, between or behind them.
- Restoring writes into a fresh folder of its own near the target.  That gets its
  name by one rename when the whole archive has proven right and all is on disk; what
  exists is never written to or replaced.
- Nothing is written through a link: every folder below the fresh one was made here.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tarfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Final, cast

import zstandard

from rl.errors import CampaignError, ConfigurationError, EvidenceError
from rl.evidence.archive_manifest import (
    MANIFEST_MEMBER,
    RESTORE,
    ROOT,
    SUFFIX,
    ArchivedEntry,
    ArchiveManifest,
    Meter,
    discard,
    no_room,
    parse_manifest,
    read_sidecar,
    sidecar_of,
)
from rl.evidence.frames import count_frames
from rl.files import read_errors, sync_directory, write_all

RESTORING: Final = ".restoring-"  # a tree under this name is being restored, or was cut off
_CHUNK_BYTES = 1 << 20
_HEADER_LIMIT_BYTES = 1 << 20  # of all that stands between two members' contents
_MANIFEST_LIMIT_BYTES = 1 << 28  # a million files
_KINDS = {tarfile.DIRTYPE: "folder", tarfile.REGTYPE: "file", tarfile.SYMTYPE: "link"}

type Take = Callable[[ArchivedEntry, Iterator[bytes]], None]


def verify_archive(archive: Path, *, meter: Meter | None = None) -> ArchiveManifest:
    """Prove that an archive is as it was written, every byte of it.

    Without the manifest beside it, what it holds is proven by the one inside.

    Raises:
        EvidenceError: naming what is missing, damaged or foreign.
    """

    def take(_: ArchivedEntry, content: Iterator[bytes]) -> None:
        for _chunk in content:
            pass

    return _read_through(archive, take, meter or Meter())


def restore(
    archive: Path, state: Path, to: Path | None = None, *, meter: Meter | None = None
) -> Path:
    """Restore what `archive` holds, and return where it lies now.

    Args:
        archive: the archive, or the manifest beside it.
        state: the state directory, below which it goes to where it lay.
        to: what it becomes instead; must not exist.
        meter: hears how far it is.

    Raises:
        ConfigurationError: the target exists.
        EvidenceError: the archive is damaged or hostile; nothing was restored.
        InfrastructureError: the disk is full or failed; nothing was restored.
    """
    if archive.suffix == ".json":
        archive = archive.with_name(archive.stem + SUFFIX)
    with _open(archive) as reader:
        manifest = _manifest_of(archive, reader.tar, reader)
    target = to if to is not None else state / manifest.path
    _require_free(target)
    fresh = _folder_above(target) / f"{RESTORING}{target.name}-{secrets.token_hex(4)}"
    with no_room(target):
        try:
            manifest = _read_through(archive, _Writer(fresh).take, meter or Meter())
            _settle(fresh, manifest)
            target.parent.mkdir(parents=True, exist_ok=True)
            _require_free(target)
            _give_name(fresh, target)
        finally:
            discard(fresh)
        sync_directory(target.parent)
    return target


def _folder_above(target: Path) -> Path:
    """The nearest folder above `target` that exists, on the same file system as it."""
    folder = target.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigurationError(
            "exists already, and nothing is restored over it",
            str(target),
            "move it away, or restore elsewhere by --to DIR or --state DIR",
        )


def _give_name(fresh: Path, target: Path) -> None:
    if fresh.is_dir():
        fresh.rename(target)  # refused by the kernel if someone made a folder with content
    else:
        os.link(fresh, target)  # unlike a rename, never over another file


def _settle(fresh: Path, manifest: ArchiveManifest) -> None:
    """Give folders their modes and times, inner ones first, and put them on disk."""
    for entry in reversed(manifest.entries):
        if entry.kind == "folder":
            path = fresh if entry.path == ROOT else fresh / entry.path
            sync_directory(path)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
            path.chmod(entry.mode)


class _Writer:
    """Writes what an archive holds into a folder that does not exist yet."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def take(self, entry: ArchivedEntry, content: Iterator[bytes]) -> None:
        """Write one entry."""
        path = self._root if entry.path == ROOT else self._root / entry.path
        times = (entry.mtime_ns, entry.mtime_ns)
        if entry.kind == "folder":
            path.mkdir(mode=0o700)
        elif entry.kind == "link":
            path.symlink_to(entry.target or "")
            os.utime(path, ns=times, follow_symlinks=False)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                for chunk in content:
                    write_all(descriptor, chunk)
                os.fchmod(descriptor, entry.mode)
                os.utime(descriptor, ns=times)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _read_through(archive: Path, take: Take, meter: Meter) -> ArchiveManifest:
    """Hand every entry with its content to `take`, and prove the archive meanwhile."""
    with _open(archive) as reader:
        manifest = _manifest_of(archive, reader.tar, reader)
        meter.begin("read back", manifest.bytes)
        for entry in manifest.entries:
            _read_member(archive, reader, manifest, entry, take, meter)
        reader.allow(0)
        extra = reader.tar.next()
        if extra is not None:
            raise _wrong(archive, f"holds {extra.name!r}, which its manifest does not name")
        reader.finish()
    _require_whole(archive, manifest, reader)
    return manifest


def _require_whole(archive: Path, inside: ArchiveManifest, reader: _Reader) -> None:
    """Compare the archive's file with the manifest beside it, if there is one."""
    sidecar = sidecar_of(archive)
    if not sidecar.exists():
        return
    beside = read_sidecar(sidecar)
    own = beside.archive
    if own is None or own.name != archive.name:
        raise EvidenceError("is the manifest of another archive", str(sidecar), RESTORE)
    if beside.model_copy(update={"archive": None}) != inside:
        raise EvidenceError(
            f"differs from the manifest in {archive.name}",
            str(sidecar),
            "the archive itself is whole: remove this file, and verify it again",
        )
    if (own.bytes, own.sha256) != (reader.packed.bytes, reader.packed.digest.hexdigest()):
        raise _wrong(archive, "has another size or sha256 than the manifest beside it says")


def _manifest_of(archive: Path, tar: tarfile.TarFile, reader: _Reader) -> ArchiveManifest:
    """The manifest that is the first member."""
    reader.allow(0)
    member = tar.next()
    if member is None or member.name != MANIFEST_MEMBER or member.type != tarfile.REGTYPE:
        raise _wrong(archive, f"is no archive of ours: {MANIFEST_MEMBER} is not its first member")
    if member.size > _MANIFEST_LIMIT_BYTES:
        raise _wrong(archive, f"has a manifest of {member.size} bytes")
    content = b"".join(_content(reader, tar, member))
    manifest = parse_manifest(content, f"{archive} ({MANIFEST_MEMBER})")
    if manifest.archive is not None:
        raise _wrong(archive, "has a manifest that claims to know the archive's digest")
    return manifest


def _read_member(
    archive: Path,
    reader: _Reader,
    manifest: ArchiveManifest,
    entry: ArchivedEntry,
    take: Take,
    meter: Meter,
) -> None:
    """Read the next member, which has to be `entry`."""
    name = manifest.member(entry)
    reader.allow(0)
    member = reader.tar.next()
    reader.tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue] # it keeps them all
    if member is None:
        raise _wrong(archive, f"ends before {name!r}")
    if member.name.rstrip("/") != name:
        raise _wrong(archive, f"holds {member.name!r} where its manifest has {name!r}")
    kind = None if member.sparse else _KINDS.get(member.type)
    if kind != entry.kind or (entry.kind == "link" and member.linkname != entry.target):
        raise _wrong(archive, f"holds {name!r} as something else than its manifest says")
    if member.size != entry.bytes or member.mode != entry.mode:
        raise _wrong(archive, f"holds {name!r} with another size or mode than its manifest says")

    def proven() -> Generator[bytes]:
        digest = hashlib.sha256()
        for chunk in _content(reader, reader.tar, member):
            digest.update(chunk)
            meter.advance(len(chunk))
            yield chunk
        if digest.hexdigest() != entry.sha256:
            raise _wrong(archive, f"holds {name!r} with another sha256 than its manifest says")

    take(entry, proven() if entry.kind == "file" else iter(()))


def _content(reader: _Reader, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    """A member's content in chunks, all of it."""
    reader.allow(member.size)
    file: IO[bytes] | None = tar.extractfile(member)
    left = member.size
    while file is not None and left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise tarfile.ReadError("unexpected end of data")
        left -= len(chunk)
        yield chunk


@contextmanager
def _open(archive: Path) -> Generator[_Reader]:
    """The archive, open; damage of zstandard or tar becomes an error that names the file."""
    with read_errors(archive):
        file = archive.open("rb")
        frames, rest = count_frames(archive)
    with file:
        # The decompressor itself takes a file that ends too early for one that ends.
        if (frames, rest) != (1, 0):
            what = "is cut off" if frames == 0 else "holds something behind its compressed data"
            raise _wrong(archive, f"{what}, or is no archive of ours")
        reader = _Reader(file, archive)
        try:
            with tarfile.open(fileobj=cast(BinaryIO, reader), mode="r|") as reader.tar:
                yield reader
        except CampaignError:
            raise
        except (tarfile.TarError, zstandard.ZstdError, ValueError, OverflowError) as error:
            raise _wrong(archive, f"is damaged: {error}") from error


class _Reader:
    """The tar in an archive: decompressed in bounded pieces, hashed, and read to its end.

    `allow` says how much content comes next; beside it, there are only headers, so that
    no member can make tarfile take an enormous header into memory.
    """

    def __init__(self, file: BinaryIO, archive: Path) -> None:
        self.tar: tarfile.TarFile
        self.packed = _Packed(file, archive)
        source = cast(BinaryIO, self.packed)
        self._stream = zstandard.ZstdDecompressor().stream_reader(source, closefd=False)
        self._archive = archive
        self._allowed = _HEADER_LIMIT_BYTES

    def allow(self, content: int) -> None:
        """So many bytes of content come next, and headers."""
        self._allowed = content + _HEADER_LIMIT_BYTES

    def read(self, size: int, /) -> bytes:
        """The next bytes of the tar, none at its end."""
        taken = self._stream.read(size)
        self._allowed -= len(taken)
        if self._allowed < 0:
            raise _wrong(self._archive, "has a header larger than any of ours")
        return taken

    def finish(self) -> None:
        """Read to the end, behind whose last member only zeros may stand."""
        while rest := self.read(_CHUNK_BYTES):
            if rest.strip(b"\0"):
                raise _wrong(self._archive, "holds something behind its last member")
        while self.packed.read(_CHUNK_BYTES):
            pass


class _Packed:
    """The archive's file, hashed and counted as it is read."""

    def __init__(self, file: BinaryIO, archive: Path) -> None:
        self.digest = hashlib.sha256()
        self.bytes = 0
        self._file = file
        self._archive = archive

    def read(self, size: int, /) -> bytes:
        """The next bytes."""
        with read_errors(self._archive):
            piece = self._file.read(size)
        self.digest.update(piece)
        self.bytes += len(piece)
        return piece


def _wrong(archive: Path, what: str) -> EvidenceError:
    return EvidenceError(what, str(archive), RESTORE)
