"""Folders on a node that shares no file system with the driver.

Invariants:
- A folder has its final name only when every byte of it is there, verified and synced.
- What is fetched or sent comes in pieces of bounded size: no folder is ever held in memory.
- Nothing is read or written outside the folder that is meant.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shutil import rmtree

from pydantic import Field

from rl.errors import EvidenceError, InfrastructureError
from rl.files import disk_errors, read_errors, sha256_file, sync_directory, write_all
from rl.records import Record

PIECE_BYTES = 64 * 1024 * 1024  # a few of these fit the smallest object store
PERMISSIONS = 0o777
NODE_ROOT_VARIABLE = "RL_NODE_ROOT"
DEFAULT_ROOT = Path("~/.cache/terminal-rl")


class FileEntry(Record):
    """One entry of a folder."""

    path: str = Field(description="relative, POSIX")
    mode: int = Field(description="permission bits")
    size: int = Field(default=0, ge=0, description="of a file, bytes")
    sha256: str | None = Field(default=None, description="of a file; None: a folder or a link")
    link: str | None = Field(default=None, description="where a symbolic link leads")

    @property
    def is_file(self) -> bool:
        """Whether it has content."""
        return self.sha256 is not None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder inside the folder."""
        return self.sha256 is None and self.link is None


class FolderManifest(Record):
    """A folder by content."""

    entries: list[FileEntry]

    @property
    def digest(self) -> str:
        """sha256 over all entries."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


def survey(folder: Path, keep: Callable[[str], bool] = lambda _: True) -> FolderManifest:
    """What `folder` holds.

    Links that stay inside are kept as links; what others lead to is taken as a file, as
    in a model's snapshot, whose files lie in a cache beside it.

    Args:
        folder: the folder.
        keep: says by its relative path whether a file is taken.

    Raises:
        EvidenceError: it can't be read.
    """
    entries: list[FileEntry] = []
    with read_errors(folder):
        root = folder.resolve(strict=True)
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root).as_posix()
            mode = stat.S_IMODE(path.lstat().st_mode) & PERMISSIONS
            if path.is_symlink() and path.resolve().is_relative_to(root):
                entries.append(FileEntry(path=relative, mode=mode, link=os.readlink(path)))
            elif path.is_dir():
                if path.is_symlink():
                    raise EvidenceError("a link to a folder elsewhere", str(path), "copy it here")
                entries.append(FileEntry(path=relative, mode=mode))
            elif keep(relative):
                found = path.stat()
                entries.append(
                    FileEntry(
                        path=relative,
                        mode=stat.S_IMODE(found.st_mode) & PERMISSIONS,
                        size=found.st_size,
                        sha256=sha256_file(path),
                    )
                )
    return FolderManifest(entries=entries)


def pieces(folder: Path, manifest: FolderManifest) -> Iterator[tuple[str, bytes]]:
    """The files of a folder in pieces of `PIECE_BYTES` at most, in the manifest's order.

    Raises:
        EvidenceError: a file can't be read.
    """
    for entry in manifest.entries:
        if not entry.is_file:
            continue
        with read_errors(folder / entry.path), (folder / entry.path).open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield entry.path, piece


def read_piece(path: Path, offset: int) -> bytes:
    """`PIECE_BYTES` of a file from `offset`, or what is left of it.

    Raises:
        EvidenceError: it can't be read.
    """
    with read_errors(path), path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


@dataclass
class Arrival:
    """A folder that is arriving, piece by piece.

    Args:
        target: where it will be.
        manifest: what it will hold.
    """

    target: Path
    manifest: FolderManifest

    def __post_init__(self) -> None:
        self._aside = self.target.with_name(
            f".{self.target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        )
        with disk_errors(self._aside):
            self._aside.mkdir(parents=True)
            for entry in self.manifest.entries:
                path = self._inside(entry.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry.is_file:
                    path.touch()
                elif entry.is_folder:
                    path.mkdir(exist_ok=True)

    def append(self, name: str, piece: bytes) -> None:
        """Add the next piece of a file.

        Raises:
            InfrastructureError: the disk is full, or can't be written.
        """
        path = self._inside(name)
        with disk_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                write_all(descriptor, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def seal(self) -> Path:
        """Verify every file, then give the folder its name, in the place of an older one.

        Raises:
            InfrastructureError: a file is not what was sent; nothing is left of it.
        """
        try:
            # Folders last, the innermost first: one may forbid to write into it.
            folders = [entry for entry in self.manifest.entries if entry.is_folder]
            for entry in self.manifest.entries:
                if not entry.is_folder:
                    self._finish(entry)
            for entry in reversed(folders):
                self._finish(entry)
            with disk_errors(self.target):
                if self.target.exists():
                    rmtree(self.target)
                self._aside.rename(self.target)
                sync_directory(self.target.parent)
        except BaseException:
            self.give_up()
            raise
        return self.target

    def give_up(self) -> None:
        """Remove what has arrived."""
        rmtree(self._aside, ignore_errors=True)

    def _finish(self, entry: FileEntry) -> None:
        path = self._inside(entry.path)
        with disk_errors(path):
            if entry.link is not None:
                path.symlink_to(entry.link)
                return
            if entry.is_file and sha256_file(path) != entry.sha256:
                raise InfrastructureError(
                    "has arrived damaged, or was changed while it was read",
                    str(self.target / entry.path),
                    "run it again",
                )
            path.chmod(entry.mode)
            sync_directory(path if path.is_dir() else path.parent)

    def _inside(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise EvidenceError("leads out of the folder that is sent", name)
        return self._aside / parts


def clear_partial(target: Path) -> None:
    """Remove what processes that are gone have left of `target`."""
    for path in target.parent.glob(f".{target.name}.*.partial"):
        owner = path.name.removeprefix(f".{target.name}.").split("-")[0]
        if not Path("/proc", owner).exists():
            rmtree(path, ignore_errors=True)


def node_root() -> Path:
    """This node's own folder for what is sent to it."""
    return Path(os.environ.get(NODE_ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()
