"""What a command used of a local sandbox: its largest process, and the disk.

Invariants:
- Measuring changes neither what the command does nor its output and exit code.
- What is read back was written inside the sandbox, and is believed only as two
  numbers of a package's own solution; where there is none, nothing is known.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from harbor.environments.base import BaseEnvironment

from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.rootfs import SYSTEM_PYTHONS

_LEFT_AT = "/solution/.usage"  # a mount of its own: no task's outcome lies there
_CONTENT_LIMIT = 64
# The largest resident set among the command's processes in KiB, and bytes on the
# writable disk when it has ended.  A user who may not write there is not measured.
_METER = f"""\
import os, resource, sys
pid = os.posix_spawn("/bin/bash", ["bash", "-c", sys.argv[1]], os.environ)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
disk = os.statvfs("/")
used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
try:
    with open("{_LEFT_AT}", "w") as handle:
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, used, file=handle)
except OSError:
    pass
os._exit(code if code >= 0 else 128 - code)
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """MiB: the largest process's resident set, and the disk when the command had ended."""

    memory_mb: float
    disk_mb: float


def metered(env: BaseEnvironment, command: str) -> str:
    """`command`, measured where `env` is a local sandbox and /usr has a Python."""
    if not isinstance(env, BubblewrapEnvironment):
        return command
    python = next((path for path in SYSTEM_PYTHONS if os.access(path, os.X_OK)), None)
    if python is None:
        return command
    return f"exec {python} -I -S -c {shlex.quote(_METER)} {shlex.quote(command)}"


async def read_usage(env: BaseEnvironment) -> Usage | None:
    """What the last metered command left, None if it left nothing.

    Raises:
        SandboxError: the sandbox is gone.
    """
    if not isinstance(env, BubblewrapEnvironment):
        return None
    content = await env.read_file(_LEFT_AT, _CONTENT_LIMIT)
    try:
        memory_kib, disk_bytes = (int(field) for field in (content or b"").split())
    except ValueError:
        return None
    return Usage(memory_kib / (1 << 10), disk_bytes / (1 << 20))
