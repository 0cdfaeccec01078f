"""What lies in files and folders: each function returns what is wrong, or nothing.

Invariant: a file is read only if it is regular, no link and not longer than `LIMIT`, so
that no pipe, device or flood holds the verifier.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

LIMIT = 4 << 20
SHOWN = 200
# What reading an outcome raises when it is not as expected.
WRONG = (OSError, ValueError, EOFError, RecursionError)


def text(path: str, content: str) -> str | None:
    """See `expect.text`."""
    return compare_lines(read(path).decode("utf-8"), content)


def unchanged(path: str, wanted: bytes | str, gzipped: bool) -> str | None:
    """See `expect.unchanged`."""
    data = _decompressed(read(path)) if gzipped else read(path)
    same = data == wanted if isinstance(wanted, bytes) else sha256(data) == wanted
    return None if same else "its content is not what it should be"


def absent(path: str) -> str | None:
    """See `expect.absent`."""
    return "is still there" if os.path.lexists(path) else None


def folder(path: str) -> str | None:
    """See `expect.folder`."""
    return None if stat.S_ISDIR(os.lstat(path).st_mode) else "is no directory"


def link(path: str, target: str) -> str | None:
    """See `expect.link`."""
    found = os.readlink(path)
    return None if found.rstrip("/") == target else f"leads to {found}"


def names(path: str, entries: list[str]) -> str | None:
    """See `expect.names`."""
    found: list[str] = []
    for where, folders, files in os.walk(path, onerror=_fail):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files + links]
    if sorted(found) == entries:
        return None
    return f"missing {sorted(set(entries) - set(found))}, extra {sorted(set(found) - set(entries))}"


def mode(path: str, bits: str) -> str | None:
    """See `expect.mode`."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    found = f"{stat.S_IMODE(status.st_mode):04o}"
    return None if found == bits else f"has mode {found}, not {bits}"


def json_value(path: str, value: Any) -> str | None:
    """See `expect.json_value`."""
    import json

    found = json.loads(read(path).decode("utf-8"))
    # As text: in Python, 1 == True.
    same = json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)
    return None if same else "holds another value"


def rows(path: str, table: list[list[str]]) -> str | None:
    """See `expect.rows`."""
    import csv
    import io

    content = io.StringIO(read(path).decode("utf-8"), newline="")
    try:
        found = [row for row in csv.reader(content) if row]
    except csv.Error as error:
        raise ValueError(f"is no CSV: {error}") from None
    if found == table:
        return None
    return f"{len(found)} rows; first that differs: {first_difference(found, table)}"


def read(path: str) -> bytes:
    """The bytes of a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
            raise ValueError("is no regular file, or too long")
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read(LIMIT)
    finally:
        os.close(handle)


def _fail(error: OSError) -> NoReturn:
    raise error


def compare_lines(found: str, wanted: str) -> str | None:
    """What differs; the newline of the last line doesn't count."""
    have, want = found.removesuffix("\n").split("\n"), wanted.removesuffix("\n").split("\n")
    return None if have == want else f"first that differs: {first_difference(have, want)}"


def first_difference(found: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Only what was found: the log may be shown to whoever wrote it."""
    for at, item in enumerate(wanted):
        if at >= len(found) or found[at] != item:
            shown = repr(found[at])[:SHOWN] if at < len(found) else "missing"
            return f"number {at + 1}, {shown}"
    return f"number {len(wanted) + 1} is one too many"


def _decompressed(data: bytes) -> bytes:
    import gzip
    import io
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return stream.read(LIMIT + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None


def sha256(data: bytes) -> str:
    """Its digest, in hexadecimal digits."""
    import hashlib

    return hashlib.sha256(data).hexdigest()
