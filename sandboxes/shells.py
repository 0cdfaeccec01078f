"""The harness's view of a sandbox: run one command, bounded.

Invariants: those of `rl.agent.shell`.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

from rl.agent.shell import EXIT_TIMED_OUT, CommandResult
from rl.errors import InfrastructureError, SandboxError
from sandboxes.bubblewrap import BubblewrapEnvironment

KILL_AFTER_S = 2  # between the polite signal and the last one
REMOTE_GRACE_S = 30.0  # a remote call's own time on top of the command's
GUEST_SOURCES = Path(__file__).parent / "guest"
GUEST_DIR = "/var/tmp/.terminal-rl"
_START = (
    f"import sys; sys.path.insert(0, {GUEST_DIR!r}); "
    "from sandboxes.guest.remote import main; main()"
)


class BubblewrapShell:
    """A shell in a started local sandbox; limits hold inside it."""

    def __init__(self, env: BubblewrapEnvironment) -> None:
        self._env = env

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        """See `rl.agent.shell.Shell.run`."""
        done = await self._env.run(
            command, timeout_s=timeout_s, output_limit=output_limit, merged=True
        )
        return CommandResult(done.streams[0].text(), done.exit_code)


class HarborShell:
    """A shell in any other Harbor environment, with the limits of a local one.

    They are kept by `sandboxes.guest.remote`, which is uploaded before the first command.
    Where there is no python3, `timeout` keeps them as far as it can: whole seconds, a
    process that leaves the command's group outlives them, and a background job that
    holds the output holds the call.
    """

    def __init__(self, env: BaseEnvironment) -> None:
        self._env = env
        self._python: str | None = None
        """Its path in the sandbox; empty if there is none, None before it was looked for."""

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        """See `rl.agent.shell.Shell.run`."""
        if self._python is None:
            self._python = await self._prepare()
        if not self._python:
            return await self._run_plainly(command, timeout_s, output_limit)
        words = ["exec", self._python, "-I", "-S", "-B", "-c", _START]
        words += [f"{timeout_s:.3f}", str(output_limit), command]
        done = await self._exec(shlex.join(words), timeout_s)
        return CommandResult(done.stdout or "", done.return_code)

    async def _prepare(self) -> str:
        """Upload what keeps the limits; the path of python3, empty if there is none."""
        found = await self._exec("command -v python3", KILL_AFTER_S)
        python = (found.stdout or "").strip()
        if python and found.return_code == 0:
            try:
                async with asyncio.timeout(REMOTE_GRACE_S):
                    await self._env.upload_dir(GUEST_SOURCES, f"{GUEST_DIR}/sandboxes/guest")
            except TimeoutError:
                raise self._silent(REMOTE_GRACE_S) from None
            return python
        return ""

    async def _run_plainly(
        self, command: str, timeout_s: float, output_limit: int
    ) -> CommandResult:
        seconds = max(1, round(timeout_s))
        wrapped = f"timeout -k {KILL_AFTER_S} {seconds} bash -c {shlex.quote(command)} 2>&1"
        done = await self._exec(wrapped, seconds)
        code = EXIT_TIMED_OUT if done.return_code in (EXIT_TIMED_OUT, 137) else done.return_code
        output = (done.stdout or "") + (done.stderr or "")
        return CommandResult(cut_text(output, output_limit), code)

    async def _exec(self, command: str, timeout_s: float) -> ExecResult:
        """One remote call; every failure of it is the provider's.

        Raises:
            SandboxError: the provider failed, or was silent for too long.
        """
        limit_s = timeout_s + KILL_AFTER_S + REMOTE_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._env.exec(command, timeout_sec=math.ceil(limit_s))
        except TimeoutError:
            raise self._silent(limit_s) from None
        except InfrastructureError:
            raise
        except Exception as error:  # a provider's own types; all of them mean that it failed
            raise SandboxError(f"the provider failed: {error!r}", self._env.session_id) from error

    def _silent(self, limit_s: float) -> SandboxError:
        return SandboxError(f"no answer within {limit_s:.0f} s", self._env.session_id)


def cut_text(text: str, limit: int) -> str:
    """Keep head and tail of `text` if it is longer than `limit` bytes, and say what is cut."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return text
    head, tail = data[: limit // 2], data[len(data) - (limit - limit // 2) :]
    cut = len(data) - len(head) - len(tail)
    kept = [part.decode("utf-8", errors="replace") for part in (head, tail)]
    return f"{kept[0]}\n[... {cut} bytes cut ...]\n{kept[1]}"
