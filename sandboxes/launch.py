"""Starting and ending the processes of a local sandbox.

Invariants:
- Every sandbox is started from one thread that lives as long as this process,
  because the kernel's parent-death signal follows the thread that started it.
- The daemon inside also ends when its socket closes, so the death of this
  process ends all its sandboxes even where the signal is lost.
- `end` returns only when every process of the sandbox is gone, or raises.
- What starts a sandbox moves itself into its control group, if there is one, before
  bubblewrap runs: everything of the sandbox is in it from the first moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl.errors import ConfigurationError, SandboxError
from sandboxes import cgroups
from sandboxes.bundle import compiled_bundle, sealed_file
from sandboxes.channel import Channel
from sandboxes.rootfs import OWN_MOUNTS_MB, mount_arguments

INSTALL_REMEDY = "install it: apt-get install bubblewrap (or dnf install bubblewrap)"
SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
FIRST_OUTER_ID = 100_000
MAPPED_IDS = 65_536
MAP_TIMEOUT_S = 20.0  # for `unshare` to start, on a busy machine
GENTLE_END_S = 3.0  # the daemon ends by itself when its socket closes
KILLED_END_S = 10.0  # a killed process is gone at once; this is for a machine that swaps
KEPT_STDERR = 4096
LAST_WORDS_S = 0.2  # for a failing bubblewrap to print why

# The namespace is made first, so that bubblewrap already runs as its root: ids
# must be mapped before it makes the first file.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; '
_BECOME_ROOT = 'exec setpriv --reuid=0 --regid=0 --clear-groups bwrap "$@"'
_ENTER = f"echo; read -r _ || exit; {_JOIN} {_BECOME_ROOT}"
_ISOLATE = (
    *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1"),
    *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
    *("--cap-add", "ALL"),
)

_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-spawner")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one sandbox may use: MiB of disk and of memory, processes, cores; the network."""

    disk_mb: int
    memory_mb: int
    processes: int
    cpus: float
    network: bool


@dataclass(frozen=True, slots=True)
class Guest:
    """The Python that runs the daemon: its path inside, and a folder to show, if any."""

    python: str
    shown: str | None


@dataclass(slots=True)
class Sandbox:
    """A running sandbox."""

    process: subprocess.Popen[bytes]
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
    if shutil.which("bwrap") is None:
        raise ConfigurationError("bubblewrap (bwrap) is not installed", remedy=INSTALL_REMEDY)
    for program in ("unshare", "setpriv", "setsid"):
        if shutil.which(program) is None:
            raise ConfigurationError(
                f"{program} is not installed", remedy="install it: apt-get install util-linux"
            )
    guest_python()


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


@functools.cache
def guest_python() -> Guest:
    """The system's Python, or the running one, shown read-only at its own place.

    Raises:
        ConfigurationError: the system has none, and sandboxes can't reach the running one.
    """
    for path in SYSTEM_PYTHONS:
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return Guest(path, None)
    prefix = Path(sys.base_prefix)
    open_to_all = all(item.stat().st_mode & 0o001 for item in (prefix, *prefix.parents))
    if can_map_ids() and not open_to_all:
        raise ConfigurationError(
            "the system has no Python, and sandboxes cannot reach the running one",
            where=str(prefix),
            remedy="install it: apt-get install python3",
        )
    return Guest(
        f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}", str(prefix)
    )


