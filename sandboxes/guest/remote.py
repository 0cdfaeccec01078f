"""One command in a sandbox that is not ours, with the limits of a local one.

Invariants:
- It adopts every process that the command starts, in whatever session, and ends them
  all when the time is over; what was printed until then is kept.
- It returns when the shell has ended: what a background job prints later is read and
  dropped by a process that outlives this one, so that the job lives on.
- It prints at most the limit, head and tail with the number of cut bytes between them,
  as valid UTF-8.
"""

from __future__ import annotations

import os
import select
import sys
import time

from sandboxes.guest.init import EXIT_TIMED_OUT
from sandboxes.guest.kernel import prctl
from sandboxes.guest.killing import descendants, kill_below
from sandboxes.guest.output import Stream
from sandboxes.guest.shell import PR_SET_CHILD_SUBREAPER, RESET_SIGNALS

LOOK_EVERY_S = 0.02  # for the end of the shell, which wakes nobody


def run(command: str, limit_s: float, output_limit: int) -> int:
    """Run a command with bash and print what it printed; its exit code, 124 out of time."""
    until = time.monotonic() + limit_s
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    read, write = os.pipe()
    shell = os.posix_spawn(
        "/bin/bash",
        ["bash", "-c", command],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_DUP2, write, 2),
        ],
        setsid=True,
        setsigdef=RESET_SIGNALS,
    )
    os.close(write)
    stream = Stream(read, output_limit)
    code = _wait(shell, stream, until)
    if code is None:
        kill_below(os.getpid())
    stream.drain()
    _print(*stream.parts())
    if descendants(os.getpid()):
        _keep_reading(read)
    return EXIT_TIMED_OUT if code is None else code


def _wait(shell: int, stream: Stream, until: float) -> int | None:
    """Read what is printed until the shell has ended; None if time runs out first."""
    poll = select.poll()
    poll.register(stream.fd, select.POLLIN)
    open_ = True
    while time.monotonic() < until:
        if not open_:
            time.sleep(LOOK_EVERY_S)
        elif poll.poll(1000 * LOOK_EVERY_S):
            open_ = stream.read()
        ended, state = os.waitpid(-1, os.WNOHANG)
        if ended == shell:
            code = os.waitstatus_to_exitcode(state)
            return code if code >= 0 else 128 - code
    return None


def _print(head: bytes, cut: bytes, tail: bytes) -> None:
    parts = [head + tail] if cut == b"0" else [head, b"\n[... %b bytes cut ...]\n" % cut, tail]
    for part in parts:
        sys.stdout.buffer.write(part.decode("utf-8", "replace").encode())
    sys.stdout.buffer.flush()


def _keep_reading(fd: int) -> None:
    """Leave a process that reads what is still printed."""
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.set_blocking(fd, True)
    while os.read(fd, 1 << 16):
        pass
    os._exit(0)


def main() -> None:
    """Arguments: seconds, bytes of output kept, command."""
    limit_s, output_limit, command = sys.argv[1:]
    os._exit(run(command, float(limit_s), int(output_limit)))
