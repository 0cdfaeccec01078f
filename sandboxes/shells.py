"""The harness's view of a sandbox: run one command, bounded.

Invariants: those of `rl.agent.shell`.
"""

from __future__ import annotations

import asyncio
import shlex

from harbor.environments.base import BaseEnvironment

from rl.agent.shell import EXIT_TIMED_OUT, CommandResult
from rl.errors import InfrastructureError, SandboxError
from sandboxes.bubblewrap import BubblewrapEnvironment

KILL_AFTER_S = 2  # between the polite signal and the last one
REMOTE_GRACE_S = 30.0  # a remote call's own time on top of the command's


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
    """A shell in any other Harbor environment, by `timeout` inside it.

    A process that leaves the command's process group outlives a timeout here.
    """

    def __init__(self, env: BaseEnvironment) -> None:
        self._env = env

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        """See `rl.agent.shell.Shell.run`."""
        seconds = max(1, round(timeout_s))
        wrapped = f"timeout -k {KILL_AFTER_S} {seconds} bash -c {shlex.quote(command)} 2>&1"
        limit_s = seconds + KILL_AFTER_S + REMOTE_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                done = await self._env.exec(wrapped, timeout_sec=int(limit_s))
        except TimeoutError:
            raise SandboxError(f"no answer within {limit_s:.0f} s", self._env.session_id) from None
        except InfrastructureError:
            raise
        except Exception as error:  # a provider's own types; all of them mean that it failed
            raise SandboxError(f"the provider failed: {error!r}", self._env.session_id) from error
        code = EXIT_TIMED_OUT if done.return_code in (EXIT_TIMED_OUT, 137) else done.return_code
        output = (done.stdout or "") + (done.stderr or "")
        return CommandResult(cut_text(output, output_limit), code)


def cut_text(text: str, limit: int) -> str:
    """Keep head and tail of `text` if it is longer than `limit` bytes, and say what is cut."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return text
    head, tail = data[: limit // 2], data[len(data) - (limit - limit // 2) :]
    cut = len(data) - len(head) - len(tail)
    kept = [part.decode("utf-8", errors="replace") for part in (head, tail)]
    return f"{kept[0]}\n[... {cut} bytes cut ...]\n{kept[1]}"
