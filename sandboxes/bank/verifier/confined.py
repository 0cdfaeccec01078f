"""Running what the agent made, so that it can't reach the verifier.

Invariants:
- A program runs as nobody where this process may become nobody, in a folder of its
  own, and can neither trace this process nor write the reward.
- When `run` returns, every process that it started, in whatever session, is gone.
- No wait is longer than the program's time and `processes.GRACE_S`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence

from .processes import end_children
from .scratch import NOBODY, may_become_nobody

OUTPUT_BYTES = 1 << 20
POLL_S = 0.01
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    # git: no configuration but the repository's, no code or transport that it names
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}


class Ended:
    """How a program ended: exit code (None: out of time) and standard output."""

    def __init__(self, code: int | None, output: str) -> None:
        self.code = code
        self.output = output


def become_guardian() -> None:
    """Adopt orphans, and let nobody trace this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")


def run(
    argv: Sequence[str], cwd: str, within_s: float, signals: Sequence[Sequence[str]] = ()
) -> Ended:
    """Run a program to its end, and end all that it started.

    Args:
        argv: command and arguments.
        cwd: its working directory.
        within_s: seconds until it is killed.
        signals: pairs of a line it prints and the signal (SIGTERM, ...) it is sent then.
    """
    become_guardian()
    stranger = NOBODY if may_become_nobody() else None
    log = os.open(cwd + ".output", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            argv,
            cwd=cwd,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit_files,
            user=stranger,
            group=stranger,
            extra_groups=None if stranger is None else [],
        )
        try:
            code = _wait(child, log, time.monotonic() + within_s, list(signals))
        finally:
            end_children()
        return Ended(code, os.pread(log, OUTPUT_BYTES, 0).decode("utf-8", "replace"))
    finally:
        os.close(log)


def _wait(
    child: subprocess.Popen[bytes], log: int, until: float, signals: list[Sequence[str]]
) -> int | None:
    while time.monotonic() < until:
        if signals:
            printed = os.pread(log, OUTPUT_BYTES, 0).decode("utf-8", "replace").splitlines()
            if signals[0][0] in printed:
                child.send_signal(getattr(signal, signals.pop(0)[1]))
        if child.poll() is not None:
            return child.returncode
        time.sleep(POLL_S)
    return None


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
