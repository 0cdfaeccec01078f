"""Ending processes: one command's tree, or everything.

Invariants:
- Nothing here waits longer than `KILL_LIMIT_S`.
- What is ended leaves no trap behind: a pipe in place of a file that programs
  consult by themselves would hold whoever runs next.
"""

from __future__ import annotations

import os
import stat
import time

SIGKILL, SIGSTOP = 9, 19
KILL_LIMIT_S = 5.0  # a fork bomb is bounded by RLIMIT_NPROC, so a few rounds suffice

CONSULTED = ("passwd", "group", "shadow", "nsswitch.conf", "hosts", "resolv.conf", "localtime")


def remove_traps() -> None:
    """Remove what stands in for a file of /etc that is read without being asked for."""
    for name in CONSULTED:
        path = f"/etc/{name}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                os.unlink(path)
        except OSError:
            continue  # it is not there, or a link to nothing


def parents() -> dict[int, int]:
    """Every live process and its parent."""
    table: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as handle:
                field = handle.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if field[0] not in (b"Z", b"X"):
            table[int(name)] = int(field[1])
    return table


def descendants(root: int) -> set[int]:
    """All live descendants of `root`."""
    table = parents()
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in table.items() if parent in frontier} - found
        found |= frontier
    return found


def signal_all(pids: set[int], number: int) -> None:
    """Signal each; one that has ended is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_tree(root: int) -> None:
    """Kill a supervisor and all its descendants.

    The supervisor is stopped first, so that it stays to adopt orphans.
    """
    signal_all({root}, SIGSTOP)
    kill_below(root)
    signal_all({root}, SIGKILL)


def kill_below(root: int) -> None:
    """Kill all descendants of `root`, which adopts orphans.

    They are stopped before they are killed, so that none forks away from the scan.
    """
    until = time.monotonic() + KILL_LIMIT_S
    stopped: set[int] = set()
    while time.monotonic() < until:
        fresh = descendants(root) - stopped
        if not fresh:
            break
        signal_all(fresh, SIGSTOP)
        stopped |= fresh
    while time.monotonic() < until:
        left = descendants(root)
        if not left:
            break
        signal_all(left, SIGKILL)
        time.sleep(0.001)


def reap() -> None:
    """Collect every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def kill_everything() -> bool:
    """End every process but this one; True when none is left."""
    until = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < until:
        try:
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            reap()
            return True
        reap()
        if set(parents()) <= {1}:
            return True
        time.sleep(0.001)
    return False
