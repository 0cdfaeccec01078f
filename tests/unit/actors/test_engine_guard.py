"""Process trees that refuse to end, under a guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import engine_guard
from actors.engine_guard import descendants, process_start

GUARD = [sys.executable, "-I", "-S", str(Path(engine_guard.__file__).resolve())]
SETTLE_S = 20.0

# A server with a child that ignores SIGTERM, a grandchild, and one in a session of its own.
STUBBORN_TREE = """
import os, signal, subprocess, sys, time
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
nest = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", sleep])
subprocess.Popen([sys.executable, "-S", "-c", nest])
subprocess.Popen([sys.executable, "-S", "-c", sleep], start_new_session=True)
time.sleep(600)
"""  # noqa: E501
TREE_SIZE = 6  # with the inner guard


def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def all_gone(pids: list[int]) -> bool:
    return all(process_start(pid) is None for pid in pids)


def guarded(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*GUARD, sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


def full_tree(root: int, size: int) -> list[int]:
    until(lambda: len(descendants(root)) >= size, "the tree did not grow")
    time.sleep(0.3)  # until the stubborn ones ignore SIGTERM
    return descendants(root)


def test_owner_killed_leaves_nothing() -> None:
    owner_code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen({GUARD!r} + [sys.executable, '-S', '-c', {STUBBORN_TREE!r}],"
        " stdin=subprocess.PIPE)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-S", "-c", owner_code])
    tree = full_tree(owner.pid, TREE_SIZE + 1)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    until(lambda: all_gone(tree), "something outlived the owner")


def test_closed_pipe_kills_the_tree_and_the_guard_waits_for_it() -> None:
    guard = guarded(STUBBORN_TREE)
    tree = full_tree(guard.pid, TREE_SIZE)
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(SETTLE_S) == 128 + signal.SIGKILL
    assert all_gone(tree)


def test_first_process_killed_takes_its_orphans_along() -> None:
    guard = guarded(STUBBORN_TREE)
    tree = full_tree(guard.pid, TREE_SIZE)
    os.kill(tree[1], signal.SIGKILL)
    assert guard.wait(SETTLE_S) == 128 + signal.SIGKILL
    assert all_gone(tree)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_either_guard_killed_leaves_nothing(which: str) -> None:
    guard = guarded(STUBBORN_TREE)
    tree = full_tree(guard.pid, TREE_SIZE)
    os.kill(guard.pid if which == "outer" else tree[0], signal.SIGKILL)
    until(lambda: all_gone(tree), "something outlived a guard")
    assert guard.wait(SETTLE_S) != 0


def test_sigterm_reaches_the_first_process_only() -> None:
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\ntime.sleep(600)"
    guard = guarded(code)
    full_tree(guard.pid, 2)
    guard.terminate()
    assert guard.wait(SETTLE_S) == 7


def test_sigint_of_the_terminal_does_not_reach_the_engine() -> None:
    guard = guarded("import time; time.sleep(600)")
    tree = full_tree(guard.pid, 2)
    for pid in (guard.pid, *tree):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert guard.poll() is None
    assert not all_gone(tree)
    guard.communicate(timeout=SETTLE_S)


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_is_the_engines(code: int) -> None:
    assert guarded(f"import sys; sys.exit({code})").wait(SETTLE_S) == code


def test_missing_program_is_told_and_exits_127() -> None:
    guard = subprocess.run(
        [*GUARD, "/no/such/program"], stdin=subprocess.PIPE, capture_output=True, timeout=SETTLE_S
    )
    assert guard.returncode == 127
    assert b"/no/such/program" in guard.stderr


def test_tree_stays_in_the_owners_process_group() -> None:
    guard = guarded("import time; time.sleep(600)")
    tree = full_tree(guard.pid, 2)
    assert {os.getpgid(pid) for pid in (guard.pid, *tree)} == {os.getpgrp()}
    guard.communicate(timeout=SETTLE_S)
