"""Where zstandard frames begin and end, by their headers alone.

Invariant: nothing is decompressed, so a large file is walked in milliseconds; whether a
frame's content is right, only decompressing it tells.
"""

from __future__ import annotations

import os
from pathlib import Path

import zstandard

_MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER_BYTES = 18  # of a frame, at most
_LEAST_BYTES = 6  # of a frame's header
_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_CHECKSUM_FLAG = 1 << 2  # in the byte behind the magic number
_RLE = 1  # a block that repeats its one byte


def count_frames(path: Path) -> tuple[int, int]:
    """How many whole frames a file begins with, and the bytes behind the last."""
    frames, end = 0, 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        while (following := _frame_end(descriptor, end, size)) is not None:
            frames, end = frames + 1, following
    finally:
        os.close(descriptor)
    return frames, size - end


def _frame_end(descriptor: int, start: int, size: int) -> int | None:
    """Where the frame that begins at `start` ends; None if it is not whole."""
    head = os.pread(descriptor, _HEADER_BYTES, start)
    if len(head) < _LEAST_BYTES or not head.startswith(_MAGIC):
        return None
    try:
        place = start + zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    last = False
    while not last:
        header = os.pread(descriptor, _BLOCK_HEADER_BYTES, place)
        if len(header) < _BLOCK_HEADER_BYTES:
            return None
        block = int.from_bytes(header, "little")
        last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
        place += _BLOCK_HEADER_BYTES + (1 if kind == _RLE else length)
    place += _CHECKSUM_BYTES if head[4] & _CHECKSUM_FLAG else 0
    return place if place <= size else None
