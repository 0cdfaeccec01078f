"""Runs every attempt of `escapes` against real sandboxes: `python -m tests.support.escape_run`.

It is a process of its own because it may have to give up its user for good.  It prints
one JSON object: for each attempt, what went wrong (empty if nothing did), and what the
sandboxes said bounds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.errors import InfrastructureError, SandboxError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.grading import grade
from sandboxes.rootfs import SYSTEM_PYTHONS
from sandboxes.tasks import TaskPackage, load_package
from tests.support.escapes import DENIED, HARMS, Harm
from tests.support.packages import write_package
from tests.support.sandbox import create

AT_ONCE = 4  # sandboxes; two cores do more of them no faster
OUTPUT_LIMIT = 20_000
SAMPLE_S = 0.05
GRADE_S = 60.0
VERIFIER = "#!/bin/sh\n[ -f /app/solved ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"


@dataclass(slots=True)
class Host:
    """What must stay as it is."""

    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    listeners: list[socket.socket] = field(default_factory=list[socket.socket])

    def prepare(self) -> dict[str, str]:
        """Put up a secret and listeners; what scripts are told of them."""
        canary, path = self.folder / "canary", self.folder / "socket"
        canary.write_text(self.secret)
        abstract = f"escape-{self.secret[:8]}"
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, str(path)),
            (socket.AF_UNIX, f"\0{abstract}"),
        ):
            listener = socket.socket(family)
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            self.listeners.append(listener)
        port = self.listeners[0].getsockname()[1]
        return {
            "CANARY": str(canary),
            "PORT": str(port),
            "SOCKET": str(path),
            "ABSTRACT": abstract,
            "PY": SYSTEM_PYTHONS[0],
        }

    def harm(self) -> str:
        """What has been done to it; empty if nothing."""
        if (self.folder / "canary").read_text() != self.secret:
            return "the host's file was written"
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                return f"the host's listener was reached: {listener.getsockname()!r}"
        return ""


@dataclass(slots=True)
class Seen:
    """The most that a sandbox used while it was watched, as the host sees it."""

    mb: int = 0
    processes: int = 0
    pids: dict[int, str] = field(default_factory=dict[int, str])

    def look(self, root: int) -> None:
        """Look once at the processes below `root`."""
        kept, frontier = 0, [root]
        processes = 0
        while frontier:
            pid = frontier.pop()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                frontier += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                self.pids[pid] = _started(pid)
                processes += 1
                fields = Path(f"/proc/{pid}/statm").read_text().split()
                kept += int(fields[1]) - int(fields[2])
        self.mb = max(self.mb, kept * os.sysconf("SC_PAGE_SIZE") >> 20)
        self.processes = max(self.processes, processes)

    def left(self) -> list[int]:
        """Those that are still there."""
        found: list[int] = []
        for pid, started in self.pids.items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if _started(pid) == started:
                    found.append(pid)
        return found


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]


@dataclass(frozen=True, slots=True)
class Suite:
    """What all attempts share."""

    host: Host
    variables: dict[str, str]
    package: TaskPackage
    limits: dict[str, str]

    @contextlib.asynccontextmanager
    async def sandbox(self, name: str) -> AsyncGenerator[tuple[BubblewrapEnvironment, Seen]]:
        """A sandbox, watched until it is stopped; nothing of it is left then."""
        env = create(self.package, self.host.folder / "scratch", name)
        seen = Seen()
        await env.start(False)
        self.limits.update(env.limits_in_force)
        root = env._live().process.pid
        watching = asyncio.create_task(_watch(seen, root))
        try:
            yield env, seen
        finally:
            watching.cancel()
            seen.look(root)
            await env.stop()
        if left := seen.left():
            raise SandboxError(f"processes are left: {left}")

    async def denied(self, env: BubblewrapEnvironment, script: str) -> str:
        """Run a script that must not succeed."""
        done = await env.run(
            script, env=self.variables, timeout_s=20, output_limit=OUTPUT_LIMIT, merged=True
        )
        text = done.streams[0].text()
        if done.exit_code == 0:
            return f"it succeeded: {text}"
        if self.host.secret in text:
            return "the host's file was read"
        alive = await env.run("echo alive", timeout_s=20)
        if alive.streams[0].text() != "alive\n":
            return f"the sandbox is not usable: {alive}"
        return self.host.harm()

    async def harm(self, name: str, harm: Harm) -> str:
        """Run a script in a sandbox of its own, then grade."""
        async with self.sandbox(name) as (env, seen):
            done = await env.run(
                harm.script,
                env=self.variables,
                timeout_s=harm.timeout_s,
                output_limit=OUTPUT_LIMIT,
                merged=True,
            )
            printed = len(done.streams[0].head) + len(done.streams[0].tail)
            if printed > OUTPUT_LIMIT:
                return f"{printed} bytes of output came back"
            reward = (await grade(env, self.package, GRADE_S)).reward
            if reward != 0.0:
                return f"it was paid {reward}"
            alive = await env.run("echo alive", cwd="/", user="root", timeout_s=20)
            if alive.streams[0].text() != "alive\n":
                return f"the sandbox is not usable: {alive}"
        if seen.mb > harm.most_mb or seen.processes > harm.most_processes:
            return f"it reached {seen.mb} MiB and {seen.processes} processes"
        return self.host.harm()


async def _watch(seen: Seen, root: int) -> None:
    while True:
        seen.look(root)
        await asyncio.sleep(SAMPLE_S)


async def _all(folder: Path) -> dict[str, object]:
    host, limits = Host(folder), dict[str, str]()
    path = write_package(folder / "packages")
    (path / "tests" / "test.sh").write_text(VERIFIER)
    suite = Suite(host, host.prepare(), load_package(path), limits)
    found: dict[str, str] = {}
    gate = asyncio.Semaphore(AT_ONCE)

    async def record(name: str, attempt: Coroutine[Any, Any, str]) -> None:
        try:
            found[name] = await attempt
        except InfrastructureError as error:
            found[name] = repr(error)

    async def denied(names: list[str]) -> None:
        async with gate, suite.sandbox(f"denied-{names[0][:8]}") as (env, _):
            for name in names:
                await record(name, suite.denied(env, DENIED[name]))

    async def harm(name: str) -> None:
        async with gate:
            await record(name, suite.harm("harm", HARMS[name]))

    names = list(DENIED)
    shares = [names[at::AT_ONCE] for at in range(AT_ONCE)]
    await asyncio.gather(*map(denied, shares), *map(harm, HARMS))
    return {"found": found, "limits": limits}


def main() -> None:
    """Run as the user whose id is the first argument."""
    uid = int(sys.argv[1])
    os.environ["OWNER_ONLY"] = "1"
    for name in ("concurrent.futures.thread", "encodings.idna", "encodings.unicode_escape"):
        importlib.import_module(name)  # an ordinary user may not reach this Python's files
    with tempfile.TemporaryDirectory(prefix="escapes-") as folder:
        if uid != os.geteuid():
            os.chown(folder, uid, uid)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.environ["XDG_CACHE_HOME"] = folder
        result = asyncio.run(_all(Path(folder)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
