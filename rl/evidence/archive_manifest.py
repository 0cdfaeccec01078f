"""What an archive holds: every folder, file and link of one tree, each file by sha256.

Invariants:
- The entries are those of one tree: the root first, every other one after the folder
  that it lies in, no name twice, nothing outside, and no link that leads outside.
- A manifest stands in two places: as the first member of the archive, so that an
  archive alone can be verified, and beside it, there with the archive's own sha256.
- The same archive, put anywhere, restores to the same path below a state directory.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from rl.errors import EvidenceError, InfrastructureError, first_problem
from rl.files import disk_errors, read_errors
from rl.records import SCHEMA_VERSION, Record
from rl.values import Section, Sha256

ARCHIVES: Final = "archives"  # folder of a state directory
SUFFIX: Final = ".tar.zst"
MANIFEST_MEMBER: Final = "ARCHIVE.json"
ROOT: Final = "."  # path of the entry that is the archived folder or file itself
PERMISSIONS: Final = 0o777  # setuid, setgid and sticky are the file system's, not evidence
RESTORE: Final = "restore it from another archive; this one is no longer what was written"
_DISTRIBUTION: Final = "terminal-rl"

type Kind = Literal["folder", "file", "link"]


class Meter:
    """Hears how far long work is; this one says nothing."""

    def begin(self, what: str, total: int) -> None:
        """Work on `total` bytes begins."""

    def advance(self, amount: int) -> None:
        """So many bytes more are done."""


class ArchivedEntry(Section):
    """One folder, file or link."""

    path: str = Field(description="relative to the archived tree; '.' is the tree itself")
    kind: Kind
    mode: int = Field(ge=0, le=PERMISSIONS, description="permission bits; a link's mean nothing")
    mtime_ns: int = Field(description="when it was last modified, unix time in ns")
    bytes: int = Field(default=0, ge=0, description="file: its size")
    sha256: Sha256 | None = Field(default=None, description="file: of its content")
    target: str | None = Field(default=None, description="link: where it points, relative")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ArchivedEntry:
        if self.path != ROOT:
            require_plain(self.path)
        if (self.kind == "file") != (self.sha256 is not None):
            raise ValueError(f"{self.path!r}: sha256 is given exactly for a file")
        if (self.kind == "link") != (self.target is not None):
            raise ValueError(f"{self.path!r}: target is given exactly for a link")
        if self.target is not None and leads_outside(self.path, self.target):
            raise ValueError(f"{self.path!r} is a link that leads outside: {self.target!r}")
        return self


class ArchiveFile(Section):
    """The archive as a file."""

    name: str = Field(description="beside this manifest")
    bytes: int = Field(ge=0)
    sha256: Sha256


class ArchiveManifest(Record):
    """What an archive holds, and where it is restored to."""

    kind: str = Field(description="folder of the state directory: campaigns, heldout, gates, ...")
    run_id: str | None = Field(description="the run; None for what is no run")
    path: str = Field(description="where it lay, and is restored to, below the state directory")
    made_at: float = Field(description="unix time, s")
    tool: str = Field(description="what made it, with its version")
    entries: list[ArchivedEntry] = Field(min_length=1, description="the root first")
    archive: ArchiveFile | None = Field(
        default=None, description="None inside the archive, which can't hold its own digest"
    )

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        require_plain(path)
        return path

    @field_validator("entries")
    @classmethod
    def _one_tree(cls, entries: list[ArchivedEntry]) -> list[ArchivedEntry]:
        if entries[0].path != ROOT or entries[0].kind == "link":
            raise ValueError("the first entry is the root, a folder or a file")
        kinds: dict[str, Kind] = {}
        for entry in entries:
            if entry.path in kinds:
                raise ValueError(f"{entry.path!r} is named twice")
            if entry.path != ROOT and kinds.get(parent_of(entry.path)) != "folder":
                raise ValueError(f"{entry.path!r} lies in no folder of the archive")
            kinds[entry.path] = entry.kind
        return entries

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def files(self) -> int:
        """Number of files."""
        return sum(entry.kind == "file" for entry in self.entries)

    def member(self, entry: ArchivedEntry) -> str:
        """The name of an entry in the archive."""
        return self.path if entry.path == ROOT else f"{self.path}/{entry.path}"


def tool() -> str:
    """This program with its version."""
    try:
        return f"{_DISTRIBUTION} {metadata.version(_DISTRIBUTION)}"
    except metadata.PackageNotFoundError:
        return _DISTRIBUTION


def sidecar_of(archive: Path) -> Path:
    """The manifest beside an archive."""
    return archive.with_name(archive.name.removesuffix(SUFFIX) + ".json")


def parse_manifest(data: bytes, where: str) -> ArchiveManifest:
    """Read a manifest's content.

    Raises:
        EvidenceError: it is none, of an unknown version, or contradicts itself.
    """
    try:
        return ArchiveManifest.model_validate_json(data)
    except ValidationError as error:
        problem = first_problem(error)
        if any(item["loc"] == ("schema_version",) for item in error.errors()):
            problem = f"its schema version is unknown; this program reads {SCHEMA_VERSION}"
        raise EvidenceError(f"no valid manifest of an archive: {problem}", where, RESTORE) from None


def read_sidecar(path: Path) -> ArchiveManifest:
    """The manifest at `path`, which lies beside its archive.

    Raises:
        EvidenceError: it can't be read, is none, or names no archive.
    """
    with read_errors(path):
        manifest = parse_manifest(path.read_bytes(), str(path))
    if manifest.archive is None or sidecar_of(Path(manifest.archive.name)).name != path.name:
        raise EvidenceError("does not name the archive beside it", str(path), RESTORE)
    return manifest


@contextmanager
def no_room(folder: Path) -> Generator[None]:
    """Turn what a disk refuses in `folder` into an error that says what is left there."""
    try:
        with disk_errors(folder):
            yield
    except InfrastructureError as error:
        remedy = "free space there or name another place, then run it again; nothing was changed"
        raise InfrastructureError(error.what, error.where, remedy) from error


def discard(path: Path) -> None:
    """Delete a folder or file; a folder that can't be written to is no obstacle."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        _open_up(path)
        shutil.rmtree(path)


def _open_up(folder: Path) -> None:
    folder.chmod(0o700)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _open_up(path)


def mode_of(info_mode: int) -> int:
    """The permission bits of a `st_mode`."""
    return stat.S_IMODE(info_mode) & PERMISSIONS


def parent_of(path: str) -> str:
    """The folder that an entry lies in."""
    return path.rpartition("/")[0] or ROOT


def require_plain(path: str) -> None:
    """Refuse a path that is absolute, empty, or not in its simplest form.

    Raises:
        ValueError: saying which.
    """
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is no plain relative path")


def leads_outside(path: str, target: str) -> bool:
    """Whether a link at `path` may lead out of its tree, also by way of other links."""
    if not target or "\0" in target or target.startswith("/"):
        return True
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = _leading_ups(parts)
    # A `..` behind a name would start from wherever that name, a link maybe, leads to.
    return up > path.count("/") or ".." in parts[up:]


def _leading_ups(parts: Sequence[str]) -> int:
    for index, part in enumerate(parts):
        if part != "..":
            return index
    return len(parts)
