"""The program's own sources as a run was started with: source.tar.zst.

Invariants:
- A snapshot is a function of the files' names, modes and contents: equal sources give
  equal bytes, whenever and wherever it is made.
- It holds what git tracks, and sources that it neither tracks nor ignores; outside a
  checkout, the project's own folders without caches.  Nothing of `state/` is in it.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zstandard

from rl.errors import EvidenceError
from rl.files import write_bytes

SNAPSHOT: Final = "source.tar.zst"
_LEVEL = 12  # a third of a second for the whole project
_GIT_TIMEOUT_S = 30.0
_PARTS: Final = (
    "rl", "actors", "sandboxes", "benchmarks", "configs", "requirements", "pyproject.toml",
    "Makefile", "README.md",
)  # fmt: skip
_SUFFIXES: Final = {".py", ".toml", ".sh", ".j2", ".css", ".js", ".in", ".txt", ".md"}
_NO_SOURCE: Final = ("state/", ".venv")


def source_tar(root: Path) -> bytes:
    """An uncompressed tar of the sources below `root`.

    Raises:
        EvidenceError: git can't list them.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(_names(root)):
            path = root / name
            if path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def tar_sha256(tar: bytes) -> str:
    """The digest by which a run names its snapshot."""
    return hashlib.sha256(tar).hexdigest()


def keep_source(tar: bytes, directory: Path) -> None:
    """Write the snapshot into a run's directory.

    Raises:
        InfrastructureError: the disk is full or failed.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    write_bytes(directory / SNAPSHOT, compressor.compress(tar))


def kept_sha256(directory: Path) -> str | None:
    """The digest of the snapshot in a run's directory; None if there is none.

    Raises:
        EvidenceError: it can't be read.
    """
    path = directory / SNAPSHOT
    if not path.exists():
        return None
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            while block := reader.read(1 << 20):
                digest.update(block)
    except (OSError, zstandard.ZstdError) as error:
        raise EvidenceError(f"can't be read: {error}", str(path)) from None
    return digest.hexdigest()


def _names(root: Path) -> Iterator[str]:
    if (root / ".git").exists():
        names = _git_names(root)
    else:
        names = (
            path.relative_to(root).as_posix()
            for part in _PARTS
            for path in ([root / part] if (root / part).is_file() else (root / part).rglob("*"))
            if "__pycache__" not in path.parts
        )
    return (name for name in names if not name.startswith(_NO_SOURCE))


def _git_names(root: Path) -> list[str]:
    """Tracked files, and untracked ones that are sources: others may hold anything."""
    tracked = _git(root, "--cached")
    others = _git(root, "--others", "--exclude-standard")
    return tracked + [name for name in others if Path(name).suffix in _SUFFIXES]


def _git(root: Path, *which: str) -> list[str]:
    command = ["git", "--no-optional-locks", "-C", str(root), "ls-files", "-z", *which]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise EvidenceError(
            f"git can't list the sources: {error}",
            str(root),
            f"make this work: {' '.join(command)}",
        ) from None
    return [name.decode(errors="surrogateescape") for name in done.stdout.split(b"\0") if name]
