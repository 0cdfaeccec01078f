"""The two attempts with a known end: a package's own solution, and doing nothing.

Invariants: those of `sandboxes.attempt`.  The solution reaches the sandbox only
when it is about to run, in a place of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from harbor.environments.base import BaseEnvironment

from rl.agent.shell import CommandResult, Shell
from rl.errors import DeadlineExceeded, SandboxError, TaskPackageError
from sandboxes.attempt import AttemptLimits, AttemptResult, Provider, run_attempt
from sandboxes.tasks import TaskPackage
from sandboxes.usage import Usage, metered, read_usage

OUTPUT_LIMIT = 16_384  # kept of what the solution prints, bytes
UPLOAD_TIMEOUT_S = 60.0
SOLUTION_DIR = "/solution"
_SOLVE = (
    f"[ -x {SOLUTION_DIR}/solve.sh ] || chmod +x {SOLUTION_DIR}/solve.sh; "
    f"exec {SOLUTION_DIR}/solve.sh"
)

OnUsage = Callable[[Usage | None], None]


class _Recorder:
    """Lends an agent the environment that its attempt runs in."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.env: BaseEnvironment | None = None

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """See `Provider`."""
        self.env = self._provider.create(package, attempt_id, scratch)
        return self.env

    def create_grader(
        self, package: TaskPackage, attempt_id: str, scratch: Path
    ) -> BaseEnvironment:
        """See `Provider`."""
        return self._provider.create_grader(package, attempt_id, scratch)

    def shell(self, env: BaseEnvironment) -> Shell:
        """See `Provider`."""
        return self._provider.shell(env)


async def run_oracle(
    package: TaskPackage,
    provider: Provider,
    limits: AttemptLimits,
    attempt_id: str,
    on_usage: OnUsage | None = None,
) -> AttemptResult[CommandResult]:
    """One attempt by the package's own solution; `on_usage` hears what it used."""
    if package.solution_script is None:
        raise TaskPackageError(
            "has no solution/solve.sh", str(package.path), "add one, or leave the package out"
        )
    recorder = _Recorder(provider)

    async def solve(shell: Shell, deadline: float) -> CommandResult:
        env = recorder.env
        if env is None:
            raise SandboxError("the solution has no sandbox", package.name)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                await env.upload_dir(package.path / "solution", SOLUTION_DIR)
        except TimeoutError:
            what = f"its solution was not uploaded within {UPLOAD_TIMEOUT_S:g} s"
            raise DeadlineExceeded(what, package.name) from None
        left = deadline - asyncio.get_running_loop().time()
        command = metered(env, _SOLVE) if on_usage is not None else _SOLVE
        result = await shell.run(command, max(left, 1.0), OUTPUT_LIMIT)
        if on_usage is not None:
            on_usage(await read_usage(env))
        return result

    return await run_attempt(package, recorder, solve, limits, attempt_id)


async def run_nothing(
    package: TaskPackage, provider: Provider, limits: AttemptLimits, attempt_id: str
) -> AttemptResult[CommandResult]:
    """One attempt by an agent that does nothing."""

    async def idle(_shell: Shell, _deadline: float) -> CommandResult:
        return CommandResult("", 0)

    return await run_attempt(package, provider, idle, limits, attempt_id)
