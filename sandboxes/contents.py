"""What a task package consists of: every file by its hash, and Harbor's content digest.

Invariants:
- One walk reads every file once; nothing is followed out of the package, and what
  is no file, folder or link (a pipe, a socket) is refused rather than opened.
- `Contents.digest` is Harbor's own content digest, which leaves out what Harbor
  does not publish (`.gitignore`, editors' leavings, files outside its folders).
- `Contents.files` leaves out nothing, so that a difference anywhere has a name.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pathspec
from harbor.models.task.paths import TaskPaths
from harbor.publisher.packager import DEFAULT_IGNORES, Packager

from rl.errors import TaskPackageError

IGNORE_NAME = ".gitignore"
HARBOR_IGNORE_NAME = ".harborignore"
# What Harbor publishes: these files, and all that is in these folders.
PUBLISHED_FILES = (
    TaskPaths.CONFIG_FILENAME,
    "instruction.md",
    "README.md",
    TaskPaths.TRAJECTORY_FILENAME,
)
PUBLISHED_FOLDERS = ("environment/", "tests/", "solution/", "steps/")
# Git's words for what an entry is.
FILE, EXECUTABLE, LINK = "100644", "100755", "120000"
SHOWN_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class Contents:
    """A package's content.

    Attributes:
        digest: Harbor's content digest, sha256 hex.
        files: git's mode and the sha256 of every file (of a link: of its target's
            name), by relative POSIX path in sorted order.
    """

    digest: str
    files: dict[str, str] = field(repr=False)


def read_contents(root: Path) -> Contents:
    """Read the package in the folder `root`, an absolute path.

    Raises:
        TaskPackageError: a name is not UTF-8, a link leads nowhere inside, an
            entry is no file, or Harbor can't digest it.
    """
    _refuse_unprintable(str(root))
    found: dict[str, str] = {}
    for relative, entry in _walk(root):
        found[relative] = _described(root, relative, entry)
    files = dict(sorted(found.items()))
    return Contents(_digest(root, files), files)


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What sets `found` apart from `expected`, one entry for each file."""
    changes: list[str] = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            changes.append(f"{name} is missing")
        elif name not in expected:
            changes.append(f"{name} has been added")
        elif expected[name] != found[name]:
            same = expected[name].split()[1] == found[name].split()[1]
            changes.append(f"{name} {'is of another mode' if same else 'has changed'}")
    return changes


def shown(changes: list[str]) -> str:
    """The first of `changes` for a message, and how many more there are."""
    more = len(changes) - SHOWN_DIFFERENCES
    tail = [f"and {more} more"] if more > 0 else []
    return "; ".join([*changes[:SHOWN_DIFFERENCES], *tail])


def _walk(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every entry below `root` that is no folder, with its relative path."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if not relative.isascii():
                    _refuse_unprintable(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{relative}/")
                else:
                    yield relative, entry


def _described(root: Path, relative: str, entry: os.DirEntry[str]) -> str:
    """Mode and sha256 of one entry."""
    if entry.is_symlink():
        _refuse_link_out(root, Path(entry.path))
        return f"{LINK} {hashlib.sha256(os.fsencode(os.readlink(entry.path))).hexdigest()}"
    if not entry.is_file(follow_symlinks=False):
        raise TaskPackageError(
            "is neither a file nor a folder nor a link", str(root / relative), "remove it"
        )
    try:
        with open(entry.path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        what = f"its content can't be pinned: {(error.strerror or str(error)).lower()}"
        raise TaskPackageError(what, entry.path, "make the file readable") from None
    return f"{EXECUTABLE if mode & stat.S_IXUSR else FILE} {digest}"


def _digest(root: Path, files: Mapping[str, str]) -> str:
    """Harbor's content digest of the package whose files are known."""
    try:
        # Links and Harbor's own ignore files take rules that are Harbor's to apply.
        if any(
            name.endswith(HARBOR_IGNORE_NAME) or described.startswith(LINK)
            for name, described in files.items()
        ):
            return Packager.compute_content_hash(root)[0]
        ignored = _ignored_by(root)
    except (OSError, ValueError, RuntimeError) as error:
        raise TaskPackageError(
            f"its content can't be pinned: {error}",
            str(root),
            f"correct or remove the file that this names, or {IGNORE_NAME}",
        ) from None
    outer = hashlib.sha256()
    for name, described in files.items():
        published = name in PUBLISHED_FILES or name.startswith(PUBLISHED_FOLDERS)
        if published and not ignored(name):
            outer.update(f"{name}\0{described.split()[1]}\n".encode())
    return outer.hexdigest()


def _ignored_by(root: Path) -> Callable[[str], bool]:
    path = root / IGNORE_NAME
    lines = path.read_text().splitlines() if path.exists() else DEFAULT_IGNORES
    return _ignore_rules(tuple(lines))


@functools.lru_cache(maxsize=64)
def _ignore_rules(lines: tuple[str, ...]) -> Callable[[str], bool]:
    return pathspec.PathSpec.from_lines("gitignore", lines).match_file


def _refuse_unprintable(path: str) -> None:
    text = os.fsencode(path).decode(errors="backslashreplace")
    if text != path:
        raise TaskPackageError("its name is not UTF-8", text, "rename it")


def _refuse_link_out(root: Path, path: Path) -> None:
    try:
        target = path.resolve()
    except (RuntimeError, OSError):  # Python 3.12 has the first for a loop, 3.13 the second
        raise TaskPackageError("a symlink loop", str(path), "remove the link") from None
    if not target.is_relative_to(root):
        raise TaskPackageError(
            "a symlink leaves the package", str(path), "replace it by a copy of what it names"
        )
