"""The check of a released dataset: does it hold what its manifest says?

Invariants:
- It needs the directory alone, changes nothing, and stops at no finding.
- No findings means: every file is there and as it was written, none is beside them, both
  formats hold the same rows of the documented types, every row is on its side of the split,
  no task is on both, no text holds what looks like a secret, and the card's header loads
  exactly the files there are.
- Rows are compared a few at a time, however many there are.
- A secret that is found is told of by its kind and place only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pydantic_core import from_json

from rl.errors import EvidenceError
from rl.evidence.dataset.card import read_header
from rl.evidence.dataset.manifest import CARD, MANIFEST, FileEntry, Manifest, read_manifest
from rl.evidence.dataset.rows import SPLITS
from rl.evidence.dataset.schema import SetName, Split, arrow_schema
from rl.evidence.dataset.scrub import Scrubber
from rl.evidence.rows import Finding
from rl.files import sha256_file

_BATCH_ROWS: Final = 64  # episodes are a few hundred kilobytes as Python objects
_CHUNK_BYTES: Final = 1 << 14  # of a compressed file: it may grow a thousandfold
_MOST_OF_A_KIND: Final = 20  # in one file: the rest is told of by number


class Checker:
    """Checks one directory.

    Args:
        root: the dataset's directory.
        scrubber: finds the secrets.

    Raises:
        EvidenceError: the manifest can't be read, so there is nothing to check against.
    """

    def __init__(self, root: Path, scrubber: Scrubber) -> None:
        self._root = root
        self._scrubber = scrubber
        self.manifest: Manifest = read_manifest(root)
        self._digests: dict[Split, set[str]] = {split: set() for split in get_args(Split)}

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, file by file."""
        whole: list[str] = []
        for finding, path in self._check_files():
            if finding is not None:
                yield finding
            else:
                whole.append(path)
        yield from self._extra_files()
        yield from self._check_page(MANIFEST)
        if CARD in whole:
            yield from self._check_page(CARD)
            yield from self._check_card()
        for path in whole:
            if path.endswith(".parquet"):
                yield from _capped(self._check_parquet(path), path)
        yield from self._check_sums()
        for digest in sorted(self._digests["train"] & self._digests["eval"]):
            yield Finding(
                code="leaked-task", where=f"task {digest}", message="is in train and in eval"
            )

    def _check_files(self) -> Iterator[tuple[Finding | None, str]]:
        for name, entry in self.manifest.files.items():
            path = self._root / name
            if not path.is_file():
                yield _finding("missing-file", name, "is in the manifest, and not there"), name
            elif (size := path.stat().st_size) != entry.bytes:
                what = f"has {size} bytes, the manifest says {entry.bytes}"
                yield _finding("changed-file", name, what), name
            elif sha256_file(path) != entry.sha256:
                yield _finding("changed-file", name, "has not the sha256 of the manifest"), name
            else:
                yield None, name

    def _extra_files(self) -> Iterator[Finding]:
        """Files that the manifest does not name; hidden ones at the top are the Hub's."""
        known = self.manifest.files.keys() | {MANIFEST}
        for path in sorted(self._root.rglob("*")):
            name = path.relative_to(self._root)
            if path.is_dir() or name.parts[0].startswith("."):
                continue
            if name.as_posix() not in known:
                yield _finding("extra-file", name.as_posix(), "is not in the manifest")

    def _check_page(self, name: str) -> Iterator[Finding]:
        text = (self._root / name).read_text(encoding="utf-8", errors="replace")
        yield from self._secrets(name, text)

    def _check_card(self) -> Iterator[Finding]:
        """The header names, for each split, exactly its files."""
        try:
            header = read_header((self._root / CARD).read_text(encoding="utf-8"), CARD)
        except EvidenceError as error:
            yield _finding("bad-card", CARD, error.what)
            return
        parquet = [name for name in self.manifest.files if name.endswith(".parquet")]
        named = list(_data_files(header))
        for name, split, pattern in named:
            found = [path for path in parquet if fnmatchcase(path, pattern)]
            where = f"{CARD} configuration {name} split {split}"
            if not found:
                yield _finding("bad-card", where, f"no file matches {pattern}")
            for path in found:
                if _place(path) != (name, split):
                    yield _finding("bad-card", where, f"{pattern} takes {path} as well")
        for path in parquet:
            if not any(fnmatchcase(path, pattern) for _, _, pattern in named):
                yield _finding("bad-card", CARD, f"no configuration names {path}")

    def _check_parquet(self, path: str) -> Iterator[Finding]:
        """One shard: its types, its rows, and the same rows as JSON Lines."""
        name, split = _place(path)
        entry = self.manifest.files[path]
        try:
            file = pq.ParquetFile(self._root / path)
            with file:
                if not file.schema_arrow.equals(arrow_schema(name)):
                    yield _finding("other-schema", path, _schema_difference(file, name))
                    return
                if file.metadata.num_rows != entry.rows:
                    what = f"has {file.metadata.num_rows} rows, the manifest says {entry.rows}"
                    yield _finding("row-count", path, what)
                rows = _parquet_rows(file)
                if name == "episodes":
                    rows = self._compared(rows, path)
                for number, row in enumerate(rows, 1):
                    if isinstance(row, Finding):
                        yield row
                    else:
                        yield from self._check_row(row, name, split, f"{path} row {number}")
        except (pa.ArrowException, OSError) as error:
            yield _finding("damaged-file", path, f"is no readable Parquet: {_first_line(error)}")

    def _compared(self, rows: Iterable[Any], path: str) -> Iterator[Any]:
        """The rows, and a finding where the JSON Lines beside them differ."""
        other = path.replace("data/episodes/", "data/jsonl/").replace(".parquet", ".jsonl.zst")
        if other not in self.manifest.files:
            yield _finding("missing-file", other, f"the rows of {path} are not there as JSON Lines")
            yield from rows
            return
        try:
            lines = _json_rows(self._root / other)
            for number, (row, line) in enumerate(itertools.zip_longest(rows, lines), 1):
                if row is None or line is None:
                    what = f"{other if row is None else path} has more rows than the other format"
                    yield _finding("row-count", f"{other} row {number}", what)
                    if row is not None:
                        yield row
                    break
                if row != line:
                    what = f"differs from {path} in {_difference(row, line)}"
                    yield _finding("rows-differ", f"{other} row {number}", what)
                yield row
        except (zstandard.ZstdError, ValueError, OSError) as error:
            yield _finding("damaged-file", other, f"can't be read: {_first_line(error)}")
        yield from rows  # what the other format has no match for is checked all the same

    def _check_row(self, row: Any, name: SetName, split: Split, where: str) -> Iterator[Finding]:
        self._digests[split].add(row["task_digest"])
        if name == "episodes":
            if SPLITS.get(row["stage"]) != split:
                yield _finding("wrong-split", where, f"is of stage {row['stage']}")
            for sample in row["samples"] or ():
                if len({len(sample[key]) for key in ("token_ids", "sampled", "logprobs")}) != 1:
                    yield _finding("unequal-lengths", where, "tokens, marks and logprobs differ")
        yield from self._secrets(where, "\0".join(_texts(row)))

    def _secrets(self, where: str, text: str) -> Iterator[Finding]:
        if self._scrubber.clean(text):
            return
        for kind, count in sorted(self._scrubber.scrub(text)[1].items()):
            yield _finding("secret", where, f"holds what looks like {count} of kind {kind}")

    def _check_sums(self) -> Iterator[Finding]:
        """The rows of a split are those of its files."""
        for name, splits in self.manifest.sets.items():
            for split, entry in splits.items():
                rows = sum(_rows_of(self.manifest.files, name, split))
                if rows != entry.rows:
                    what = f"files have {rows} rows, the set has {entry.rows}"
                    yield _finding("row-count", f"{MANIFEST} {name} {split}", what)


