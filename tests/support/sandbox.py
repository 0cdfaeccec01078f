"""Started local sandboxes for tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

from rl.config import SandboxConfig
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.channel import Finished
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import TaskPackage


def create(package: TaskPackage, scratch: Path, name: str = "test") -> BubblewrapEnvironment:
    env = SandboxProvider(SandboxConfig()).create(package, name, scratch)
    assert isinstance(env, BubblewrapEnvironment)
    return env


@contextlib.asynccontextmanager
async def started(
    package: TaskPackage, scratch: Path, name: str = "test"
) -> AsyncGenerator[BubblewrapEnvironment]:
    env = create(package, scratch, name)
    await env.start(False)
    try:
        yield env
    finally:
        await env.stop(delete=True)


async def output(env: BubblewrapEnvironment, command: str, timeout_s: float = 20) -> str:
    return (await env.run(command, timeout_s=timeout_s, merged=True)).streams[0].text()


async def finished(env: BubblewrapEnvironment, command: str, timeout_s: float) -> Finished:
    return await env.run(command, timeout_s=timeout_s, merged=True)


def daemons(owner: int) -> list[int]:
    """Live sandboxes whose first process was started by `owner`, or that have no owner."""
    found: list[int] = []
    for line in subprocess.check_output(["ps", "ax", "-o", "pid,ppid,cmd"], text=True).splitlines():
        pid, parent, command = line.split(None, 2)
        # As root, bubblewrap is the child of the `unshare` that made its namespace.
        if command.startswith(("bwrap ", "unshare -U")) and int(parent) in (owner, 1):
            found.append(int(pid))
    return found
