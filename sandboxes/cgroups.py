"""Limits over a whole sandbox: control groups, of either version, where they can be written.

Invariants:
- Groups are made below this process's own, so they never loosen what binds it.
- A controller that cannot be written is left out and not named in `controllers`:
  the caller says which limits are in force.
- No group outlives its owner: a small shell, which is not the owner's child, waits
  for the owner's end, kills what is left in the groups and removes them; what even
  that left behind, the next owner removes.
- Nothing here waits longer than `REMOVE_LIMIT_S`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "sandboxes-"
CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000  # the kernel's default
CPU_WEIGHT = 1024  # v1's default: a sandbox counts as one process, however many it has
CPU_WEIGHT_V2 = 100  # the same on v2's scale
MOST_WEIGHT, MOST_WEIGHT_V2 = 262_144, 10_000  # the kernel's
REMOVE_LIMIT_S = 2.0  # a group is busy until its last process has been collected
RETRY_S = 0.002
SWEEPER_START_S = 10.0

# Ends when its standard input does, which is when the owner is gone, however it went.
_SWEEP = """
read -r _
tries=0
while [ $tries -lt 20 ]; do
  left=
  for owner in "$@"; do
    for group in "$owner"/*/ "$owner"; do
      [ -d "$group" ] || continue
      while read -r pid; do [ "$pid" = 0 ] || kill -9 "$pid"; done < "$group/cgroup.procs"
      rmdir "$group" || left=1
    done
  done
  [ -n "$left" ] || exit 0
  tries=$((tries + 1))
  sleep 0.1
done 2>/dev/null
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox: bytes of memory, its disk included; processes; cores."""

    memory: int
    processes: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's group: a directory per hierarchy, and the controllers that it has."""

    directories: tuple[Path, ...]
    controllers: frozenset[str]
    entrance: str

    @property
    def entrances(self) -> list[str]:
        """Files to which a process writes 0 to move itself in."""
        return [str(directory / self.entrance) for directory in self.directories]

    def remove(self) -> bool:
        """Remove the group, whose processes have ended; False if it is still busy."""
        until = time.monotonic() + REMOVE_LIMIT_S
        for directory in self.directories:
            while not _removed(directory):
                if time.monotonic() > until:
                    return False
                time.sleep(RETRY_S)
        return True


@dataclass(slots=True)
class Owner:
    """Where this process makes groups: its directory in each hierarchy."""

    directories: Mapping[Path, frozenset[str]]
    unified: bool
    lifeline: int
    """Open for as long as this process lives; the sweeper has the other end."""
    numbers: itertools.count[int]

    @property
    def controllers(self) -> frozenset[str]:
        """What can be limited."""
        return frozenset[str]().union(*self.directories.values())

    def group(self, limits: Limits) -> Group:
        """A new, empty group under `limits`.

        Raises:
            OSError: the kernel refused it; nothing is left of it.
        """
        name = str(next(self.numbers))
        # A thread that moves itself by `tasks` waits for nobody; anything else waits for
        # every core, some 15 ms, and version 2 has nothing else.
        entrance = "cgroup.procs" if self.unified else "tasks"
        made = Group(tuple(path / name for path in self.directories), self.controllers, entrance)
        try:
            for path, controllers in self.directories.items():
                (path / name).mkdir()
                for file, value in settings(limits, controllers, self.unified).items():
                    (path / name / file).write_text(value, encoding="utf-8")
                if "cpu" in controllers:
                    self._weigh(path)
        except OSError:
            made.remove()
            raise
        return made

    def _weigh(self, path: Path) -> None:
        """Let all our sandboxes together count as many processes as they are.

        Otherwise they would share the weight of one, and starve beside an engine.
        """
        alive = sum(entry.is_dir() for entry in os.scandir(path))
        weight = min(alive * CPU_WEIGHT, MOST_WEIGHT)
        weight_v2 = min(alive * CPU_WEIGHT_V2, MOST_WEIGHT_V2)
        file, value = ("cpu.weight", weight_v2) if self.unified else ("cpu.shares", weight)
        (path / file).write_text(str(value), encoding="utf-8")


def settings(limits: Limits, controllers: frozenset[str], unified: bool) -> dict[str, str]:
    """Files of a group and what is written to them, in order."""
    quota = round(limits.cpus * CPU_PERIOD_US)
    memory, processes = str(limits.memory), str(limits.processes)
    if unified:
        every = {
            "memory": {"memory.max": memory},
            "pids": {"pids.max": processes},
            "cpu": {"cpu.weight": str(CPU_WEIGHT_V2), "cpu.max": f"{quota} {CPU_PERIOD_US}"},
        }
    else:
        every = {
            "memory": {"memory.limit_in_bytes": memory},
            "pids": {"pids.max": processes},
            "cpu": {"cpu.shares": str(CPU_WEIGHT), "cpu.cfs_quota_us": str(quota)},
        }
    return {
        file: value
        for name in CONTROLLERS
        if name in controllers
        for file, value in every[name].items()
    }


def owner() -> Owner | None:
    """This process's place for groups; None where no controller can be written."""
    return _owner(os.getpid())


@functools.cache
def _owner(pid: int) -> Owner | None:
    parents, unified = writable(
        Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"),
        Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace"),
    )
    name = f"{PREFIX}{pid}-{_started(pid)}"
    directories: dict[Path, frozenset[str]] = {}
    for parent, controllers in parents.items():
        _remove_orphans(parent)
        with contextlib.suppress(OSError):  # not writable after all: not in force
            (parent / name).mkdir()
            if unified:
                _delegate(parent / name, controllers)
            directories[parent / name] = controllers
    if not directories:
        return None
    return Owner(directories, unified, _start_sweeper(directories), itertools.count())


def _start_sweeper(directories: Iterable[Path]) -> int:
    """Start what removes `directories` once the descriptor that is returned is closed."""
    end, lifeline = os.pipe()
    try:
        # In a session of its own, so that a signal to the owner's group does not end it first.
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _SWEEP, "sh", *map(str, directories)],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SWEEPER_START_S,
            check=True,
        )
    finally:
        os.close(end)
    return lifeline


def writable(mountinfo: str, membership: str) -> tuple[dict[Path, frozenset[str]], bool]:
    """Directories below which groups can be made, with their controllers; True for v2.

    Version 1 wins where it has any of the controllers, as then version 2 lacks them.
    """
    own = {
        controller: path
        for number, names, path in (line.split(":", 2) for line in membership.splitlines())
        for controller in (names.split(",") if number != "0" else [""])
    }
    first: dict[Path, frozenset[str]] = {}
    second: dict[Path, frozenset[str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            found = frozenset(CONTROLLERS) & set(options.split(","))
            for name in sorted(found)[:1]:
                place = _below(mount, root, own.get(name, "/"))
                if os.access(place, os.W_OK):
                    first[place] = found
        elif kind == "cgroup2" and not second:
            second = _unified(Path(mount), _below(mount, root, own.get("", "/")))
    return (first, False) if first else (second, True)


def _below(mount: str, root: str, path: str) -> Path:
    """The directory of group `path` in a hierarchy that shows `root` at `mount`."""
    inner = path.removeprefix(root) if root != "/" else path
    return Path(mount, inner.lstrip("/"))


def _unified(mount: Path, own: Path) -> dict[Path, frozenset[str]]:
    """The nearest group, from our own upwards, that may give its children controllers.

    Our own can't while processes are in it, unless it is the root.
    """
    for place in (own, *own.parents):
        if not place.is_relative_to(mount):
            break
        try:
            given = (place / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        except OSError:
            continue
        found = frozenset(CONTROLLERS) & set(given)
        if found and os.access(place, os.W_OK):
            return {place: found}
    return {}


def _delegate(directory: Path, controllers: frozenset[str]) -> None:
    wanted = " ".join(f"+{name}" for name in sorted(controllers))
    (directory / "cgroup.subtree_control").write_text(wanted, encoding="utf-8")


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _remove_orphans(parent: Path) -> None:
    """Remove groups whose owner is gone, with what still runs in them."""
    for path in parent.glob(f"{PREFIX}*"):
        pid, _, started = path.name.removeprefix(PREFIX).partition("-")
        if not pid.isdigit() or _started(int(pid)) == started:
            continue
        for group in (*path.glob("*/"), path):
            with contextlib.suppress(OSError):  # its own sweeper may be at it
                for left in (group / "cgroup.procs").read_text(encoding="utf-8").split():
                    if left != "0":  # of another process namespace
                        os.kill(int(left), signal.SIGKILL)
                group.rmdir()


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
