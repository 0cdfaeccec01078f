"""Folders in pieces: whole, verified, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import actors.node_files as node_files
from actors.node_files import Arrival, FileEntry, FolderManifest, clear_partial, pieces, survey
from rl.errors import EvidenceError, InfrastructureError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_files, "PIECE_BYTES", 10)
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "deep" / "er" / "data").write_bytes(os.urandom(37))
    (folder / "nothing").touch()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "inside").symlink_to("deep/er/data")
    (tmp_path / "blob").write_bytes(b"elsewhere")
    (folder / "outside").symlink_to(tmp_path / "blob")
    (folder / "deep").chmod(0o555)
    return folder


def carry(source: Path, target: Path, manifest: FolderManifest | None = None) -> Arrival:
    manifest = survey(source) if manifest is None else manifest
    arrival = Arrival(target, manifest)
    for name, piece in pieces(source, manifest):
        assert len(piece) <= 10
        arrival.append(name, piece)
    return arrival


def test_a_folder_arrives_as_it_was(source: Path, tmp_path: Path) -> None:
    target = carry(source, tmp_path / "there" / "copy").seal()
    assert (target / "deep/er/data").read_bytes() == (source / "deep/er/data").read_bytes()
    assert (target / "empty").is_dir() and (target / "nothing").read_bytes() == b""
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(target / "inside") == "deep/er/data"
    # What lay elsewhere has come along.
    assert not (target / "outside").is_symlink()
    assert (target / "outside").read_bytes() == b"elsewhere"
    kept = [entry for entry in survey(source).entries if entry.path != "outside"]
    assert [entry for entry in survey(target).entries if entry.path != "outside"] == kept


def test_until_it_is_sealed_there_is_nothing(source: Path, tmp_path: Path) -> None:
    arrival = carry(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    arrival.give_up()
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == []


def test_a_file_that_has_changed_on_the_way_is_no_folder(source: Path, tmp_path: Path) -> None:
    manifest = survey(source)
    (source / "deep/er/data").write_bytes(b"another")
    with pytest.raises(InfrastructureError, match="damaged, or was changed") as refused:
        carry(source, tmp_path / "copy", manifest).seal()
    assert refused.value.where.endswith("copy/deep/er/data")
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == []


def test_a_newer_folder_takes_the_place_of_an_older_one(source: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "old").touch()
    target = carry(source, tmp_path / "copy").seal()
    assert not (target / "old").exists()


def test_weights_can_be_left_out(source: Path) -> None:
    manifest = survey(source, lambda name: not name.endswith("data"))
    assert "deep/er/data" not in {entry.path for entry in manifest.entries}
    assert manifest.digest != survey(source).digest


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    manifest = FolderManifest(entries=[FileEntry(path=name, mode=0o644, sha256="0" * 64)])
    with pytest.raises(EvidenceError, match="leads out"):
        Arrival(tmp_path / "copy", manifest)
    assert not (tmp_path / "out").exists()


def test_a_link_to_a_folder_elsewhere_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "far").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(EvidenceError, match="a link to a folder elsewhere"):
        survey(source)


def test_what_a_dead_process_has_left_is_cleared(source: Path, tmp_path: Path) -> None:
    mine = carry(source, tmp_path / "copy")
    dead = tmp_path / f".copy.{2**22 + 1}-abc.partial"
    dead.mkdir()
    clear_partial(tmp_path / "copy")
    assert not dead.exists()
    assert mine.seal().is_dir()
