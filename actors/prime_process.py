"""prime-rl's trainer as a child process, from its start to its last descendant's end.

Invariants:
- It and all that it starts stay under a guard (`actors.engine_guard`) that ends
  them when the owner lets go or dies by any cause.
- It never ends by itself, so any exit is a failure, exit code 0 included.
- After `stop` no process of the tree is left.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from actors.guarded_process import KILL_MARGIN_S, GuardedProcess
from actors.prime_command import PrimeCommand
from rl.errors import ConfigurationError, DeadlineExceeded, TrainerError

POLL_S = 0.2  # a step takes minutes


def ask(command: PrimeCommand, question: str, deadline_s: float) -> str:
    """What prime-rl's interpreter answers.

    Raises:
        ConfigurationError: it can't run or fails.
        DeadlineExceeded: no answer within `deadline_s`.
    """
    where = command.inspect[0]
    try:
        done = subprocess.run(
            command.inspect,
            input=question,
            env=dict(command.environment),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"no answer within {deadline_s:g} s", where) from None
    except OSError as error:
        raise ConfigurationError(f"can't be started: {error.strerror}", where) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigurationError(f"exited with code {done.returncode}: {last}", where)
    return done.stdout


class PrimeProcess(GuardedProcess):
    """Owns one trainer process.  Not to be started twice: make another one."""

    def __init__(self, command: PrimeCommand, log_path: Path) -> None:
        super().__init__(command.train, command.environment, log_path)

    def start(self) -> None:
        """Start it; whether it works shows in what it writes."""
        if self.started:
            raise TrainerError("started twice", str(self.log_path))
        self._spawn()

    def wait_for[T](self, ready: Callable[[], T | None], deadline: float, what: str) -> T:
        """The first answer of `ready` that is not None.

        Args:
            ready: asked again and again.
            deadline: by the monotonic clock, s.
            what: is waited for.

        Raises:
            TrainerError: the process has ended, with its exit and the log's last lines.
            DeadlineExceeded: not ready by the deadline.
        """
        while True:
            alive = self.alive()  # before the question: its last words count
            answer = ready()
            if answer is not None:
                return answer
            if not alive:
                raise TrainerError(
                    f"{self._exit_detail()}; {what} never came; its log ends:\n{self.log_tail()}",
                    "prime-rl",
                    f"the whole log is {self.log_path}; continue with --resume",
                )
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{what} did not come in time", "prime-rl", f"its log is {self.log_path}"
                )
            self.remember_tree()
            time.sleep(POLL_S)

    def stop(self, deadline_s: float) -> None:
        """End the whole tree: SIGTERM, then SIGKILL; nothing to do if none runs.

        Raises:
            TrainerError: a process was still there after `deadline_s`.
        """
        if not self.started:
            return
        limit = time.monotonic() + deadline_s
        if self.alive():
            self._ask_to_end()
            self._until_gone(limit - min(KILL_MARGIN_S, deadline_s / 2))
        self._let_go()
        self._until_gone(limit)
        if left := self._kill_left():
            raise TrainerError(f"processes {left} did not end in {deadline_s:g} s", "prime-rl")

    def _exit_detail(self) -> str:
        code = self.exit_code()
        return "it was never started" if code is None else f"it exited with code {code}"

    def _until_gone(self, limit: float) -> None:
        while self.processes() and time.monotonic() < limit:
            time.sleep(POLL_S / 4)
