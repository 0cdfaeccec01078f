"""Rows to files: Parquet, and the same rows as zstandard-compressed JSON Lines.

Invariants:
- Rows come out in the order in which they went in, each in one shard of each format.
- At most one row group is held in memory, and it is bounded in bytes.
- A shard is at most `shard_bytes` long, unless a single row group is longer.
- Files are hashed as they are written and synced before they are closed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pydantic_core import to_json

from rl.evidence.dataset.manifest import FileEntry
from rl.evidence.dataset.schema import (
    SETS,
    ArrowBatch,
    ArrowSchema,
    ArrowType,
    Field,
    SetName,
    Split,
    arrow_schema,
)
from rl.files import disk_errors, write_all

DEFAULT_SHARD_BYTES: Final = 256 << 20
# Large enough that a column compresses well; as Python objects it is about six times that.
GROUP_BYTES: Final = 4 << 20
_JSON_LEVEL: Final = 1  # 3 takes half as long again and saves a tenth
_NUMBER_BYTES: Final = 8


class HashedFile:
    """A new file that is written once from start to end, and hashed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        self._digest = hashlib.sha256()
        self._written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, data: Any) -> int:
        """Write all of `data`, bytes or what has them."""
        view = memoryview(data)
        with disk_errors(self.path):
            write_all(self._descriptor, cast(bytes, view))  # what it does with bytes is a view
        self._digest.update(view)
        self._written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return self._written

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Sync and close; closing twice is no error."""
        if not self.closed:
            self.closed = True
            with disk_errors(self.path):
                try:
                    os.fsync(self._descriptor)
                finally:
                    os.close(self._descriptor)

    @property
    def sha256(self) -> str:
        """Of what was written so far."""
        return self._digest.hexdigest()


class ParquetShard:
    """One Parquet file in the making."""

    def __init__(self, path: Path, name: SetName) -> None:
        self.file = HashedFile(path)
        self._writer = parquet_writer(self.file, name)

    def write(self, batch: ArrowBatch) -> None:
        """Append a row group."""
        self._writer.write_batch(batch, row_group_size=max(1, batch.num_rows))

    def finish(self) -> None:
        """Write the footer and close."""
        self._writer.close()
        self.file.close()


class JsonShard:
    """One file of compressed JSON Lines in the making: one frame, so every tool reads it."""

    def __init__(self, path: Path) -> None:
        self.file = HashedFile(path)
        compressor = zstandard.ZstdCompressor(level=_JSON_LEVEL, write_checksum=True)
        self._frame = compressor.compressobj()

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows, and bring them to the file."""
        for row in rows:
            self.file.write(self._frame.compress(to_json(row, inf_nan_mode="constants") + b"\n"))
        self.file.write(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

    def finish(self) -> None:
        """End the frame and close."""
        self.file.write(self._frame.flush())
        self.file.close()


@dataclass(slots=True)
class SplitWriter:
    """Writes the rows of one split of one set.

    Attributes:
        root: the dataset's directory.
        name: the set.
        split: of the set.
        shard_bytes: most bytes of a file.
        lines: whether to write JSON Lines as well.
        rows: how many were added.
        memory_bytes: what they take in Arrow's memory, as far as they are written.
        files: the finished ones, by path relative to `root`; complete after `finish`.
    """

    root: Path
    name: SetName
    split: Split
    shard_bytes: int = DEFAULT_SHARD_BYTES
    lines: bool = True
    rows: int = 0
    memory_bytes: int = 0
    files: dict[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    _schema: ArrowSchema = field(init=False)
    _held: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _held_bytes: int = 0
    _shard_rows: list[int] = field(default_factory=list[int])
    _open: tuple[ParquetShard, JsonShard | None] | None = None
    _closed: list[tuple[ParquetShard, JsonShard | None]] = field(
        default_factory=list[tuple[ParquetShard, "JsonShard | None"]]
    )

    def __post_init__(self) -> None:
        """Fix the columns."""
        self._schema = arrow_schema(self.name)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row.

        Raises:
            InfrastructureError: the disk is full or failed.
        """
        self._held.append(row)
        self._held_bytes += weight(row)
        self.rows += 1
        if self._held_bytes >= min(GROUP_BYTES, self.shard_bytes):
            self._flush()

    def finish(self) -> None:
        """Write what is held, close the last shard, and give all their final names.

        Raises:
            InfrastructureError: the disk is full or failed.
        """
        if self._held:
            self._flush()
        self._close_shard()
        count = len(self._closed)
        for index, (shards, rows) in enumerate(zip(self._closed, self._shard_rows, strict=True)):
            for kind, shard in zip(("parquet", "lines"), shards, strict=True):
                if shard is None:
                    continue
                final = self.root / shard_path(self.name, self.split, index, count, kind == "lines")
                with disk_errors(final):
                    shard.file.path.rename(final)
                self.files[final.relative_to(self.root).as_posix()] = FileEntry(
                    sha256=shard.file.sha256, bytes=shard.file.tell(), rows=rows
                )

    def _flush(self) -> None:
        """Write the rows that are held, as one row group."""
        batch = record_batch(self._held, self._schema)
        if self._open is not None and any(
            shard is not None and shard.file.tell() + self._held_bytes > self.shard_bytes
            for shard in self._open
        ):
            self._close_shard()
        parquet, lines = self._open or self._open_shard()
        parquet.write(batch)
        if lines is not None:
            lines.write(self._held)
        self._shard_rows[-1] += len(self._held)
        self.memory_bytes += batch.nbytes
        self._held, self._held_bytes = [], 0

    def _open_shard(self) -> tuple[ParquetShard, JsonShard | None]:
        index = len(self._closed)
        parquet, lines = (
            self.root / f"{shard_path(self.name, self.split, index, None, lines)}.part"
            for lines in (False, True)
        )
        self._open = (
            ParquetShard(parquet, self.name),
            JsonShard(lines) if self.lines else None,
        )
        self._shard_rows.append(0)
        return self._open

    def _close_shard(self) -> None:
        if self._open is not None:
            for shard in self._open:
                if shard is not None:
                    shard.finish()
            self._closed.append(self._open)
            self._open = None


def shard_path(name: SetName, split: Split, index: int, count: int | None, lines: bool) -> str:
    """Where a shard lies in the dataset's directory; `count` None: not known yet."""
    of = "" if count is None else f"-of-{count:05d}"
    folder = "jsonl" if lines and name == "episodes" else f"{name}"
    return f"data/{folder}/{split}-{index:05d}{of}.{'jsonl.zst' if lines else 'parquet'}"


def record_batch(rows: Sequence[dict[str, Any]], schema: ArrowSchema) -> ArrowBatch:
    """Rows as columns of exactly these types."""
    columns = [
        pa.array([row[column.name] for row in rows], type=column.type)  # by column: no inference
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def parquet_writer(sink: Any, name: SetName) -> pq.ParquetWriter:
    """A writer with the encodings that suit a set's columns.

    Dictionaries where values recur; everything else is compressed alone, and the bytes of
    floats apart, since those of logprobs have much in common.
    """
    repeated: Any = []
    floats: Any = []
    for path, column in _leaves(SETS[name]):
        if column.repeated:
            repeated.append(path)
        elif pa.types.is_floating(_scalar(column.kind)):
            floats.append(path)
    return pq.ParquetWriter(
        sink,
        arrow_schema(name),
        compression="zstd",
        use_dictionary=repeated,
        use_byte_stream_split=floats,
        write_page_index=True,
    )


def weight(value: Any) -> int:
    """Roughly how many bytes a value takes as columns."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(weight, value.values()))
    if isinstance(value, list):
        if value and not isinstance(value[0], str | dict | list):
            return _NUMBER_BYTES * len(value)
        return sum(map(weight, value))
    return _NUMBER_BYTES


def _leaves(fields: Sequence[Field], prefix: str = "") -> list[tuple[str, Field]]:
    """Every field that holds values, by its path in a Parquet file."""
    found: list[tuple[str, Field]] = []
    for column in fields:
        path = prefix + column.name
        if column.fields:
            found += _leaves(column.fields, f"{path}.list.element.")
        else:
            found.append((path if not _is_list(column) else f"{path}.list.element", column))
    return found


def _is_list(column: Field) -> bool:
    return pa.types.is_list(column.kind)


def _scalar(kind: ArrowType) -> ArrowType:
    return kind.value_type if pa.types.is_list(kind) else kind