async def start(bounds: Bounds, timeout_s: float) -> Sandbox:
    """Start a sandbox and wait until its daemon answers.

    Raises:
        SandboxError: it could not be started in time; nothing is left of it.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    spawned = _spawner.submit(_spawn, bounds)
    try:
        async with asyncio.timeout_at(until):
            sandbox = await asyncio.shield(asyncio.wrap_future(spawned))
    except BaseException as error:
        if not spawned.cancel():
            spawned.add_done_callback(_discard)
        if isinstance(error, TimeoutError):
            raise SandboxError(f"no sandbox within {timeout_s:.0f} s") from None
        raise
    try:
        async with asyncio.timeout_at(until):
            greeting = await sandbox.channel.ready()
            if not greeting.startswith("ready"):
                raise SandboxError("the sandbox did not start", remedy=_last_words(sandbox.process))
    except BaseException as error:
        _kill(sandbox)
        if isinstance(error, TimeoutError):
            raise SandboxError(f"a sandbox was silent for {timeout_s:.0f} s") from None
        raise
    sandbox.holding = frozenset(greeting.split()[1:])
    _close(sandbox.process.stderr)
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
        gone = await _exited(sandbox.process, min(GENTLE_END_S, timeout_s))
    except BaseException:
        sandbox.process.kill()
        raise
    if not gone:
        sandbox.process.kill()
        gone = await _exited(sandbox.process, max(0.1, until - loop.time()))
    if gone and sandbox.group is not None:
        gone = await asyncio.to_thread(sandbox.group.remove)
    if not gone:
        raise SandboxError(
            f"a sandbox is still alive {timeout_s:.0f} s after it was stopped",
            where=f"pid {sandbox.process.pid}",
        )


async def _exited(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the end of a process, without polling."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    watch = os.pidfd_open(process.pid)
    loop.add_reader(watch, gone.set)
    try:
        async with asyncio.timeout(timeout_s):
            await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(watch)
        os.close(watch)
    process.poll()
    return True


def _spawn(bounds: Bounds) -> Sandbox:
    """Start bubblewrap with the daemon inside; runs on the spawner thread only."""
    full_map, guest, group = can_map_ids(), guest_python(), _new_group(bounds)
    code = compiled_bundle(guest.python)
    grouped = frozenset[str]() if group is None else group.controllers
    watched = 0 if "memory" in grouped else bounds.memory_mb << 20
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as given:
        given.callback(theirs.close)
        empty = sealed_file("empty", b"")
        given.callback(os.close, empty)
        passed = [code, empty, theirs.fileno()]
        guard = not full_map and os.geteuid() == 0
        args = [*_ISOLATE, *([] if bounds.network else ["--unshare-net"])]
        args += mount_arguments(bounds.disk_mb, empty, guard_proc_sys=guard)
        if guest.shown is not None:
            args += ["--ro-bind", guest.shown, guest.shown]
        args += ["--setenv", "LC_ALL", "C.UTF-8", "--chdir", "/", guest.python, "-I", "-S"]
        args += [f"/proc/self/fd/{code}", "full" if full_map else "single", str(theirs.fileno())]
        args += [str(bounds.processes), str(watched)]
        entrances = [] if group is None else group.entrances
        process = _popen(full_map, entrances, args, passed)
        sandbox = Sandbox(process, Channel(ours), full_map, group)
    if full_map:
        _map_ids(sandbox)
    return sandbox


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


def _popen(
    full_map: bool, entrances: list[str], args: list[str], passed: list[int]
) -> subprocess.Popen[bytes]:
    # Process 1 of a namespace of its own: whatever bubblewrap has made ends with it, a
    # child included that it has not let go on yet, and it ends with us.
    namespace = ["unshare", "-U", "--keep-caps", "--pid", "--fork", "--kill-child"]
    enter = ["setpriv", "--pdeathsig", "KILL"]
    if full_map:
        enter += [*namespace, "sh", "-c", _ENTER, "sh", *entrances, "--"]
    elif entrances:
        enter += ["sh", "-c", f'{_JOIN} exec "$@"', "sh", *entrances, "--"]
    if not full_map:
        enter += [*namespace, "--map-root-user", "bwrap"]
    pipe = subprocess.PIPE if full_map else subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [*enter, *args], stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, pass_fds=passed
        )
    except OSError as error:
        raise SandboxError(f"bubblewrap does not run: {error}", remedy=INSTALL_REMEDY) from None


def _map_ids(sandbox: Sandbox) -> None:
    """Give the new user namespace its range of ids and let bubblewrap go on."""
    process = sandbox.process
    try:
        if process.stdout is None or not _read_line(process.stdout):
            raise SandboxError("no user namespace", remedy=_last_words(process))
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(
                f"0 {FIRST_OUTER_ID} {MAPPED_IDS}\n", encoding="ascii"
            )
        if process.stdin is not None:
            process.stdin.write(b"\n")
            process.stdin.flush()
    except OSError as error:
        _kill(sandbox)
        raise SandboxError(f"the sandbox's user ids could not be mapped: {error}") from None
    except SandboxError:
        _kill(sandbox)
        raise
    finally:
        _close(process.stdin)
        _close(process.stdout)


def _read_line(stream: IO[bytes]) -> bool:
    """Whether the other end has spoken within its time."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(MAP_TIMEOUT_S * 1000)) and bool(os.read(stream.fileno(), 1))


def _kill(sandbox: Sandbox) -> None:
    """End a sandbox that never came up."""
    sandbox.channel.close()
    _kill_with_child(sandbox.process)
    sandbox.process.wait(KILLED_END_S)
    _close(sandbox.process.stderr)
    if sandbox.group is not None and not sandbox.group.remove():
        raise SandboxError("a sandbox that did not come up is still alive")


def _kill_with_child(process: subprocess.Popen[bytes]) -> None:
    """Kill bubblewrap and the child that it may just have made.

    Until bubblewrap lets it go on, that child waits for a word from it, and does not
    die with it.  Stopped first, bubblewrap can't make one behind our back.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)
    # WNOWAIT: an exit stays to be collected by `process`.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    children: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # it has ended by itself
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def _discard(spawned: Future[Sandbox]) -> None:
    """End a sandbox that nobody waits for any more, even if their event loop has ended."""
    if spawned.exception() is None:
        _kill(spawned.result())


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """What bubblewrap printed before it failed."""
    if process.stderr is None:
        return ""
    poll = select.poll()
    poll.register(process.stderr, select.POLLIN)
    if not poll.poll(LAST_WORDS_S * 1000):
        return ""
    text = os.read(process.stderr.fileno(), KEPT_STDERR).decode(errors="replace").strip()
    return f"it said: {text}" if text else ""


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):  # closing flushes what a dead reader left
            stream.close()
