"""One output pipe of a command, cut to head and tail.

Invariant: memory is bounded by the limit, however much is printed, and head,
cut count and tail account for every byte.
"""

from __future__ import annotations

import os

from sandboxes.guest.wire import CHUNK

DRAIN_LIMIT = 1 << 20  # read at most this after the shell has ended (a pipe holds 64 KiB)


class Stream:
    """One output pipe: keeps its head and tail, counts the rest."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.head_limit = limit // 2
        self.tail_limit = limit - limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def read(self) -> bool:
        """Take what is there; False at end of file."""
        data = os.read(self.fd, CHUNK)
        self.total += len(data)
        room = self.head_limit - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > 2 * self.tail_limit + CHUNK:
            del self.tail[: len(self.tail) - self.tail_limit]
        return bool(data)

    def drain(self) -> None:
        """Take what is left in the pipe without waiting for a writer."""
        os.set_blocking(self.fd, False)
        start = self.total
        try:
            while self.total - start < DRAIN_LIMIT and self.read():
                pass
        except BlockingIOError:
            pass

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Head, number of bytes cut, tail."""
        tail = bytes(self.tail[max(0, len(self.tail) - self.tail_limit) :])
        cut = self.total - len(self.head) - len(tail)
        return bytes(self.head), str(cut).encode(), tail
