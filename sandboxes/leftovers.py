"""What sandboxes would leave behind on this machine: processes, mounts, scratch files.

Invariant: only descendants of this process that live in another user namespace
than it count, since every process of a sandbox does; what else is started here or
on the machine meanwhile is none of it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Traces:
    """What was there at one moment: sandboxes' processes, our mounts, scratch paths."""

    processes: frozenset[str]
    mounts: frozenset[str]
    scratch: frozenset[str]

    def since(self, earlier: Traces) -> list[str]:
        """One line for each thing that was not there earlier."""
        return [
            *(f"process {item}" for item in sorted(self.processes - earlier.processes)),
            *(f"mount {item}" for item in sorted(self.mounts - earlier.mounts)),
            *(f"file {item}" for item in sorted(self.scratch - earlier.scratch)),
        ]


def look(scratch_prefix: str) -> Traces:
    """What is there now.

    Args:
        scratch_prefix: how the names of the scratch paths looked for begin.
    """
    folder = tempfile.gettempdir()
    names = (name for name in os.listdir(folder) if name.startswith(scratch_prefix))
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    return Traces(
        processes=frozenset(_descendants()),
        mounts=frozenset(line.split(" ")[4] for line in mounts.splitlines()),
        scratch=frozenset(os.path.join(folder, name) for name in names),
    )


def _descendants() -> list[str]:
    """`pid (command)` of every live process below this one in another user namespace."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        command, _, rest = stat.partition(" (")[2].rpartition(") ")
        state, parent = rest.split()[:2]
        if state not in ("Z", "X"):
            children.setdefault(int(parent), []).append((int(name), command))
    found: list[str] = []
    own = _user_namespace(os.getpid())
    frontier = [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += [f"{pid} ({command})" for pid, command in below if _user_namespace(pid) != own]
        frontier += [pid for pid, _ in below]
    return found


def _user_namespace(pid: int) -> str:
    """The namespace's name; empty for a process that hides it, as a sandbox's first does."""
    try:
        return os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return ""