def _finding(code: str, where: str, message: str) -> Finding:
    return Finding(code=code, where=where, message=message)


def _capped(findings: Iterable[Finding], path: str) -> Iterator[Finding]:
    """At most so many of one kind, then how many there are besides."""
    seen: dict[str, int] = {}
    for finding in findings:
        seen[finding.code] = seen.get(finding.code, 0) + 1
        if seen[finding.code] <= _MOST_OF_A_KIND:
            yield finding
    for code, count in seen.items():
        if count > _MOST_OF_A_KIND:
            yield _finding(code, path, f"and {count - _MOST_OF_A_KIND} more of this kind")


def _place(path: str) -> tuple[SetName, Split]:
    """Set and split of a file, by where it lies."""
    _, name, file = path.split("/")
    return cast(SetName, name), cast(Split, file.partition("-")[0])


def _rows_of(files: dict[str, FileEntry], name: str, split: str) -> Iterator[int]:
    for path, entry in files.items():
        if path.startswith(f"data/{name}/{split}-") and entry.rows is not None:
            yield entry.rows


def _data_files(header: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Configuration, split and pattern of every entry of a header."""
    for config in header.get("configs") or ():
        for entry in config.get("data_files") or ():
            yield str(config.get("config_name")), str(entry.get("split")), str(entry.get("path"))


def _parquet_rows(file: pq.ParquetFile) -> Iterator[Any]:
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterator[Any]:
    """The rows of one file of JSON Lines; a ValueError where it is no whole frame of lines."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    tail = b""
    with path.open("rb") as file:
        while not decoder.eof:
            chunk = file.read(_CHUNK_BYTES)
            if not chunk:
                raise ValueError("it is cut off")
            *lines, tail = (tail + decoder.decompress(chunk)).split(b"\n")
            for line in lines:
                yield from_json(line)
        if tail or decoder.unused_data or file.read(1):
            raise ValueError("something stands behind the last row")


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list) and value and isinstance(value[0], str | dict | list):
        for inner in value:
            yield from _texts(inner)


def _difference(row: Any, line: Any) -> str:
    if not isinstance(line, dict):
        return "being no object"
    names = [name for name in {**row, **line} if row.get(name) != line.get(name)]
    return f"column {', '.join(names)}" if names else "its columns"


def _schema_difference(file: pq.ParquetFile, name: SetName) -> str:
    wanted, there = arrow_schema(name), file.schema_arrow
    missing = [column for column in wanted.names if column not in there.names]
    extra = [column for column in there.names if column not in wanted.names]
    other = [
        f"{column} is {there.field(column).type}"
        for column in wanted.names
        if column in there.names and there.field(column).type != wanted.field(column).type
    ]
    parts = [
        *(f"column {column} is missing" for column in missing),
        *(f"column {column} is not documented" for column in extra),
        *other,
    ]
    return "; ".join(parts) or "its columns are in another order"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
