"""Host files to and from a sandbox, as the channel's records.

Invariants:
- Nothing outside the folder that is sent is read: a symlink inside it goes over
  as a link, one that leaves it is refused.
- What comes back is written below the target only, to regular files and
  folders that this module makes itself; any other name or type is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from rl.errors import SandboxError
from sandboxes.channel import Entry

PIECE = 1 << 20
MAX_DOWNLOAD_BYTES = 1 << 30  # above any sandbox's disk; a lying daemon is cut off here
LONGEST_PATH = 2048  # the daemon sends none that is longer
MAX_DOWNLOAD_FILES = 100_000


def file_entries(source: Path, target: str) -> Iterator[Entry]:
    """One file, in pieces."""
    info = source.stat()
    if not stat.S_ISREG(info.st_mode):
        raise SandboxError("only regular files can be sent", str(source))
    mode = stat.S_IMODE(info.st_mode) & 0o777
    with source.open("rb") as handle:
        yield (target, "f", mode, handle.read(PIECE))
        while piece := handle.read(PIECE):
            yield (target, "a", mode, piece)


def tree_entries(source: Path, target: str) -> Iterator[Entry]:
    """A folder's content, parents first."""
    yield (target, "d", 0, b"")
    yield from _inner_entries(str(source.resolve()), target.rstrip("/"), "")


def _inner_entries(root: str, target: str, inner: str) -> Iterator[Entry]:
    """What lies in the folder `inner` of `root`; strings, because paths take longer to make."""
    with os.scandir(f"{root}{inner}") as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        name = f"{inner}/{item.name}"
        if item.is_symlink():
            if not Path(item.path).resolve().is_relative_to(root):
                raise SandboxError("a symlink leaves the folder that is sent", item.path)
            yield (f"{target}{name}", "l", 0, os.fsencode(os.readlink(item.path)))
        elif item.is_dir():
            mode = stat.S_IMODE(item.stat().st_mode) & 0o777
            yield (f"{target}{name}", "d", mode, b"")
            yield from _inner_entries(root, target, name)
        else:
            yield from file_entries(Path(item.path), f"{target}{name}")


async def write_file(records: AsyncIterator[tuple[bytes, str, int, bytes]], target: Path) -> None:
    """Write the one file that arrives to `target`."""
    receiver = _Receiver(target.parent)
    async for _, kind, mode, content in records:
        receiver.take(os.fsencode(target.name), kind, mode, content)
    receiver.close()


async def write_tree(
    records: AsyncIterator[tuple[bytes, str, int, bytes]], target: Path
) -> list[str]:
    """Write the tree that arrives below `target`; return the names that were refused."""
    receiver = _Receiver(target)
    async for path, kind, mode, content in records:
        receiver.take(path, kind, mode, content)
    receiver.close()
    return receiver.refused


class _Receiver:
    """Writes records below one folder."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = os.fsencode(root)
        self.refused: list[str] = []
        self._size = 0
        self._files = 0
        self._open: tuple[bytes, int] | None = None
        self._made = {b""}

    def take(self, path: bytes, kind: str, mode: int, content: bytes) -> None:
        """Write one record."""
        parts = path.split(b"/")
        if (
            len(path) > LONGEST_PATH
            or path.startswith(b"/")
            or b".." in parts
            or b"" in parts
            or b"\0" in path
        ):
            raise SandboxError("a download names a path outside its folder", repr(path))
        self._size += len(content)
        self._files += kind != "a"
        if self._size > MAX_DOWNLOAD_BYTES or self._files > MAX_DOWNLOAD_FILES:
            raise SandboxError("a download is too large", os.fsdecode(self.root))
        if kind == "a":
            if self._open is None or self._open[0] != path:
                raise SandboxError("a download is not well-formed", repr(path))
            _write(self._open[1], content)
            return
        self.close()
        if kind == "d":
            self._folder(parts)
        elif kind == "f":
            self._folder(parts[:-1])
            goal = os.path.join(self.root, path)
            if os.path.lexists(goal):
                os.unlink(goal)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open = (path, os.open(goal, flags, (mode & 0o755) | 0o600))
            _write(self._open[1], content)
        else:
            self.refused.append(os.fsdecode(path))

    def close(self) -> None:
        """Close the file being written."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _folder(self, parts: list[bytes]) -> None:
        """Make a folder, replacing no link."""
        if b"/".join(parts) in self._made:
            return
        path = self.root
        for part in parts:
            path = os.path.join(path, part)
            if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                raise SandboxError("a download would follow a link", repr(path))
            os.makedirs(path, exist_ok=True)
        self._made.add(b"/".join(parts))


def _write(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
