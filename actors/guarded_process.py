"""A child process under a guard, with every process that it starts.

Invariants:
- All of them stay in the owner's process group and session, under a guard
  (`actors.engine_guard`) that ends them when the owner lets go or dies by any cause.
- A process is known by its id and its start together, as ids are reused.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors import engine_guard

KILL_MARGIN_S = 5.0  # of a stop's deadline, for what SIGTERM did not end
LOG_TAIL_LINES = 25
LOG_TAIL_BYTES = 16_384


class GuardedProcess:
    """One command, started once; whoever owns it says how long it may take to end.

    Args:
        argv: the command.
        environment: all of it.
        log_path: output and errors are appended here.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._argv = argv
        self._environment = environment
        self._guard: subprocess.Popen[bytes] | None = None
        self._tree: dict[int, str] = {}  # process id to its start

    @property
    def started(self) -> bool:
        """Whether it was ever started."""
        return self._guard is not None

    def alive(self) -> bool:
        """Whether the first process runs."""
        return self._guard is not None and self._guard.poll() is None

    def exit_code(self) -> int | None:
        """The first process's exit code; None while it runs or if it never did."""
        return None if self._guard is None else self._guard.poll()

    def log_tail(self) -> str:
        """The log's last lines."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def remember_tree(self) -> None:
        """Note the tree's processes, so that they are found without the guard."""
        if self._guard is None:
            return
        for pid in engine_guard.descendants(self._guard.pid):
            started = engine_guard.process_start(pid)
            if started is not None:
                self._tree[pid] = started

    def processes(self) -> list[int]:
        """Ids of the guard and of every process seen below it that still runs."""
        self.remember_tree()
        tree = [pid for pid, at in self._tree.items() if engine_guard.process_start(pid) == at]
        guard = [self._guard.pid] if self._guard is not None and self.alive() else []
        return guard + tree

    def _spawn(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", str(Path(engine_guard.__file__).resolve())]
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [*guard, *self._argv],
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _ask_to_end(self) -> None:
        """SIGTERM to the first process."""
        self.remember_tree()
        if self._guard is not None and self.alive():
            self._guard.send_signal(signal.SIGTERM)

    def _let_go(self) -> None:
        """Have the guard kill what is left, or kill it here if the guard is gone."""
        if self._guard is None:
            return
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if not self.alive():
            engine_guard.send_signal(self.processes(), signal.SIGKILL)

    def _kill_left(self) -> list[int]:
        """Kill what a stop has left; what that was."""
        left = self.processes()
        engine_guard.send_signal(left, signal.SIGKILL)
        return left
