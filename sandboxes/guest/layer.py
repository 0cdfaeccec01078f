"""The writable file system as one stream of records, and back: what build steps left.

Invariants:
- The disk, /etc and grading's mounts go out; /dev/shm and /proc belong to one sandbox.
- Holes stay holes, so a layer is never larger than what its files occupy.
- Owners, modes, times and hard links come back as they were; devices and sockets
  do not go out, as no build step can make the one and nothing can use the other.

A record is (path, kind, numbers, content): `d` and `l` and `p` are a directory, a
link and a named pipe, `f` a file that `a` records fill at an offset, `h` a further
name of a file.  Numbers are mode, owner, group, time in ns, and size; or the offset.
"""

from __future__ import annotations

import _socket
import os
import stat

from sandboxes.guest.wire import CHUNK, receive, send

PIECE = CHUNK * 4
LAYER_PLACES = (b"/", b"/etc", b"/logs", b"/tests", b"/solution")
END = (b"", b"", b"", b"")


def numbers(info: os.stat_result) -> bytes:
    """What a record says of a file."""
    mode = stat.S_IMODE(info.st_mode)
    return f"{mode} {info.st_uid} {info.st_gid} {info.st_mtime_ns} {info.st_size}".encode()


def save_data(conn: _socket.socket, path: bytes, size: int) -> None:
    """Send what a file holds, without its holes."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    at = 0
    try:
        while at < size:
            try:
                at = os.lseek(handle, at, os.SEEK_DATA)
            except OSError:
                break  # nothing but a hole is left
            end = os.lseek(handle, at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(handle, min(PIECE, end - at), at)
                if not data:
                    return
                send(conn, path, b"a", str(at).encode(), data)
                at += len(data)
    finally:
        os.close(handle)


def save_one(conn: _socket.socket, path: bytes, names: dict[tuple[int, int], bytes]) -> None:
    """Send one file of any type that a layer holds."""
    info = os.lstat(path)
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFLNK:
        send(conn, path, b"l", numbers(info), os.readlink(path))
    elif kind == stat.S_IFIFO:
        send(conn, path, b"p", numbers(info), b"")
    elif kind == stat.S_IFREG:
        first = names.setdefault((info.st_dev, info.st_ino), path)
        if first != path:
            send(conn, path, b"h", numbers(info), first)
            return
        send(conn, path, b"f", numbers(info), b"")
        save_data(conn, path, info.st_size)


def save(conn: _socket.socket) -> None:
    """Send the layer: parents before what is in them."""
    names: dict[tuple[int, int], bytes] = {}
    for place in LAYER_PLACES:
        device = os.stat(place).st_dev
        for base, dirs, files in os.walk(place):
            info = os.lstat(base)
            send(conn, base, b"d", numbers(info), b"")
            inner = [os.path.join(base, name) for name in dirs]
            files += [os.path.basename(path) for path in inner if os.path.islink(path)]
            dirs[:] = [
                os.path.basename(path)
                for path in inner
                if not os.path.islink(path) and os.lstat(path).st_dev == device
            ]
            for name in files:
                path = os.path.join(base, name)
                if os.lstat(path).st_dev == device:
                    save_one(conn, path, names)
    send(conn, *END)


def load_one(path: bytes, kind: bytes, content: bytes) -> None:
    """Make one file, directory, link or pipe."""
    if kind == b"d":
        os.makedirs(path, exist_ok=True)
        return
    if os.path.lexists(path):
        os.unlink(path)
    if kind == b"l":
        os.symlink(content, path)
    elif kind == b"h":
        os.link(content, path, follow_symlinks=False)
    elif kind == b"p":
        os.mkfifo(path)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def load(conn: _socket.socket) -> None:
    """Make what arrives, then give everything its owner, mode and time."""
    made: list[tuple[bytes, bytes, list[int]]] = []
    while True:
        path, kind, fields, content = receive(conn)
        if not path:
            break
        if kind == b"a":
            handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            os.pwrite(handle, content, int(fields))
            os.close(handle)
            continue
        load_one(path, kind, content)
        made.append((path, kind, [int(field) for field in fields.split()]))
    for path, kind, (mode, uid, gid, mtime, size) in reversed(made):
        os.chown(path, uid, gid, follow_symlinks=False)
        if kind == b"f":
            os.truncate(path, size)
        if kind != b"l":
            os.chmod(path, mode)
        os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
    send(conn, *END)
