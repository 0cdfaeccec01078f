"""Death and failure at a chosen file operation, on real files.

Every change that a program makes on the disk through `os` is counted; the `at`-th
one goes wrong.  A write that goes wrong leaves half of its bytes behind, as a torn
write does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

CHANGES = ("open", "write", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir")
# error: one operation fails, and the program may tidy up.
# dead: it and every later one fail, so that nothing is tidied up.
# kill: the process is gone at that moment; no `finally` runs.
Mode = Literal["error", "dead", "kill"]
MODES: tuple[Mode, ...] = ("error", "dead", "kill")
_KILLED = 43  # exit code of a child that died on purpose
_FAILED = 44  # of one whose action raised


class DiskFailure(OSError):
    """The failure that was injected."""


@dataclass
class FaultyDisk:
    """Counts operations; see the module."""

    at: int
    mode: Mode
    calls: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CHANGES:
            patch.setattr(os, name, self._guard(name, getattr(os, name)))
        # Whether bytes survive a power cut can't be seen here, only waited for.
        patch.setattr(os, "fsync", self._guard("fsync", lambda _: None))

    def _guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            count = len(self.calls)
            if count == self.at or (self.mode != "error" and count > self.at):
                if name == "write" and count == self.at:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                if self.mode == "kill":
                    os._exit(_KILLED)
                raise DiskFailure(errno.EIO, "injected", f"operation {count}: {name}")
            return real(*args, **kwargs)

        return call


def operations(action: Callable[[], Any]) -> list[str]:
    """The names of the operations of an undisturbed run of `action`."""
    disk = FaultyDisk(at=0, mode="error")
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        action()
    return disk.calls


def disturb(action: Callable[[], Any], at: int, mode: Mode) -> bool:
    """Run `action`, disturbed at its `at`-th operation; whether it came to its end."""
    if mode == "kill":
        return _in_child(action, at)
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(at, mode).install(patch)
        try:
            action()
        except DiskFailure:
            return False
    return True


def _in_child(action: Callable[[], Any], at: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            FaultyDisk(at, "kill").install(pytest.MonkeyPatch())
            action()
        except BaseException:
            os._exit(_FAILED)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, _KILLED), code
    return code == 0
