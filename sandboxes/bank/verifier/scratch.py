"""Folders of the verifier's own, beside the tests, where the agent has never been."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOBODY = 65534


@contextmanager
def scratch() -> Generator[str]:
    """A new folder; it, and the output file beside it, are removed at the end."""
    path = tempfile.mkdtemp(dir=TESTS, prefix="run-")
    try:
        yield path
    finally:
        shutil.rmtree(path)
        if os.path.lexists(path + ".output"):
            os.unlink(path + ".output")


def write(root: str, name: str, data: bytes, executable: int) -> None:
    """Write a file below `root`, with these bits of execution."""
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(data)
    os.chmod(path, 0o644 | executable)


def give_away(root: str) -> None:
    """Let nobody have the folder, where this user can give it."""
    owned = [root]
    for where, folders, files in os.walk(root):
        owned += [os.path.join(where, name) for name in folders + files]
    if may_become_nobody():
        for path in owned:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def may_become_nobody() -> bool:
    """Whether this user is root over more ids than its own."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as handle:
        spans = [[int(field) for field in line.split()] for line in handle]
    return any(first <= NOBODY < first + count for first, _, count in spans)
