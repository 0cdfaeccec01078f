"""What lies in a tree that is to be archived, as it is now and as it was.

Invariants:
- Every file is hashed as it is read, and is the same file from its first byte to its last.
- A link is recorded as a link and never followed; one that leads outside is refused, and
  so is what is neither folder, file nor link, or has a name that is no text.
- While a tree is held still, no run can begin to write a trace in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rl.errors import EvidenceError
from rl.evidence.archive_manifest import (
    ROOT,
    ArchivedEntry,
    ArchiveManifest,
    Meter,
    leads_outside,
    mode_of,
)

_CHUNK_BYTES = 1 << 20
_AGAIN = "wait until nothing writes there, then archive it again"


@contextmanager
def hold_still(root: Path) -> Generator[None]:
    """Keep every trace at or below `root` from being written.

    Raises:
        EvidenceError: one is being written.
    """
    found = sorted(root.rglob("*.jsonl.zst")) if root.is_dir() else []
    traces = [trace for trace in found if trace.is_file() and not trace.is_symlink()]
    with ExitStack() as held:
        for trace in traces:
            descriptor = os.open(trace, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EvidenceError(
                    "a run is writing this trace, so it can't be archived",
                    str(trace),
                    "stop the run (Ctrl-C where it runs) or let it end, then archive it",
                ) from None
        yield


def survey(root: Path, meter: Meter) -> list[ArchivedEntry]:
    """Every entry of the tree at `root`, files by sha256, the root first.

    Raises:
        EvidenceError: something in it can't be kept, or changes.
    """
    found = [(path, path.lstat()) for path in _tree(root)]
    meter.begin("hash", sum(info.st_size for _, info in found if stat.S_ISREG(info.st_mode)))
    entries: list[ArchivedEntry] = []
    for path, info in found:
        try:
            entries.append(_entry(root, path, info, meter))
        except FileNotFoundError:
            raise changed(path) from None
    return entries


def _tree(root: Path) -> Iterator[Path]:
    """`root` and all below it, sorted, each folder before what lies in it."""
    yield root
    if root.is_dir() and not root.is_symlink():
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            yield from _tree(root / name)


def _entry(root: Path, path: Path, info: os.stat_result, meter: Meter) -> ArchivedEntry:
    name = ROOT if path == root else path.relative_to(root).as_posix()
    _require_text(name, path)
    mode, mtime_ns = mode_of(info.st_mode), info.st_mtime_ns
    if stat.S_ISDIR(info.st_mode):
        return ArchivedEntry(path=name, kind="folder", mode=mode, mtime_ns=mtime_ns)
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink(path)
        _require_text(target, path)
        if leads_outside(name, target):
            raise EvidenceError(
                f"is a link out of what is archived, to {target}",
                str(path),
                "replace it by a copy of what it points to, or remove the link",
            )
        return ArchivedEntry(path=name, kind="link", mode=mode, mtime_ns=mtime_ns, target=target)
    if not stat.S_ISREG(info.st_mode):
        raise EvidenceError("is no folder, file or link", str(path), "remove it")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            meter.advance(len(chunk))
        if _differs(info, os.fstat(file.fileno())) or file.tell() != info.st_size:
            raise changed(path)
    return ArchivedEntry(
        path=name,
        kind="file",
        mode=mode,
        mtime_ns=mtime_ns,
        bytes=info.st_size,
        sha256=digest.hexdigest(),
    )


def _require_text(name: str, path: Path) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        what = "its name, or where it points, is no UTF-8 text"
        raise EvidenceError(what, str(path), "rename it") from None


def require_unchanged(target: Path, manifest: ArchiveManifest) -> None:
    """Refuse a tree that is no longer what the survey found, as its directory tells."""
    before = {entry.path: entry for entry in manifest.entries}
    for path in _tree(target):
        name = ROOT if path == target else path.relative_to(target).as_posix()
        entry, info = before.pop(name, None), path.lstat()
        if entry is None or info.st_mtime_ns != entry.mtime_ns:
            raise changed(path)
        if entry.kind == "file" and info.st_size != entry.bytes:
            raise changed(path)
    if before:
        raise changed(target / min(before))


def place_of(target: Path, entry: ArchivedEntry) -> Path:
    """Where an entry of the tree at `target` lies."""
    return target if entry.path == ROOT else target / entry.path


def _differs(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ino) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )


def changed(path: Path) -> EvidenceError:
    """The refusal of what does not hold still."""
    return EvidenceError("changed while it was being archived", str(path), _AGAIN)
