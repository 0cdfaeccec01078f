"""What the harness needs of a sandbox: run one command, bounded.

Invariants:
- `run` always returns within its limit plus a small grace: a command that is
  still running then has been killed with all that it started, what it printed
  so far is returned, and its exit code is 124.
- `run` never raises for anything the command did; `SandboxError` means that the
  sandbox itself is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

EXIT_TIMED_OUT = 124


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command printed and returned.

    Attributes:
        output: standard output and error, interleaved as printed; invalid UTF-8
            is replaced; cut in the middle when longer than the limit, with the
            number of bytes that were cut in its place.
        exit_code: the shell's status; 124 when it was stopped at its limit.
    """

    output: str
    exit_code: int


class Shell(Protocol):
    """Runs commands in one sandbox, in the task's working directory."""

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        """Run `command` with bash for at most `timeout_s` seconds.

        Raises:
            SandboxError: the sandbox is gone.
        """
        ...
