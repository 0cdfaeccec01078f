"""Durable files: whole or absent, never half-written.

Invariants:
- A reader sees the old content or the new content of a file, never a mixture:
  data goes to a temporary name in the same directory, is synced, and is renamed.
- When a function here returns, the data and its directory entry are on disk.
- When it raises, the temporary file is gone and the target is as it was.
- Every failure to write is an `InfrastructureError` that names the path; what
  `read_errors` guards is an `EvidenceError` that does.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl.errors import EvidenceError, InfrastructureError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HASH_CHUNK_BYTES = 1 << 20  # large enough that hashing, not reading, is what costs


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, durably.

    Raises:
        InfrastructureError: the disk is full or the directory can't be written.
    """
    with disk_errors(path), _temporary(path, data) as temporary:
        temporary.replace(path)
        sync_directory(path.parent)


def write_json(path: Path, value: BaseModel | dict[str, Any] | list[Any]) -> None:
    """Replace the content of `path` by `value` as indented JSON, durably.

    Raises:
        InfrastructureError: the disk is full or the directory can't be written.
    """
    write_bytes(path, json_bytes(value))


def create_exclusive(path: Path, data: bytes) -> None:
    """Create `path` with `data`, durably; of two who try, exactly one succeeds.

    Raises:
        EvidenceError: `path` exists already.
        InfrastructureError: the disk is full or the directory can't be written.
    """
    with disk_errors(path), _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise EvidenceError(
                "exists already and is never overwritten", str(path), "choose another name"
            ) from None
        sync_directory(path.parent)


def json_bytes(value: BaseModel | dict[str, Any] | list[Any]) -> bytes:
    """`value` as indented JSON with a final newline."""
    if isinstance(value, BaseModel):
        return value.model_dump_json(indent=2).encode() + b"\n"
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, hex, in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_files(directory: Path) -> dict[str, str]:
    """sha256 of every regular file under `directory`, by relative POSIX path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def append_bytes(descriptor: int, path: Path, data: bytes, *, sync: bool = True) -> None:
    """Append `data` to the open file `descriptor`, all of it or nothing.

    Raises:
        InfrastructureError: the disk is full or failed; the file is as it was.
    """
    end = os.lseek(descriptor, 0, os.SEEK_END)
    with disk_errors(path):
        try:
            write_all(descriptor, data)
            if sync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, however the kernel splits it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turn the `OSError` of writing `path` into an `InfrastructureError` with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise InfrastructureError(
                "no space left on the device",
                str(path),
                "free some disk space, then run the same command again, a campaign with --resume",
            ) from error
        raise InfrastructureError(
            f"cannot be written: {error.strerror or error}",
            str(path),
            "name a file of its own, in a directory that exists and that this user may write to",
        ) from error


@contextmanager
def read_errors(path: Path) -> Generator[None]:
    """Turn the `OSError` of reading `path` into an `EvidenceError` with a remedy."""
    try:
        yield
    except OSError as error:
        raise EvidenceError(
            f"cannot be read: {(error.strerror or str(error)).lower()}",
            str(path),
            "restore the file from an archive, or correct its permissions",
        ) from error


@contextmanager
def _temporary(path: Path, data: bytes) -> Generator[Path]:
    """A synced file beside `path` that holds `data`, and is gone afterwards."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
