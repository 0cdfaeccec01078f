"""Ending processes: those of the agent, and those that its programs started.

Invariant: no wait is longer than `GRACE_S`.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SIGKILL, SIGSTOP = 9, 19  # the module that names them takes as long to load as all others
GRACE_S = 5.0
POLL_S = 0.001


def end_others() -> None:
    """End every process but the first, this one and those it descends from."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        table = _parents()
        spared = {1}
        pid = os.getpid()
        while pid in table:
            spared.add(pid)
            pid = table[pid]
        others = set(table) - spared
        if not others:
            return
        _end(others)
    raise TimeoutError("a process of the agent's can't be ended")


def end_children() -> None:
    """End all descendants; those that lost their parent have become children."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        table = _parents()
        found: set[int] = set()
        frontier = {os.getpid()}
        while frontier:
            frontier = {pid for pid, parent in table.items() if parent in frontier} - found
            found |= frontier
        _end(found)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
    raise TimeoutError("a program of the agent's can't be ended")


def _end(pids: Iterable[int]) -> None:
    """Stop all of them first, so that none forks away from the scan; then kill."""
    for number in (SIGSTOP, SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
    time.sleep(POLL_S)


def _parents() -> dict[int, int]:
    """Every process that is not yet dead, with its parent."""
    table: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as handle:
                fields = handle.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] not in (b"Z", b"X"):
            table[int(name)] = int(fields[1])
    return table
