"""The owner's end of a sandbox's socket: commands, transfers, and the end.

Invariants:
- Every request has a connection of its own, so requests don't wait for each
  other, and giving one up (cancellation, deadline) closes it, upon which the
  daemon kills what it started.
- What comes back is untrusted data: sizes are bounded before they are read,
  and nothing in it is ever interpreted but numbers and bytes.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

from rl.errors import SandboxError

REPLY_GRACE_S = 20.0  # killing a tree (5 s) and sending its output, on a busy machine
TRANSFER_TIMEOUT_S = 120.0
GREETING_BYTES = 8192
BATCH_BYTES = 1 << 18
MAX_PARTS = 64
MAX_PART_BYTES = 64 << 20  # above any output limit and any transfer piece

Entry = tuple[str, str, int, bytes]
"""One thing to write: absolute path, type (d, f, a: append, l), mode, content."""


@dataclass(frozen=True, slots=True)
class Output:
    """One stream as the daemon kept it."""

    head: bytes
    cut: int
    tail: bytes

    def text(self) -> str:
        """As text, with the number of cut bytes in their place."""
        if not self.cut:
            return (self.head + self.tail).decode("utf-8", errors="replace")
        head = self.head.decode("utf-8", errors="replace")
        tail = self.tail.decode("utf-8", errors="replace")
        return f"{head}\n[... {self.cut} bytes cut ...]\n{tail}"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended; `streams` has one entry if they were merged, else two."""

    exit_code: int
    timed_out: bool
    streams: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One command to run."""

    command: str
    cwd: str
    user: str
    env: dict[str, str]
    rlimits: str
    timeout_s: float
    output_limit: int
    merged: bool

    def parts(self) -> list[bytes]:
        """The wire form."""
        return [
            b"exec",
            self.command.encode("utf-8", errors="replace"),
            self.cwd.encode(),
            self.user.encode(),
            self.rlimits.encode(),
            str(self.timeout_s).encode(),
            f"{self.output_limit} {int(self.merged)}".encode(),
            *(
                f"{key}={value}".encode("utf-8", errors="replace")
                for key, value in self.env.items()
            ),
        ]


def frame(parts: Iterable[bytes]) -> bytes:
    """One message on the wire."""
    items = list(parts)
    body = b"".join(struct.pack("!I", len(item)) + item for item in items)
    return struct.pack("!I", len(items)) + body


def _batches(entries: Iterable[Entry]) -> Iterator[bytearray]:
    """Their frames and an empty one behind them, small ones joined to one send."""
    batch = bytearray()
    for path, kind, mode, content in entries:
        batch += frame([path.encode(), kind.encode(), f"{mode:o}".encode(), content])
        if len(batch) >= BATCH_BYTES:
            yield batch
            batch = bytearray()
    batch += frame([b"", b"", b"", b""])
    yield batch


class Channel:
    """Requests to one sandbox's daemon."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._closed = False

    async def ready(self) -> str:
        """Wait for the daemon's greeting, or for why there is none; empty when it has died."""
        loop = asyncio.get_running_loop()
        try:
            return (await loop.sock_recv(self._control, GREETING_BYTES)).decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Let go of the daemon, which ends the sandbox."""
        self._closed = True
        self._control.close()

    async def run(self, request: Request) -> Finished:
        """Run one command to its end or its limit.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """
        if "\0" in request.command or any("\0" in item for item in request.env.values()):
            text = b"sandbox: a NUL byte cannot be part of a command\n"
            return Finished(126, False, (Output(text, 0, b""), Output(b"", 0, b""))[:2])
        async with self._connection(request.timeout_s + REPLY_GRACE_S, "run a command") as sock:
            await _send(sock, request.parts())
            parts = await _receive(sock)
        streams = tuple(
            Output(parts[at], int(parts[at + 1]), parts[at + 2]) for at in range(2, len(parts), 3)
        )
        return Finished(int(parts[0]), parts[1] == b"1", streams)

    async def kill_all(self) -> None:
        """End every process of the sandbox but its daemon."""
        async with self._connection(REPLY_GRACE_S, "kill all processes") as sock:
            await _send(sock, [b"kill"])
            if (await _receive(sock))[0] != b"ok":
                raise SandboxError("processes are left that cannot be killed")

    async def put(self, entries: Iterable[Entry], fresh: bool = False) -> None:
        """Write files, directories and links; nothing runs yet in a `fresh` sandbox."""
        async with self._connection(TRANSFER_TIMEOUT_S, "upload") as sock:
            await _send(sock, [b"fill" if fresh else b"put"])
            try:
                for batch in _batches(entries):
                    await asyncio.get_running_loop().sock_sendall(sock, batch)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the daemon refused midway; its reply says why
            _check(await _receive(sock), "upload")

    async def get(self, path: str, whole: bool) -> AsyncGenerator[tuple[bytes, str, int, bytes]]:
        """Read a file, or a directory's files: relative path, type, mode, content."""
        async with self._connection(TRANSFER_TIMEOUT_S, "download") as sock:
            await _send(sock, [b"get", path.encode(), b"1" if whole else b"0"])
            while True:
                parts = await _receive(sock)
                if len(parts) != 4:
                    raise SandboxError("a download is not well-formed", path)
                if not parts[0]:
                    _check(parts, f"download {path}")
                    return
                yield parts[0], parts[1].decode(), int(parts[2] or b"0", 8) & 0o777, parts[3]

    async def look(self, path: str, limit: int) -> bytes | None:
        """The first `limit` bytes of a regular file that is no link, None if there is none."""
        async with self._connection(TRANSFER_TIMEOUT_S, "read a file") as sock:
            await _send(sock, [b"look", path.encode(), str(limit).encode()])
            found = await _receive(sock)
        _check(found, f"read {path}")
        return found[3] if found[0] else None

    async def save(self, limit: int) -> bytes | None:
        """The writable file system as a layer; None if it has more than `limit` bytes.

        Raises:
            SandboxError: it could not be read.
        """
        layer = bytearray()
        async with self._connection(TRANSFER_TIMEOUT_S, "save the layer") as sock:
            await _send(sock, [b"save"])
            while True:
                parts = await _receive(sock)
                if len(parts) != 4:
                    raise SandboxError("a layer is not well-formed")
                if not parts[0]:
                    _check(parts, "save the layer")
                    return bytes(layer + frame(parts))
                layer += frame(parts)
                if len(layer) > limit:
                    return None

    async def load(self, layer: bytes) -> None:
        """Write a layer that `save` returned into a fresh sandbox.

        Raises:
            SandboxError: it does not fit, or is no layer.
        """
        async with self._connection(TRANSFER_TIMEOUT_S, "load the layer") as sock:
            await _send(sock, [b"load"])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its reply says why
                await asyncio.get_running_loop().sock_sendall(sock, layer)
            _check(await _receive(sock), "load the layer")

    @contextlib.asynccontextmanager
    async def _connection(self, limit_s: float, what: str) -> AsyncGenerator[socket.socket]:
        """A fresh connection for one request, closed whatever happens."""
        if self._closed:
            raise SandboxError(f"cannot {what}: the sandbox has been stopped")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.setblocking(False)
            async with asyncio.timeout(limit_s):
                await self._pass(theirs)
                theirs.close()  # or we would not notice that the daemon lets go of it
                yield ours
        except TimeoutError:
            raise SandboxError(f"cannot {what}: no answer within {limit_s:.0f} s") from None
        except (OSError, EOFError) as error:
            raise SandboxError(f"cannot {what}: the sandbox is gone ({error!r})") from None
        finally:
            theirs.close()
            ours.close()

    async def _pass(self, theirs: socket.socket) -> None:
        """Hand one end to the daemon; waits only while its queue is full."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        pause = 0.001
        while True:
            try:
                self._control.sendmsg([b"c"], rights)
                return
            except BlockingIOError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.1)


def _check(parts: list[bytes], what: str) -> None:
    if len(parts) == 4 and parts[1] == b"error":
        raise SandboxError(f"cannot {what}: {parts[2].decode('utf-8', errors='replace')}")


async def _send(sock: socket.socket, parts: Iterable[bytes]) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, frame(parts))


async def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        chunk = await loop.sock_recv(sock, min(1 << 18, size - len(data)))
        if not chunk:
            raise EOFError("connection closed")
        data += chunk
    return bytes(data)


async def _receive(sock: socket.socket) -> list[bytes]:
    (count,) = struct.unpack("!I", await _receive_exactly(sock, 4))
    if count > MAX_PARTS:
        raise SandboxError(f"an answer of {count} parts is not well-formed")
    parts: list[bytes] = []
    for _ in range(count):
        (size,) = struct.unpack("!I", await _receive_exactly(sock, 4))
        if size > MAX_PART_BYTES:
            raise SandboxError(f"an answer of {size} bytes is not well-formed")
        parts.append(await _receive_exactly(sock, size) if size else b"")
    return parts
