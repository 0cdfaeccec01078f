"""One engine as a child process, from its start to the end of its last descendant.

Invariants:
- The child and all that it starts stay in the owner's process group and session,
  under a guard (`actors.engine_guard`) that ends them when the owner lets go or
  dies by any cause.
- `start` returns only after the engine has sampled a token: engines exist that
  report health and die of their first request.
- Any exit that `stop` did not ask for is a failure, exit code 0 included.
- After `stop` no process of the tree is left, also if the guard was killed.
- Every wait ends by its deadline.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from pathlib import Path

from actors.engine_command import BASE_MODEL_NAME, HOST, EngineCommand
from actors.guarded_process import KILL_MARGIN_S, GuardedProcess
from rl.agent.client import EngineClient, SamplingParams
from rl.errors import DeadlineExceeded, EngineError, InfrastructureError

# Above Ray's worker ports (10002-19999), below the kernel's own choices for
# outgoing connections (32768-60999).
PORTS = range(20_000, 32_768)
PORT_TRIES = 200
POLL_S = 0.1
PROBE_TIMEOUT_S = 5.0  # of one health check while starting
FIRST_TOKEN_TIMEOUT_S = 120.0  # the first generation may compile kernels
FIRST_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # ids that every vocabulary has


def free_port(host: str = HOST) -> int:
    """A port on an address of this machine that nothing listens on.

    Raises:
        InfrastructureError: none was found.
    """
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue  # in use
            return port
    raise InfrastructureError(f"no free port on {host} in {PORTS.start}-{PORTS.stop - 1}")


class EngineProcess(GuardedProcess):
    """Owns one engine.  Not to be started twice: make another one."""

    def __init__(self, command: EngineCommand, log_path: Path, client: EngineClient) -> None:
        super().__init__(command.argv, command.environment, log_path)
        self.base_url = command.base_url
        self._client = client
        self._stopping = False

    async def start(self, deadline_s: float) -> float:
        """Start the engine and wait for its first token; the seconds it took.

        On any failure the tree is gone before the error is raised.

        Raises:
            EngineError: it exited, or its first generation failed.
            DeadlineExceeded: it was not ready within `deadline_s`.
        """
        began = time.monotonic()
        if self.started:
            raise EngineError("started twice", self.base_url, "make another EngineProcess")
        self._spawn()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until_healthy()
                await self._first_token(deadline_s)
        except TimeoutError:
            await self.stop(KILL_MARGIN_S)
            raise DeadlineExceeded(
                f"not ready within {deadline_s:g} s", self.base_url, self._log_hint()
            ) from None
        except BaseException:
            await self.stop(KILL_MARGIN_S)
            raise
        self.remember_tree()
        return time.monotonic() - began

    def check_alive(self) -> None:
        """Return if the engine runs, and note what processes it has by now.

        Raises:
            EngineError: it does not, with its exit and the log's last lines.
        """
        if not self.alive():
            raise EngineError(self.exit_detail(), self.base_url, self._log_hint())
        self.remember_tree()

    def exit_detail(self) -> str:
        """How the engine ended, with the log's last lines."""
        if not self.started:
            return "the engine was never started"
        code = self.exit_code()
        if code is None:
            return "the engine is running"
        return f"the engine exited with code {code}; its log ends:\n{self.log_tail()}"

    async def stop(self, deadline_s: float) -> None:
        """End the whole tree: SIGTERM, then SIGKILL; nothing to do if none runs.

        Raises:
            EngineError: a process was still there after `deadline_s`.
        """
        if not self.started:
            return
        self._stopping = True
        limit = time.monotonic() + deadline_s
        if self.alive():
            self._ask_to_end()
            await self._until_gone(limit - min(KILL_MARGIN_S, deadline_s / 2))
        self._let_go()
        await self._until_gone(limit)
        if left := self._kill_left():
            raise EngineError(f"processes {left} did not end in {deadline_s:g} s", self.base_url)

    async def _until_healthy(self) -> None:
        while True:
            self._check_starting()
            try:
                await self._client.check_health(self.base_url, PROBE_TIMEOUT_S)
            except (EngineError, DeadlineExceeded):
                await asyncio.sleep(POLL_S)  # not listening yet; the caller bounds the wait
            else:
                return

    async def _first_token(self, deadline_s: float) -> None:
        try:
            await self._client.generate(
                self.base_url,
                BASE_MODEL_NAME,
                FIRST_PROMPT,
                SamplingParams(max_tokens=1),
                min(FIRST_TOKEN_TIMEOUT_S, deadline_s),
            )
        except (EngineError, DeadlineExceeded) as error:
            raise EngineError(
                f"the first generation failed: {error.what}; the log ends:\n{self.log_tail()}",
                self.base_url,
                self._log_hint(),
            ) from error
        self._check_starting()

    def _check_starting(self) -> None:
        if self._stopping:
            raise EngineError("stopped while it was starting", self.base_url)
        self.check_alive()

    async def _until_gone(self, limit: float) -> None:
        while True:
            if not self.processes() or time.monotonic() >= limit:
                return
            await asyncio.sleep(POLL_S / 2)

    def _log_hint(self) -> str:
        return f"the engine's log is {self.log_path}"
