"""Archives that are damaged, or made to do harm: refused with what is wrong, nothing written."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from rl.errors import EvidenceError
from rl.evidence.archive import Archived, archive
from rl.evidence.archive_manifest import ArchivedEntry, ArchiveManifest, leads_outside
from rl.evidence.archive_read import restore, verify_archive
from rl.files import json_bytes

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
type Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def made(tmp_path: Path) -> Archived:
    """An archive of a folder with two files."""
    run = tmp_path / "state" / "campaigns" / "run-1"
    (run / "traces").mkdir(parents=True)
    (run / "traces" / "a").write_bytes(os.urandom(300_000))
    (run / "frozen.json").write_bytes(b"{}")
    return archive(run, tmp_path / "state")


def refused(path: Path, tmp_path: Path) -> str:
    """Why an archive is refused, by both that read it; nothing is left behind."""
    with pytest.raises(EvidenceError) as told:
        verify_archive(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EvidenceError):
        restore(path, tmp_path / "fresh")
    assert sorted(tmp_path.rglob("*")) == before
    return str(told.value)


def test_every_flipped_byte_is_found(made: Archived, tmp_path: Path) -> None:
    whole = made.path.read_bytes()
    draws = random.Random(1)
    ends = [*range(40), *range(len(whole) - 40, len(whole))]
    for place in [*ends, *(draws.randrange(len(whole)) for _ in range(60))]:
        content = bytearray(whole)
        content[place] ^= 1 << draws.randrange(8)
        made.path.write_bytes(content)
        with pytest.raises(EvidenceError) as told:
            verify_archive(made.path)
        assert str(made.path) in str(told.value)


def test_without_the_manifest_beside_it_no_flip_goes_through_with_other_content(
    made: Archived, tmp_path: Path
) -> None:
    whole, inside = made.path.read_bytes(), verify_archive(made.path)
    made.sidecar.unlink()
    draws = random.Random(2)
    found = 0
    for place in [*range(20), *(draws.randrange(len(whole)) for _ in range(60))]:
        content = bytearray(whole)
        content[place] ^= 1 << draws.randrange(8)
        made.path.write_bytes(content)
        try:
            assert verify_archive(made.path) == inside  # a bit that zstandard does not use
        except EvidenceError:
            found += 1
    assert found > 70


@pytest.mark.parametrize("left", [0, 3, 4, 1000, -1, -4, -5, -100])
def test_cut_off(made: Archived, tmp_path: Path, left: int) -> None:
    whole = made.path.read_bytes()
    for sidecar in (True, False):
        if not sidecar:
            made.sidecar.unlink()
        made.path.write_bytes(whole[:left])
        assert str(made.path) in refused(made.path, tmp_path)


def test_something_behind_it(made: Archived, tmp_path: Path) -> None:
    made.sidecar.unlink()
    whole = made.path.read_bytes()
    for more in (b"x", zstandard.compress(b"more")):
        made.path.write_bytes(whole + more)
        assert "behind its compressed data" in refused(made.path, tmp_path)


def test_manifest_beside_it_is_held_against_it(made: Archived, tmp_path: Path) -> None:
    text = made.sidecar.read_text()
    for old, new in (('"run-1"', '"run-2"'), ('"kind": "campaigns"', '"kind": "x"')):
        made.sidecar.write_text(text.replace(old, new))
        assert str(made.sidecar) in refused(made.path, tmp_path)
    made.sidecar.write_text("{")
    assert "no valid manifest" in refused(made.path, tmp_path)


def folder(path: str, **more: Any) -> ArchivedEntry:
    return ArchivedEntry(path=path, kind="folder", mode=0o755, mtime_ns=0, **more)


def empty(path: str) -> ArchivedEntry:
    return ArchivedEntry(path=path, kind="file", mode=0o644, mtime_ns=0, sha256=EMPTY)


def manifest(*entries: ArchivedEntry, **changes: Any) -> ArchiveManifest:
    fields: dict[str, Any] = {
        "kind": "campaigns",
        "run_id": "run-1",
        "path": "campaigns/run-1",
    } | changes
    return ArchiveManifest(**fields, made_at=0.0, tool="x", entries=[folder("."), *entries])


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def forge(path: Path, content: bytes, *members: Member) -> Path:
    """An archive with whatever in it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in (member("ARCHIVE.json", data=content), *members):
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(raw.getvalue()))
    return path


ROOT = member("campaigns/run-1", tarfile.DIRTYPE)


def test_an_honest_forgery_is_taken(tmp_path: Path) -> None:
    """So that what the others are refused for is what they are made for."""
    path = forge(
        tmp_path / "a.tar.zst", json_bytes(manifest(empty("f"))), ROOT, member("campaigns/run-1/f")
    )
    assert verify_archive(path).files == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (member("campaigns/run-1/../../f"), "'campaigns/run-1/../../f'"),
        (member("../f"), "'../f'"),
        (member("/etc/f"), "'/etc/f'"),
        (member("campaigns/run-1/g"), "'campaigns/run-1/g'"),
        (member("campaigns/run-1/f", tarfile.SYMTYPE, linkname="/etc"), "something else"),
        (member("campaigns/run-1/f", tarfile.LNKTYPE, linkname="/etc/passwd"), "something else"),
        (member("campaigns/run-1/f", tarfile.FIFOTYPE), "something else"),
        (member("campaigns/run-1/f", tarfile.CHRTYPE), "something else"),
        (member("campaigns/run-1/f", data=b"x"), "another size or mode"),
        (member("campaigns/run-1/f", mode=0o4755), "another size or mode"),
    ],
)
def test_a_member_that_the_manifest_does_not_name(bad: Member, why: str, tmp_path: Path) -> None:
    path = forge(tmp_path / "a.tar.zst", json_bytes(manifest(empty("f"))), ROOT, bad)
    assert why in refused(path, tmp_path)


