"""Stands between an owner and an engine's process tree, and ends the tree.

Runs as a script of its own: `python -I -S engine_guard.py COMMAND...`, with the
read end of a pipe from its owner as standard input.  It imports only the
standard library, because its start is on the way of every engine's start.

It is two processes, an outer and an inner guard, each watching the other: Ray
kills the direct children of a worker that exits, which must not orphan what is
below them.

Invariants:
- A guard outlives the tree: it exits only when no descendant is left, however
  they were orphaned, regrouped or told to ignore signals (it is their
  subreaper), or when the kernel holds one back longer than `REAP_LIMIT_S`.
- The tree ends when the pipe closes (the owner let go, or is dead by any cause,
  SIGKILL included), when the engine's first process exits, and when either
  guard is killed.
- SIGTERM is passed on to the engine's first process; what is left of the tree
  when that exits is killed.
- SIGINT of a terminal is blocked for the whole tree: the owner decides the order
  in which a campaign stops.
- It stays in its owner's process group and session.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

OWNER_PIPE = 0
REAP_LIMIT_S = 30.0  # a process in an uninterruptible call is the kernel's to end
REAP_PAUSE_S = 0.01
PIPE_READ_BYTES = 4096
SIGNALLED = 128  # exit code of the shell's convention for a death by signal
NEVER_STARTED = 127
_PR_SET_CHILD_SUBREAPER = 36


def process_start(pid: int) -> str | None:
    """When process `pid` started, in the kernel's clock ticks; None if it is gone.

    Together with the id it names one process for good, as ids are reused.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before children, zombies left out."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        if fields is None:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        if fields[0] in "ZX":
            dead.add(int(entry.name))
    found: list[int] = []
    front = [root]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found.extend(front)
    return [pid for pid in found if pid not in dead]


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signal each of `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it ended by itself, which is what was wanted


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name: state, parent, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _log(message: str) -> None:
    """A line in the engine's log, which is our standard error too."""
    sys.stderr.write(f"engine_guard: {message}\n")
    sys.stderr.flush()


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor has told the loop already."""
    del number, frame


def _spawn(command: list[str]) -> int:
    """Start the engine's first process with an empty standard input."""
    try:
        return os.posix_spawn(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, OWNER_PIPE, os.devnull, os.O_RDONLY, 0)],
        )
    except OSError as error:
        _log(f"{command[0]}: {error}")
        os._exit(NEVER_STARTED)


def _reap(child: int) -> int | None:
    """Collect every ended process; the exit code of `child` if it was among them."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else SIGNALLED - ended


def _watch(child: int, wakeup: int, lifelines: list[int]) -> int | None:
    """Wait until a lifeline closes (None) or `child` exits (its code)."""
    while True:
        ready, _, _ = select.select([*lifelines, wakeup], [], [])
        if wakeup in ready:
            if signal.SIGTERM in os.read(wakeup, PIPE_READ_BYTES):
                send_signal([child], signal.SIGTERM)
            code = _reap(child)
            if code is not None:
                return code
        for lifeline in lifelines:
            if lifeline in ready and not os.read(lifeline, PIPE_READ_BYTES):
                return None


def _end_tree(child: int) -> int | None:
    """Kill until no descendant is left; the exit code of `child` if it ended here."""
    code: int | None = None
    limit = time.monotonic() + REAP_LIMIT_S
    while left := descendants(os.getpid()):
        if time.monotonic() > limit:
            _log(f"could not end {left}")
            break
        send_signal(left, signal.SIGKILL)
        time.sleep(REAP_PAUSE_S)
        ended = _reap(child)
        code = ended if code is None else code
    return code


def _guard(start: Callable[[], int], lifelines: list[int]) -> int:
    """Start a child and watch over it; then nothing is left below this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _wake)
    child = start()
    code = _watch(child, reader, lifelines)
    last = _end_tree(child)
    code = code if code is not None else last
    return code if code is not None else SIGNALLED + signal.SIGKILL


def main(command: list[str]) -> int:
    """Run `command` until it exits or the owner lets go; then nothing is left of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    inner_end, outer_end = os.pipe()

    def start_inner() -> int:
        inner = os.fork()
        if inner == 0:
            os.close(outer_end)
            code = _guard(lambda: _spawn(command), [OWNER_PIPE, inner_end])
            os._exit(code)  # only the outer guard returns from `main`
        os.close(inner_end)
        return inner

    return _guard(start_inner, [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
