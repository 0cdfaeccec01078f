"""What is left behind is found, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandboxes.leftovers import look

UNSHARE = """
import ctypes, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_process_in_another_user_namespace_is_found_until_it_ends() -> None:
    before = look("attempt-gate-")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", UNSHARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (line,) = look("attempt-gate-").since(before)
        assert line.startswith(f"process {process.pid} (")
    assert look("attempt-gate-").since(before) == []


def test_process_of_our_own_namespace_is_none() -> None:
    before = look("attempt-gate-")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE):
        assert look("attempt-gate-").since(before) == []


def test_scratch_path_is_found_by_its_prefix(scratch: Path) -> None:
    before = look("attempt-gate-")
    (scratch / "other").mkdir()
    (scratch / "attempt-gate-x").mkdir()
    assert look("attempt-gate-").since(before) == [f"file {scratch / 'attempt-gate-x'}"]
