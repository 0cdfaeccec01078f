"""`python -m benchmarks.sandboxes`: local sandboxes against what the machine can do at best.

- Start: until commands can be run, against a bare `unshare`, tmpfs, overlay and `bwrap`
  that runs `true`, in alternating rounds of one run.
- Exec: one command, against the same one as a process of the host, alternating.
- Alive: many at once, each of which has just answered, and the memory of all their
  processes (proportional set size).
- Killed owner: from SIGKILL of the process that owns several sandboxes until no process,
  mount, control group or scratch path of theirs is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from rl.config import SandboxConfig
from rl.errors import EXIT_OK, InfrastructureError, run_command
from sandboxes.bank import write_bank
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.cgroups import PREFIX
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import TaskPackage, load_folder, load_package

COMMAND = "true"
STEP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 30.0
POLL_S = 0.002
STARTS_AT_ONCE = 4
SCRATCH = "sandbox-benchmark-"
OWNING = "owning"
# A private mount namespace, an overlay of /usr on a tmpfs, and bubblewrap over it.
FLOOR = (
    'mount -t tmpfs -o size=64m none "$1" && mkdir "$1/up" "$1/work" "$1/usr" && '
    'mount -t overlay -o "lowerdir=/usr,upperdir=$1/up,workdir=$1/work$2" none "$1/usr" && '
    'exec bwrap --unshare-all --die-with-parent --tmpfs / --bind "$1/usr" /usr '
    "--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 "
    "--proc /proc --dev /dev /usr/bin/true"
)


def _floor(folder: Path) -> None:
    """One bare start, which ends at once."""
    root = os.geteuid() == 0
    enter = ["unshare", "-m"] if root else ["unshare", "-U", "--map-root-user", "-m"]
    subprocess.run(
        [*enter, "sh", "-c", FLOOR, "sh", str(folder), "" if root else ",userxattr"],
        check=True,
        capture_output=True,
        timeout=STEP_TIMEOUT_S,
    )


@contextlib.asynccontextmanager
async def _started(
    package: TaskPackage, folder: Path, name: str
) -> AsyncGenerator[tuple[BubblewrapEnvironment, float]]:
    """A started sandbox, and the seconds that its start took."""
    env = SandboxProvider(SandboxConfig()).create(package, name, folder / name)
    if not isinstance(env, BubblewrapEnvironment):
        raise InfrastructureError("the default provider is not the local one")
    began = time.perf_counter()
    await env.start(False)
    seconds = time.perf_counter() - began
    try:
        yield env, seconds
    finally:
        await env.stop()


def measure_starts(package: TaskPackage, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Alternating starts: the floor's row, then ours."""
    floor: list[float] = []
    ours: list[float] = []
    place = folder / "floor"
    place.mkdir()

    async def run() -> None:
        for number in range(rounds + 1):
            began = time.perf_counter()
            await asyncio.to_thread(_floor, place)
            floor.append(time.perf_counter() - began)
            async with _started(package, folder, f"start-{number}") as (_, seconds):
                ours.append(seconds)

    asyncio.run(run())
    return _against("start", "floor", floor[1:], "sandbox", ours[1:])


