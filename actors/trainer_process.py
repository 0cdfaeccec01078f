"""A trainer's process and all below it, from its start to its last descendant's end.

Invariants:
- It and all that it starts stay under a guard (`actors.engine_guard`) that ends
  them when the owner lets go or dies by any cause.
- It never ends by itself, so any exit is a failure, exit code 0 included.
- After `stop` no process of the tree is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from actors.guarded_process import KILL_MARGIN_S, GuardedProcess
from rl.errors import DeadlineExceeded, TrainerError

POLL_S = 0.2  # a step takes minutes
# Variables that steer the owner's Python or its OpenMP; a child has its own.
NOT_INHERITED = frozenset(
    {
        "OMP_NUM_THREADS",  # Ray's choice for its own workers
        "PYTHONHOME",
        "PYTHONPATH",  # names the owner's packages
        "PYTHONSTARTUP",
        "VIRTUAL_ENV",
        # A torchrun around the owner, if there is one.
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
    }
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What a trainer's process takes over of its owner's environment."""
    return {key: value for key, value in environ.items() if key not in NOT_INHERITED}


class TrainerProcess(GuardedProcess):
    """Owns one trainer process.  Not to be started twice: make another one.

    Args:
        who: names it in errors.
        argv: the command.
        environment: all of it.
        log_path: output and errors are appended here.
    """

    def __init__(
        self, who: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        super().__init__(argv, environment, log_path)
        self.who = who

    def start(self) -> None:
        """Start it; whether it works shows in what it does."""
        if self.started:
            raise TrainerError("started twice", str(self.log_path))
        self._spawn()

    def lost(self, what: str) -> TrainerError:
        """The error of a process that ended before `what`, with its exit and last lines."""
        return TrainerError(
            f"{self._exit_detail()}; {what} never came; its log ends:\n{self.log_tail()}",
            self.who,
            f"the whole log is {self.log_path}; continue with --resume",
        )

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
                raise self.lost(what)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{what} did not come in time", self.who, f"its log is {self.log_path}"
                )
            self.remember_tree()
            time.sleep(POLL_S)

    def await_exit(self, limit_s: float) -> None:
        """Give a process that is about to end the time to say why."""
        limit = time.monotonic() + limit_s
        while self.alive() and time.monotonic() < limit:
            time.sleep(POLL_S / 4)

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
            raise TrainerError(f"processes {left} did not end in {deadline_s:g} s", self.who)

    def _exit_detail(self) -> str:
        code = self.exit_code()
        return "it was never started" if code is None else f"it exited with code {code}"

    def _until_gone(self, limit: float) -> None:
        while self.processes() and time.monotonic() < limit:
            time.sleep(POLL_S / 4)
