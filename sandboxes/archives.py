"""A local archive as the files it holds: what ADD unpacks.

Invariants:
- Nothing is extracted on this machine: members become records that the sandbox writes.
- A member whose name leaves the target, or goes through a link of the same archive,
  and a member that is no file, directory or link, is refused by name.
- An archive is told by its content, never by its name.
- Members belong to root, whatever the archive says.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rl.errors import TaskPackageError
from sandboxes.channel import Entry
from sandboxes.transfer import PIECE

ZSTANDARD_MAGIC = b"\x28\xb5\x2f\xfd"
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError)


def is_archive(path: Path) -> bool:
    """Whether ADD unpacks the file: a tar archive, plain or by gzip, bzip2 or xz.

    Raises:
        TaskPackageError: it is compressed by zstandard, which ADD would unpack, too.
    """
    with path.open("rb") as handle:
        if handle.read(4) == ZSTANDARD_MAGIC:
            raise TaskPackageError("a zstandard archive cannot be unpacked", str(path))
    try:
        return tarfile.is_tarfile(path)
    except _BROKEN:
        return False


def archive_entries(path: Path, target: str) -> Iterator[Entry]:
    """What the archive at `path` holds, below `target`.

    Raises:
        TaskPackageError: a member is refused, or the archive is broken.
    """
    links: set[PurePosixPath] = set()
    yield (target, "d", 0, b"")
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name.lstrip("/"))
                if ".." in name.parts or "\0" in member.name:
                    raise TaskPackageError(f"member {member.name!r} leaves the target", str(path))
                if not links.isdisjoint(name.parents):
                    raise TaskPackageError(f"member {member.name!r} is below a link", str(path))
                if member.issym():
                    links.add(name)
                else:
                    links.discard(name)
                yield from _member(archive, member, f"{target.rstrip('/')}/{name}", path)
    except _BROKEN as error:
        raise TaskPackageError(f"cannot be unpacked: {error}", str(path)) from None


def _member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, goal: str, path: Path
) -> Iterator[Entry]:
    mode = member.mode & 0o777
    if member.isdir():
        yield (goal, "d", mode, b"")
    elif member.issym():
        yield (goal, "l", 0, member.linkname.encode("utf-8", errors="surrogateescape"))
    elif member.isreg() or member.islnk():
        try:
            content = archive.extractfile(member)
        except KeyError:
            content = None  # a hard link to what is not in the archive
        if content is None:
            raise TaskPackageError(f"member {member.name!r} names no file", str(path))
        with content:
            yield (goal, "f", mode, content.read(PIECE))
            while piece := content.read(PIECE):
                yield (goal, "a", mode, piece)
    else:
        raise TaskPackageError(f"member {member.name!r} is a device or a pipe", str(path))
