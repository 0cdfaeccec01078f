"""One output pipe of a command, cut to head and tail.

Invariants:
- Memory is bounded by the limit, however much is printed, and head, cut count and
  tail account for every byte.
- Reading never waits, whoever holds the other end.
"""

from __future__ import annotations

import os

from sandboxes.guest.wire import CHUNK

DRAIN_LIMIT = 1 << 20  # read at most this after the shell has ended (a pipe holds 64 KiB)


def read_now(fd: int) -> bytes | None:
    """What can be read at once: empty at end of file, None when there is nothing yet."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return None


class Stream:
    """One output pipe: keeps its head and tail, counts the rest."""

    def __init__(self, fd: int, limit: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.head_limit = limit // 2
        self.tail_limit = limit - limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def read(self) -> bool:
        """Take what is there; False at end of file."""
        data = read_now(self.fd)
        if data is None:
            return True
        self.total += len(data)
        room = self.head_limit - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > 2 * self.tail_limit + CHUNK:
            del self.tail[: len(self.tail) - self.tail_limit]
        return bool(data)

    def drain(self) -> None:
        """Take what is left in the pipe without waiting for a writer."""
        start, before = self.total, -1
        while before < self.total < start + DRAIN_LIMIT:
            before = self.total
            self.read()

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Head, number of bytes cut, tail."""
        tail = bytes(self.tail[max(0, len(self.tail) - self.tail_limit) :])
        cut = self.total - len(self.head) - len(tail)
        return bytes(self.head), str(cut).encode(), tail
