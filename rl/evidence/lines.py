"""Append-only JSON Lines of one record type.

Invariants:
- A row is one line and ends with a newline; a file whose last byte is no
  newline has a torn tail, which holds no whole row.
- Nothing is appended behind a torn tail: `repair` cuts it off first.
- A row that can't be read is an `EvidenceError` that names the file and line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from rl.errors import EvidenceError, first_problem
from rl.files import append_bytes, disk_errors, read_errors, sync_directory

_TAIL_BLOCK_BYTES = 1 << 16  # read backwards in blocks: a tail is short, a file may not be


@dataclass(frozen=True, slots=True)
class JsonLines[RowT: BaseModel]:
    """The rows of one file; one process appends, any may read."""

    path: Path
    row: type[RowT]

    def append(self, row: RowT, *, sync: bool = True) -> None:
        """Append `row`; when `sync`, it is on disk when this returns.

        Raises:
            EvidenceError: the file has a torn tail.
            InfrastructureError: the disk is full or failed; nothing was appended.
        """
        fresh = not self.path.exists()
        with disk_errors(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if torn_bytes(descriptor):
                raise EvidenceError("its last row is torn", str(self.path), "repair it first")
            append_bytes(descriptor, self.path, row.model_dump_json().encode() + b"\n", sync=sync)
        finally:
            os.close(descriptor)
        if fresh and sync:
            sync_directory(self.path.parent)

    def read(self, *, live: bool = False) -> list[RowT]:
        """All rows; none if the file is absent.

        Args:
            live: the writer may be in the middle of a row: leave a torn tail out.

        Raises:
            EvidenceError: a row is no valid record, the tail is torn, or the file
                can't be read.
        """
        with read_errors(self.path):
            if not self.path.exists():
                return []
            *lines, tail = self.path.read_bytes().split(b"\n")
        if tail and not live:
            raise EvidenceError(
                f"its last row is torn: {len(tail)} bytes without an end",
                f"{self.path}:{len(lines) + 1}",
                "resume the campaign, which repairs it",
            )
        return [self._parse(line, number) for number, line in enumerate(lines, start=1)]

    def repair(self) -> int:
        """Cut a torn tail off; returns the number of bytes cut."""
        if not self.path.exists():
            return 0
        with disk_errors(self.path):
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                torn = torn_bytes(descriptor)
                if torn:
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - torn)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return torn

    def _parse(self, line: bytes, number: int) -> RowT:
        try:
            return self.row.model_validate_json(line)
        except ValidationError as error:
            raise EvidenceError(
                f"not a valid {self.row.__name__}: {first_problem(error)}",
                f"{self.path}:{number}",
                "restore the file from an archive",
            ) from None


def torn_bytes(descriptor: int) -> int:
    """Bytes after the last newline of an open file."""
    end = size = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _TAIL_BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return size - (start + found + 1)
        end = start
    return size
