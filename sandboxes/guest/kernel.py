"""Calls of the C library that Python, from 3.10 on, has no names for.

Invariants:
- An argument is an integer of 32 bits, a byte string, a `Buffer` or None; the result
  is an integer, and `errno` says why it is negative.
- Only the part of ctypes that is written in C is loaded: memory that a process has is
  copied each time it forks.
"""

from __future__ import annotations

import _ctypes
import os

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER = 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000


class Integer(_ctypes._SimpleCData):  # pyright: ignore[reportPrivateUsage, reportMissingTypeArgument]
    """A C int."""

    _type_ = "i"


class Byte(_ctypes._SimpleCData):  # pyright: ignore[reportPrivateUsage, reportMissingTypeArgument]
    """A C char."""

    _type_ = "c"


class Function(_ctypes.CFuncPtr):
    """A function that returns a C int."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = Integer


def function(name: str) -> Function:
    """The C library's function of that name."""
    own = _ctypes.dlopen(None, 0)  # pyright: ignore[reportArgumentType]
    return Function(_ctypes.dlsym(own, name))


def buffer(content: bytes) -> _ctypes.Array[Byte]:
    """A copy of `content` at an address of its own."""
    kind = type("Buffer", (_ctypes.Array,), {"_type_": Byte, "_length_": len(content)})
    return kind.from_buffer_copy(content)  # pyright: ignore[reportAttributeAccessIssue]


prctl, capset, mount = function("prctl"), function("capset"), function("mount")
unshare, setns = function("unshare"), function("setns")
errno, address = _ctypes.get_errno, _ctypes.addressof


def check(result: int, what: str) -> None:
    """Raise OSError if a call has failed."""
    if result < 0:
        raise OSError(errno(), f"{what}: {os.strerror(errno())}")


def overwrite(begin: int, content: bytes) -> None:
    """Put bytes at an address of this process's memory."""
    kind = type("Memory", (_ctypes.Array,), {"_type_": Byte, "_length_": len(content)})
    memoryview(kind.from_address(begin)).cast("B")[:] = content  # pyright: ignore[reportAttributeAccessIssue]
