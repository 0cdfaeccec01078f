"""The wire format between a sandbox's daemon and its owner.

Invariant: a message is a count and that many length-prefixed byte strings
(32-bit, network order); both ends know how many parts a message has.
"""

from __future__ import annotations

import _socket
import struct

CHUNK = 1 << 16


def send(sock: _socket.socket, *parts: bytes) -> None:
    """Send one message."""
    head = struct.pack("!I", len(parts))
    sock.sendall(head + b"".join(struct.pack("!I", len(part)) + part for part in parts))


def receive_exactly(sock: _socket.socket, size: int) -> bytes:
    """Read `size` bytes; EOFError when the peer has gone."""
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(CHUNK, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def receive(sock: _socket.socket) -> list[bytes]:
    """Read one message."""
    (count,) = struct.unpack("!I", receive_exactly(sock, 4))
    parts: list[bytes] = []
    for _ in range(count):
        (size,) = struct.unpack("!I", receive_exactly(sock, 4))
        parts.append(receive_exactly(sock, size))
    return parts
