"""The owner's end of the zygote: the one place that starts processes of sandboxes.

Invariants:
- The zygote is started from one thread that lives as long as this process, because
  the kernel's parent-death signal follows the thread; orders are given from it, too.
- A zygote that does not answer is ended, and its sandboxes with it, and another started.
- No wait is longer than `ANSWER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rl.errors import SandboxError
from sandboxes.guest.enclosure import Order
from sandboxes.rootfs import SYSTEM_PYTHONS

ANSWER_S = 20.0  # a start of Python and two forks, on a busy machine
LONGEST_ANSWER = 4096
KEPT_STDERR = 4096
_CODE = "import sys; sys.path.insert(0, {root!r}); from sandboxes.guest.zygote import main; main()"

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawner")


@dataclass(slots=True)
class Process:
    """Process 1 of a sandbox, which is a child of the zygote."""

    pid: int
    watch: int
    """A descriptor of the process; -1 when it is known to have ended."""

    def kill(self) -> None:
        """Kill it, and with it everything in its namespace; one that has ended is no error."""
        if self.watch >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.watch, signal.SIGKILL)

    async def ended(self, timeout_s: float) -> bool:
        """Wait for its end, without polling; False if it is still there after `timeout_s`."""
        if self.watch < 0:
            return True
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self.watch, gone.set)
        try:
            async with asyncio.timeout(timeout_s):
                await gone.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self.watch)
        self._forget()
        return True

    def wait(self, timeout_s: float) -> bool:
        """The same where there is no event loop."""
        if self.watch >= 0 and not _readable(self.watch, timeout_s):
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        if self.watch >= 0:
            os.close(self.watch)
            self.watch = -1


class Zygote:
    """A running zygote.

    Raises:
        SandboxError: it could not be started.
    """

    def __init__(self) -> None:
        self._words = os.memfd_create("zygote-stderr")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _CODE.format(root=str(Path(__file__).parent.parent))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [_python(), "-I", "-S", "-B", "-c", code],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    env={"LC_ALL": "C.UTF-8"},
                    start_new_session=True,  # a Ctrl-C at our terminal is for us
                )
            except OSError as error:
                os.close(self._words)
                self._socket.close()
                raise SandboxError(f"Python does not run: {error}", sys.executable) from None

    def fork(self, order: Order, control: socket.socket) -> Process:
        """A new sandbox, whose daemon answers on `control`.

        Raises:
            SandboxError: it could not be forked.
            ZygoteGoneError: nor can any other by this zygote.
        """
        try:
            socket.send_fds(self._socket, [order.wire()], [control.fileno()])
            if not _readable(self._socket.fileno(), ANSWER_S):
                raise ZygoteGoneError(f"no process for a sandbox within {ANSWER_S:.0f} s")
            answer, watches, _, _ = socket.recv_fds(self._socket, LONGEST_ANSWER, 1)
        except OSError as error:
            raise ZygoteGoneError(f"the zygote is gone: {error}", self._last_words()) from None
        if not answer:
            raise ZygoteGoneError("the zygote has ended", self._last_words())
        if not watches:
            raise SandboxError(answer.decode(errors="replace"))
        return Process(int(answer), watches[0])

    def close(self) -> None:
        """End it, and all its sandboxes."""
        self._socket.close()
        self._process.kill()
        self._process.wait(ANSWER_S)
        os.close(self._words)

    def _last_words(self) -> str:
        text = os.pread(self._words, KEPT_STDERR, 0).decode(errors="replace").strip()
        return f"it said: {text}" if text else ""


class ZygoteGoneError(SandboxError):
    """The zygote has ended, or does not answer."""


_zygote: Zygote | None = None  # touched by the one thread only


def submit[T](work: Callable[[], T]) -> Future[T]:
    """Do `work`, which may call `fork`, on the one thread."""
    return _thread.submit(work)


def fork(order: Order, control: socket.socket) -> Process:
    """Order a sandbox of the zygote, which is started if there is none.

    Raises:
        SandboxError: there is none.
    """
    global _zygote
    if _zygote is not None:
        with contextlib.suppress(ZygoteGoneError):
            return _zygote.fork(order, control)
        _zygote.close()
    _zygote = Zygote()
    return _zygote.fork(order, control)


def _python() -> str:
    """The running Python, or the system's where this user may not run it."""
    choices = (sys.executable, *SYSTEM_PYTHONS)
    return next((path for path in choices if os.access(path, os.X_OK)), sys.executable)


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
