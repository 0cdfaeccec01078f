"""Files and directories that survive a crash at any point.

Invariants:
- A file is on the disk, whole, when `write_file` returns.
- A directory comes into being under its final name only by one `rename`, after
  everything inside it has been synced: whoever sees the name sees it complete.
- Names that start with `TEMPORARY` belong to a writer at work or to one that died.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl.files import write_all

TEMPORARY = ".tmp-"


def write_file(path: Path, content: bytes) -> None:
    """Create `path` with `content`, synced; it must not exist yet."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Flush a file that someone else wrote, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Create the directory `path`; it must not exist yet."""
    path.mkdir()


def ensure_directory(path: Path) -> None:
    """Create `path` with its parents, durably, unless it is there."""
    if not path.is_dir():
        ensure_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, durably; `final` must not exist."""
    temporary.rename(final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Remove a published directory so that no moment shows it half removed."""
    doomed = directory.with_name(f"{TEMPORARY}removed-{directory.name}")
    discard(doomed)
    directory.rename(doomed)
    sync(directory.parent)
    discard(doomed)


def discard(path: Path) -> None:
    """Remove whatever is at `path`, if anything is; a link is not followed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def clear_temporary(root: Path) -> None:
    """Remove what writers that died have left in `root`; only its one writer may call this."""
    for path in sorted(root.glob(f"{TEMPORARY}*")):
        discard(path)