def test_a_member_twice_or_too_few(tmp_path: Path) -> None:
    content, file = json_bytes(manifest(empty("f"))), member("campaigns/run-1/f")
    path = tmp_path / "a.tar.zst"
    assert "does not name" in refused(forge(path, content, ROOT, file, file), tmp_path)
    assert "ends before" in refused(forge(path, content, ROOT), tmp_path)
    assert "has 'campaigns/run-1'" in refused(forge(path, content, file, ROOT), tmp_path)


def test_content_that_is_not_the_manifests(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"true").hexdigest()
    true = empty("f").model_copy(update={"bytes": 4, "sha256": sha256})
    path = tmp_path / "a.tar.zst"
    content = json_bytes(manifest(true))
    verify_archive(forge(path, content, ROOT, member("campaigns/run-1/f", data=b"true")))
    forge(path, content, ROOT, member("campaigns/run-1/f", data=b"lies"))
    assert "'campaigns/run-1/f' with another sha256" in refused(path, tmp_path)


def raw(**changes: Any) -> bytes:
    """A manifest that the record itself would refuse."""
    return json_bytes(manifest(empty("f")).model_dump(mode="json") | changes)


def entry(path: str, **changes: Any) -> dict[str, Any]:
    return empty("f").model_dump(mode="json") | {"path": path} | changes


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (raw(path="../out"), "no plain relative path"),
        (raw(path="/etc"), "no plain relative path"),
        (raw(path="a//b"), "no plain relative path"),
        (raw(entries=[folder(".").model_dump(), entry("../f")]), "no plain relative path"),
        (raw(entries=[folder(".").model_dump(), entry("/f")]), "no plain relative path"),
        (raw(entries=[folder(".").model_dump(), entry("f"), entry("f")]), "named twice"),
        (raw(entries=[folder(".").model_dump(), entry("f"), entry("f/g")]), "in no folder"),
        (raw(entries=[folder(".").model_dump(), entry("d/g")]), "in no folder"),
        (raw(entries=[entry("f")]), "first entry is the root"),
        (raw(entries=[]), "entries"),
        (raw(surprise=1), "surprise"),
        (raw(archive={"name": "x", "bytes": 1, "sha256": EMPTY}), "claims to know"),
        (b"[]", "no valid manifest"),
        (b"\xff", "no valid manifest"),
    ],
)
def test_a_manifest_that_would_do_harm(content: bytes, why: str, tmp_path: Path) -> None:
    path = forge(tmp_path / "a.tar.zst", content, ROOT, member("campaigns/run-1/f"))
    assert why in refused(path, tmp_path)


@pytest.mark.parametrize("target", ["/etc", "..", "../..", "a/../../..", "", "sub/..", "./.."])
def test_a_link_out_of_the_tree(target: str, tmp_path: Path) -> None:
    link = entry("l", kind="link", sha256=None, target=target)
    path = forge(
        tmp_path / "a.tar.zst",
        raw(entries=[folder(".").model_dump(), link]),
        ROOT,
        member("campaigns/run-1/l", tarfile.SYMTYPE, linkname=target),
    )
    assert "leads outside" in refused(path, tmp_path)


def test_a_file_below_a_link(tmp_path: Path) -> None:
    link = entry("l", kind="link", sha256=None, target="f")
    path = forge(
        tmp_path / "a.tar.zst",
        raw(entries=[folder(".").model_dump(), link, entry("l/g")]),
        ROOT,
        member("campaigns/run-1/l", tarfile.SYMTYPE, linkname="f"),
        member("campaigns/run-1/l/g"),
    )
    assert "in no folder" in refused(path, tmp_path)


@pytest.mark.parametrize(
    ("path", "target", "outside"),
    [
        ("l", "f", False),
        ("d/l", "../f", False),
        ("d/e/l", "../../f", False),
        ("d/l", "../..", True),
        ("d/l", "../x/..", True),  # x may be a link itself
        ("l", ".", False),
        ("l", "a/b/", False),
    ],
)
def test_where_a_link_leads(path: str, target: str, outside: bool) -> None:
    assert leads_outside(path, target) is outside


@pytest.mark.parametrize("harm", ["header", "content", "tail"])
def test_a_bomb_is_not_unpacked(harm: str, tmp_path: Path) -> None:
    """Compressed to almost nothing, 64 MiB of zeros where a header, a file or an end is."""
    size = 64 << 20
    content = json_bytes(manifest(empty("f")))
    info = member("campaigns/run-1/f")[0]
    if harm == "header":
        info.type, info.size = tarfile.XHDTYPE, size
    elif harm == "content":
        info.size = size
    out = io.BytesIO()
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(out, closefd=False) as stream:
        head = member("ARCHIVE.json", data=content)
        stream.write(head[0].tobuf() + content + b"\0" * (-len(content) % 512))
        stream.write(ROOT[0].tobuf() + info.tobuf())
        for _ in range(size >> 20):
            stream.write(b"\0" * (1 << 20))
    path = tmp_path / "bomb.tar.zst"
    path.write_bytes(out.getvalue())
    why = {"header": "header larger", "content": "another size", "tail": "header larger"}[harm]
    assert why in refused(path, tmp_path)


def test_no_archive_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    for content in (b"", b"text", zstandard.compress(b""), zstandard.compress(b"x" * 5000)):
        path.write_bytes(content)
        assert str(path) in refused(path, tmp_path)
    with pytest.raises(EvidenceError, match="no such file"):
        verify_archive(tmp_path / "missing.tar.zst")
