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
    """Live sandboxes of `owner`, and whatever has outlived an owner."""
    return _inits(*zygotes(owner), 1)


def zygotes(owner: int) -> list[int]:
    return _inits(owner)


def _inits(*parents: int) -> list[int]:
    found: list[int] = []
    for line in subprocess.check_output(["ps", "ax", "-o", "pid,ppid,cmd"], text=True).splitlines():
        pid, parent, command = line.split(None, 2)
        if command.startswith("sandbox-init") and int(parent) in parents:
            found.append(int(pid))
    return found
