"""Starting and ending local sandboxes.

Invariants:
- The daemon inside ends when its socket closes, and by the kernel's signal when the
  zygote that it was forked from ends: the death of this process ends all its sandboxes.
- `end` returns only when every process of the sandbox is gone, or raises.
- What becomes a sandbox moves itself into its control group, if there is one, before
  bubblewrap runs: everything of the sandbox is in it from the first moment.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rl.errors import ConfigurationError, SandboxError
from sandboxes import cgroups, spawner
from sandboxes.channel import Channel
from sandboxes.guest.enclosure import Order
from sandboxes.guest.zygote import FIRST_OUTER_ID, MAPPED_IDS
from sandboxes.rootfs import OWN_MOUNTS_MB, mount_arguments

INSTALL_REMEDY = "install it: apt-get install bubblewrap (or dnf install bubblewrap)"
GENTLE_END_S = 3.0  # the daemon ends by itself when its socket closes
KILLED_END_S = 10.0  # a killed process is gone at once; this is for a machine that swaps
_ISOLATE = (
    *("--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"),
    *("--die-with-parent", "--cap-add", "ALL"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one sandbox may use: MiB of disk and of memory, processes, cores; the network."""

    disk_mb: int
    memory_mb: int
    processes: int
    cpus: float
    network: bool


@dataclass(slots=True)
class Sandbox:
    """A running sandbox."""

    process: spawner.Process
    channel: Channel
    full_map: bool
    group: cgroups.Group | None = None
    holding: frozenset[str] = frozenset()
    """Bounds that the daemon could set, by their names in `guest.bounds`."""

    @property
    def grouped(self) -> frozenset[str]:
        """What a control group limits: memory, pids, cpu."""
        return frozenset() if self.group is None else self.group.controllers


def require_bubblewrap() -> None:
    """Check that sandboxes can be made at all.

    Raises:
        ConfigurationError: a program is missing, with the command that installs it.
    """
    _bubblewrap()
    if shutil.which("setsid") is None:  # of the control groups' sweeper
        raise ConfigurationError(
            "setsid is not installed", remedy="install it: apt-get install util-linux"
        )


def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise ConfigurationError("bubblewrap (bwrap) is not installed", remedy=INSTALL_REMEDY)
    return path


@functools.cache
def can_map_ids() -> bool:
    """Whether this process may give a sandbox a whole range of user ids."""
    if os.geteuid() != 0:
        return False
    last = FIRST_OUTER_ID + MAPPED_IDS
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        inner, _, count = (int(field) for field in line.split())
        if inner <= FIRST_OUTER_ID and last <= inner + count:
            return True
    return False


async def start(bounds: Bounds, timeout_s: float) -> Sandbox:
    """Start a sandbox and wait until its daemon answers.

    Raises:
        SandboxError: it could not be started in time; nothing is left of it.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    spawned = spawner.submit(lambda: _spawn(bounds))
    waiting = asyncio.wrap_future(spawned)
    try:
        async with asyncio.timeout_at(until):
            sandbox = await asyncio.shield(waiting)
    except BaseException as error:
        waiting.add_done_callback(_retrieve)
        if not spawned.cancel():
            spawned.add_done_callback(_discard)
        if isinstance(error, TimeoutError):
            raise SandboxError(f"no sandbox within {timeout_s:.0f} s") from None
        raise
    try:
        async with asyncio.timeout_at(until):
            greeting = await sandbox.channel.ready()
            if not greeting.startswith("ready"):
                raise SandboxError("the sandbox did not start", remedy=f"it said: {greeting}")
    except BaseException as error:
        _kill(sandbox)
        if isinstance(error, TimeoutError):
            raise SandboxError(f"a sandbox was silent for {timeout_s:.0f} s") from None
        raise
    sandbox.holding = frozenset(greeting.split()[1:])
    return sandbox


async def end(sandbox: Sandbox, timeout_s: float) -> None:
    """End a sandbox and all its processes.

    Raises:
        SandboxError: something of it is still alive at the deadline.
    """
    sandbox.channel.close()
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    try:
        gone = await sandbox.process.ended(min(GENTLE_END_S, timeout_s))
    except BaseException:
        sandbox.process.kill()
        raise
    if not gone:
        sandbox.process.kill()
        gone = await sandbox.process.ended(max(0.1, until - loop.time()))
    if gone and sandbox.group is not None:
        gone = await asyncio.to_thread(sandbox.group.remove)
    if not gone:
        raise SandboxError(
            f"a sandbox is still alive {timeout_s:.0f} s after it was stopped",
            where=f"pid {sandbox.process.pid}",
        )


def _spawn(bounds: Bounds) -> Sandbox:
    """Have the zygote fork the sandbox; runs on the spawner's thread."""
    full_map, group = can_map_ids(), _new_group(bounds)
    grouped = frozenset[str]() if group is None else group.controllers
    guard = not full_map and os.geteuid() == 0
    arguments = [*_ISOLATE, *([] if bounds.network else ["--unshare-net"])]
    arguments += mount_arguments(bounds.disk_mb, guard_proc_sys=guard)
    order = Order(
        full_map=full_map,
        network=bounds.network,
        processes=bounds.processes,
        watched_bytes=0 if "memory" in grouped else bounds.memory_mb << 20,
        entrances=[] if group is None else group.entrances,
        command=[_bubblewrap(), *arguments],
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = spawner.fork(order, theirs)
    except SandboxError:
        ours.close()
        if group is not None:
            group.remove()
        raise
    return Sandbox(process, Channel(ours), full_map, group)


def _new_group(bounds: Bounds) -> cgroups.Group | None:
    """The control group of a new sandbox; what it writes to its disk is memory, too."""
    owner = cgroups.owner()
    if owner is None:
        return None
    memory = bounds.memory_mb + bounds.disk_mb + OWN_MOUNTS_MB
    try:
        return owner.group(cgroups.Limits(memory << 20, bounds.processes, bounds.cpus))
    except OSError as error:
        raise SandboxError(f"no control group: {error}") from None


def _kill(sandbox: Sandbox) -> None:
    """End a sandbox that never came up."""
    sandbox.channel.close()
    sandbox.process.kill()
    gone = sandbox.process.wait(KILLED_END_S)
    if sandbox.group is not None:
        gone = sandbox.group.remove() and gone
    if not gone:
        raise SandboxError("a sandbox that did not come up is still alive")


def _discard(spawned: Future[Sandbox]) -> None:
    """End a sandbox that nobody waits for any more, even if their event loop has ended."""
    if spawned.exception() is None:
        _kill(spawned.result())


def _retrieve(waiting: asyncio.Future[Sandbox]) -> None:
    """Look at the error of a start that was given up, which is nobody's concern any more."""
    if not waiting.cancelled():
        waiting.exception()
