"""Episode records on disk: zstandard-compressed JSON Lines.

Invariants:
- A record is one line in one zstd frame of its own, with a checksum; the file
  is a concatenation of frames, so `zstd -dc` reads it too.
- A frame is on disk when `append` returns; a crash can only tear the last one.
- A torn tail is found by decoding, never guessed: `repair` cuts exactly what
  follows the last whole frame, and refuses when a whole frame lies behind the
  damage, because that is corruption and not a crash.
- One writer at a time, held by a file lock; readers need none.
- Records of an unknown schema version are refused, not skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zstandard
from pydantic import ValidationError
from pydantic_core import from_json

from rl.errors import EvidenceError, first_problem
from rl.files import append_bytes, disk_errors, read_errors, sync_directory
from rl.records import SCHEMA_VERSION, EpisodeRecord

_LEVEL = 6  # token lists shrink 3.5 times at 6; higher levels gain under 5%
_CHUNK_BYTES = 1 << 17
_RESTORE = "restore the file from an archive"
_MAGIC = b"\x28\xb5\x2f\xfd"

type _Read = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame."""

    index: int
    offset: int
    end: int
    data: bytes

    @property
    def sha256(self) -> str:
        """The digest of the record's line, as its `ended` event has it."""
        return hashlib.sha256(self.data).hexdigest()


class TornTraceError(EvidenceError):
    """A trace ends in the middle of a record, as after a crash."""


class TraceWriter:
    """Appends episode records durably.

    Raises:
        TornTraceError: the file ends in a torn record; `repair` it first.
        EvidenceError: another process is writing the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True
        )
        fresh = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with disk_errors(path):
            self._descriptor = os.open(path, flags, 0o644)
        try:
            self._lock()
            self.records = sum(1 for _ in read_frames(path))
            if fresh:
                sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, record: EpisodeRecord) -> str:
        """Append `record`; it is on disk when this returns, with the sha256 of its line.

        Raises:
            InfrastructureError: the disk is full or failed; nothing was appended.
        """
        line = record.model_dump_json().encode() + b"\n"
        append_bytes(self._descriptor, self.path, self._compressor.compress(line))
        self.records += 1
        return hashlib.sha256(line).hexdigest()

    def close(self) -> None:
        """Release the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvidenceError(
                "another process is writing this trace",
                str(self.path),
                "stop the other run, or choose another --run-id",
            ) from None


def read_traces(path: Path, *, live: bool = False) -> Iterator[EpisodeRecord]:
    """The records of a trace, one at a time.

    Args:
        path: the trace; a missing file has no records.
        live: the writer may be in the middle of a record: leave a torn tail out.

    Raises:
        TornTraceError: after the last whole record, when the tail is torn.
        EvidenceError: a record is damaged, of an unknown version, or invalid.
    """
    for frame in read_frames(path, live=live):
        yield parse_record(frame, path)


def read_frames(path: Path, *, live: bool = False) -> Iterator[Frame]:
    """The frames of a trace, decoded but not parsed; raises as `read_traces` does."""
    with read_errors(path):
        if not path.exists():
            return
        yield from _read_frames(path, live=live)


def _read_frames(path: Path, *, live: bool) -> Iterator[Frame]:
    with path.open("rb") as file:
        buffer, offset, index = file.read(_CHUNK_BYTES), 0, 0
        while buffer:
            problem = "it has no end"
            try:
                data, buffer = _next_frame(file.read, buffer)
            except zstandard.ZstdError as error:
                data, problem = None, str(error)
            if data is None:
                _refuse_damage(path, offset, index, problem)
                if live:
                    return
                raise TornTraceError(
                    f"torn after record {index}: {path.stat().st_size - offset} bytes "
                    "hold no whole record",
                    f"{path} at byte {offset}",
                    "resume the campaign, which repairs it",
                )
            end = file.tell() - len(buffer)
            yield Frame(index, offset, end, data)
            buffer = buffer or file.read(_CHUNK_BYTES)
            offset, index = end, index + 1


def parse_record(frame: Frame, path: Path) -> EpisodeRecord:
    """The episode record in a frame.

    Raises:
        EvidenceError: its version is unknown, or it is no valid record.
    """
    problem = "it has no schema_version"
    try:
        record = EpisodeRecord.model_validate_json(frame.data)
    except ValidationError as error:
        problem = first_problem(error)
    else:
        if "schema_version" in record.model_fields_set:  # by default it would be the present one
            return record
    where = f"{path} record {frame.index + 1}"
    try:
        raw = from_json(frame.data)
    except ValueError as error:
        raise EvidenceError(f"not JSON: {error}", where, _RESTORE) from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise EvidenceError(
            f"schema version {version!r} is unknown; this program reads {SCHEMA_VERSION}",
            where,
            "read it with the version of the project that wrote it",
        )
    raise EvidenceError(f"not a valid episode record: {problem}", where, _RESTORE)


def repair(path: Path) -> int:
    """Cut a torn tail off a trace; returns the number of bytes cut.

    Raises:
        EvidenceError: the damage is not at the end, so cutting would lose records.
    """
    if not path.exists():
        return 0
    end = 0
    for frame in read_frames(path, live=True):
        end = frame.end
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            torn = os.fstat(descriptor).st_size - end
            if torn:
                os.ftruncate(descriptor, end)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return torn


def _next_frame(read: _Read, buffer: bytes) -> tuple[bytes | None, bytes]:
    """Decode one frame from `buffer` and what follows it; None when it has no end."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    parts: list[bytes] = []
    while True:
        parts.append(decoder.decompress(buffer))
        if decoder.eof:
            return b"".join(parts), decoder.unused_data
        buffer = read(_CHUNK_BYTES)
        if not buffer:
            return None, b""


def _refuse_damage(path: Path, offset: int, index: int, problem: str) -> None:
    """Raise if whole records lie behind the bad one: that is no torn tail."""
    if _whole_frame_behind(path, offset + 1):
        raise EvidenceError(
            f"record {index + 1} is damaged ({problem}), and whole records follow it",
            f"{path} at byte {offset}",
            _RESTORE,
        )


def _whole_frame_behind(path: Path, start: int) -> bool:
    """Whether a whole frame begins anywhere at or behind byte `start`."""
    data = path.read_bytes()
    found = data.find(_MAGIC, start)
    while found >= 0:
        try:
            decoder = zstandard.ZstdDecompressor().decompressobj()
            decoder.decompress(data[found:])
            if decoder.eof:
                return True
        except zstandard.ZstdError:  # chance bytes that look like a frame: keep looking
            pass
        found = data.find(_MAGIC, found + 1)
    return False
