"""Calls of the C library, by the part of ctypes that is written in C.

Invariants:
- An argument is an integer of 32 bits, a byte string, a `Buffer` or None; the result
  is an integer, and `errno` says why it is negative.
- The package around that part is not loaded: it would take a fifth of a start.
"""

from __future__ import annotations

import _ctypes


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
errno, address = _ctypes.get_errno, _ctypes.addressof
