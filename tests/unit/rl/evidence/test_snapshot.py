"""The snapshot of a run's sources."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from rl.evidence.audit import audit
from rl.evidence.snapshot import SNAPSHOT, keep_source, kept_sha256, source_tar, tar_sha256
from rl.files import sha256_file
from tests.unit.rl.evidence.synthetic import build
from tests.unit.rl.evidence.test_audit import edit_json, edit_lines


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "rl").mkdir(parents=True)
    (root / "rl" / "a.py").write_text("a = 1\n")
    (root / ".gitignore").write_text("cache/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True, timeout=60)
    subprocess.run(["git", "-C", str(root), "add", "."], check=True, timeout=60)
    return root


def names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return opened.getnames()


def test_it_holds_sources_and_no_secret_or_cache(checkout: Path) -> None:
    (checkout / "rl" / "new.py").write_text("new = 1\n")
    (checkout / ".env").write_text("TOKEN=secret\n")
    (checkout / "cache").mkdir()
    (checkout / "cache" / "x.py").write_text("x = 1\n")
    assert names(source_tar(checkout)) == [".gitignore", "rl/a.py", "rl/new.py"]


def test_equal_sources_give_equal_bytes(checkout: Path) -> None:
    first = source_tar(checkout)
    (checkout / "rl" / "a.py").write_text("a = 1\n")  # another time, the same content
    assert source_tar(checkout) == first
    (checkout / "rl" / "a.py").write_text("a = 2\n")
    assert tar_sha256(source_tar(checkout)) != tar_sha256(first)


def test_outside_a_checkout_the_projects_folders_are_taken(tmp_path: Path) -> None:
    (tmp_path / "rl" / "__pycache__").mkdir(parents=True)
    (tmp_path / "rl" / "a.py").write_text("a = 1\n")
    (tmp_path / "rl" / "__pycache__" / "a.pyc").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.py").write_text("b = 1\n")
    assert names(source_tar(tmp_path)) == ["rl/a.py"]


def test_an_audit_finds_other_sources(checkout: Path, tmp_path: Path) -> None:
    directory = build(tmp_path / "campaigns")
    tar = source_tar(checkout)
    keep_source(tar, directory.root)
    pinned = tar_sha256(tar)
    edit_json(directory.frozen, lambda frozen: frozen["code"].update(source_sha256=pinned))
    frozen = sha256_file(directory.frozen)
    edit_lines(directory.events, lambda rows: rows[0]["fields"].update(frozen=frozen))
    assert kept_sha256(directory.root) == pinned
    assert audit(directory).findings == []
    keep_source(tar + b"\0", directory.root)
    assert {finding.code for finding in audit(directory).findings} == {"source-snapshot"}
    (directory.root / SNAPSHOT).write_bytes(b"torn")
    assert {finding.code for finding in audit(directory).findings} == {"source-snapshot"}
    (directory.root / SNAPSHOT).unlink()
    assert {finding.code for finding in audit(directory).findings} == {"source-snapshot"}
