"""Files in and out, as a stream of records (path, type, mode, content).

Invariant: only directories and regular files go out; the owner never needs to
follow a path of ours.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat

from sandboxes.guest.layer import load, save
from sandboxes.guest.wire import CHUNK, receive, send

LONGEST_PREFIX = 1024  # folders below such a path stay here: the owner has limits, too
# Nothing there, a link, a socket or a device without a driver: no regular file.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def leads_elsewhere(path: bytes) -> bool:
    """Whether writing to `path` would follow a link or wait for a pipe's reader."""
    return stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFDIR)


def put(conn: _socket.socket) -> None:
    """Write the files, directories and links that arrive, until an empty path.

    Each record is (path, type, mode, content); a path is absolute in here.  A
    directory of mode 0 is made if need be, and left as it is if it is there.
    """
    os.umask(0o022)
    while True:
        path, kind, mode, content = receive(conn)
        if not path:
            break
        if kind == b"d":
            os.makedirs(path, exist_ok=True)
            if int(mode, 8):
                os.chmod(path, int(mode, 8))
            continue
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        if kind == b"l":
            if os.path.lexists(path):
                os.unlink(path)
            os.symlink(content, path)
            continue
        if kind == b"f" and os.path.lexists(path) and leads_elsewhere(path):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if kind == b"a" else os.O_TRUNC)
        handle = os.open(path, flags, 0o644)
        while content:
            content = content[os.write(handle, content) :]
        os.fchmod(handle, int(mode, 8))
        os.close(handle)
    send(conn, b"", b"", b"", b"")


def send_file(conn: _socket.socket, path: bytes, name: bytes) -> None:
    """Send one regular file in pieces."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError("not a regular file")
        send(conn, name, b"f", oct(info.st_mode & 0o777)[2:].encode(), b"")
        while data := os.read(handle, CHUNK * 4):
            send(conn, name, b"a", b"", data)
    finally:
        os.close(handle)


def look(conn: _socket.socket, path: bytes, limit: int) -> None:
    """Send the first `limit` bytes of a regular file that is no link, if there is one."""
    content, found = b"", False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
    else:
        try:
            found = stat.S_ISREG(os.fstat(handle).st_mode)
            while found and len(content) < limit and (data := os.read(handle, limit)):
                content += data
        finally:
            os.close(handle)
    send(conn, b"found" if found else b"", b"", b"", content[:limit])


def get(conn: _socket.socket, root: bytes, whole: bool) -> None:
    """Send a file, or a directory's directories and regular files."""
    if not whole:
        send_file(conn, root, b"file")
    elif not os.path.isdir(root):
        raise OSError("not a directory")
    else:
        for base, dirs, files in os.walk(root):
            inner = base[len(root) :].lstrip(b"/")
            prefix = inner + b"/" if inner else b""
            for name in dirs:
                if not os.path.islink(os.path.join(base, name)):
                    send(conn, prefix + name, b"d", b"", b"")
            if len(prefix) > LONGEST_PREFIX:
                dirs.clear()
            for name in files:
                path = os.path.join(base, name)
                if stat.S_ISREG(os.lstat(path).st_mode):
                    send_file(conn, path, prefix + name)
                else:
                    send(conn, prefix + name, b"x", b"", b"")
    send(conn, b"", b"", b"", b"")


def serve(conn: _socket.socket, request: list[bytes]) -> bool:
    """Do one transfer; False if it failed, which the owner has been told."""
    try:
        if request[0] in (b"put", b"fill"):
            put(conn)
        elif request[0] == b"load":
            load(conn)
        elif request[0] == b"save":
            save(conn)
        elif request[0] == b"look":
            look(conn, request[1], int(request[2]))
        else:
            get(conn, request[1], request[2] == b"1")
    except (OSError, ValueError) as error:
        send(conn, b"", b"error", str(error).encode(), b"")
        return False
    return True


def in_child(conn: _socket.socket, request: list[bytes]) -> None:
    """Serve a transfer in a child, so that it can't delay commands."""
    if os.fork():
        return
    done = False
    try:
        done = serve(conn, request)
    finally:
        os._exit(0 if done else 1)