def measure_exec(package: TaskPackage, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Alternating commands: the host's row, then the sandbox's."""
    host: list[float] = []
    inside: list[float] = []

    async def run() -> None:
        async with _started(package, folder, "exec") as (env, _):
            for _ in range(rounds):
                began = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    *("bash", "-c", COMMAND),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                await asyncio.wait_for(process.communicate(), STEP_TIMEOUT_S)
                host.append(time.perf_counter() - began)
                began = time.perf_counter()
                await env.run(COMMAND, timeout_s=STEP_TIMEOUT_S)
                inside.append(time.perf_counter() - began)

    asyncio.run(run())
    return _against("exec", "host process", host, "sandbox", inside)


def _against(
    what: str, base: str, base_s: Sequence[float], name: str, seconds: Sequence[float]
) -> list[dict[str, Any]]:
    middle = statistics.median(base_s)
    return [
        {
            "measure": what,
            "of": of,
            "times": len(times),
            "p50 ms": 1e3 * statistics.median(times),
            "p95 ms": 1e3 * sorted(times)[int(0.95 * len(times))],
            "ratio": statistics.median(times) / middle,
        }
        for of, times in ((base, base_s), (name, seconds))
    ]


def measure_alive(package: TaskPackage, folder: Path, count: int) -> dict[str, Any]:
    """`count` sandboxes at once."""

    async def run() -> dict[str, Any]:
        gate = asyncio.Semaphore(STARTS_AT_ONCE)
        async with contextlib.AsyncExitStack() as stack:

            async def start(number: int) -> BubblewrapEnvironment:
                async with gate:
                    started = _started(package, folder, f"alive-{number}")
                    return (await stack.enter_async_context(started))[0]

            began = time.perf_counter()
            envs = await asyncio.gather(*(start(number) for number in range(count)))
            seconds = time.perf_counter() - began
            done = await asyncio.gather(*(env.run(COMMAND, timeout_s=60.0) for env in envs))
            memory = sum(map(_proportional_mb, _descendants(os.getpid())))
        return {
            "asked for": count,
            "answered": sum(item.exit_code == 0 for item in done),
            "all started after s": seconds,
            "memory MiB": memory,
        }

    return asyncio.run(run())


def measure_killed_owner(folder: Path, count: int) -> dict[str, Any]:
    """Seconds from the owner's SIGKILL until nothing of its sandboxes is left."""
    command = [sys.executable, "-m", "benchmarks.sandboxes", "--own", str(count), str(folder)]
    owner = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ, text=True
    )
    try:
        if owner.stdout is None or owner.stdout.readline() != f"{OWNING}\n":
            raise InfrastructureError("the owner's sandboxes did not start")
        pids = _descendants(owner.pid)
        mounts = _mounts()
        checks: dict[str, Callable[[], bool]] = {
            "processes": lambda: any(map(_alive, pids)),
            "control groups": lambda: any(Path("/sys/fs/cgroup").glob(f"**/{PREFIX}{owner.pid}-*")),
            "scratch paths": lambda: any(folder.glob(f"{OWNING}-*")),
            "mounts": lambda: _mounts() != mounts,
        }
    finally:
        owner.send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        owner.wait(GONE_TIMEOUT_S)
    row: dict[str, Any] = {"sandboxes": count, "processes": len(pids)}
    for name, left in checks.items():
        while left():
            if time.perf_counter() - killed > GONE_TIMEOUT_S:
                raise InfrastructureError(f"{name} of a killed owner are left", str(folder))
            time.sleep(POLL_S)
        row[f"{name} gone after s"] = time.perf_counter() - killed
    return row


def _own(count: int, folder: Path) -> None:
    """Own sandboxes, with something running in each, until killed."""

    async def run() -> None:
        package = load_folder(folder / "bank")[0]
        async with contextlib.AsyncExitStack() as stack:
            for number in range(count):
                started = _started(package, folder, f"{OWNING}-{number}")
                env, _ = await stack.enter_async_context(started)
                await env.run("setsid sleep 600 & true", timeout_s=STEP_TIMEOUT_S)
            print(OWNING, flush=True)
            await asyncio.sleep(STEP_TIMEOUT_S)

    asyncio.run(run())


def _package(folder: Path) -> TaskPackage:
    return load_package(write_bank(folder / "bank", (), 1, seed=1)[0])


def _descendants(root: int) -> list[int]:
    found: list[int] = []
    frontier = [root]
    while frontier:
        pid = frontier.pop()
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = [int(child) for child in thread.read_text().split()]
                found += children
                frontier += children
    return found


def _alive(pid: int) -> bool:
    """Whether a process is there, and not only yet to be collected by its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _proportional_mb(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sandboxes",
        description="Start, exec and end of local sandboxes, against the least that the machine "
        "needs for the same; how many are alive at once; what a killed owner leaves.",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, few sandboxes")
    parser.add_argument("--rounds", type=int, default=100, help="starts of each (%(default)s)")
    parser.add_argument("--alive", type=int, default=128, help="alive at once (%(default)s)")
    parser.add_argument("--owned", type=int, default=16, help="of the killed owner (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--own", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.own is not None:
        _own(int(options.own[0]), Path(options.own[1]))
        return EXIT_OK
    if options.quick:
        options.rounds, options.alive, options.owned = 10, 16, 4
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as root:
        folder = Path(root)
        package = _package(folder)
        rows = measure_starts(package, folder, options.rounds)
        rows += measure_exec(package, folder, 3 * options.rounds)
        alive = measure_alive(package, folder, options.alive)
        owner = measure_killed_owner(folder, options.owned)
    path = keep("sandboxes", rows, alive=alive, killed_owner=owner)
    if options.json:
        print(json.dumps({"rows": rows, "alive": alive, "killed_owner": owner}))
    else:
        show("time of one", rows)
        show("alive at once", [alive])
        show("killed owner", [owner])
        print(f"kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
