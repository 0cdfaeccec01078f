import errno
import json
import os
from pathlib import Path

import pytest

from rl import files
from rl.errors import EvidenceError, InfrastructureError


def test_written_bytes_replace_the_old_content_and_leave_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_bytes(path, b"one")
    files.write_json(path, {"b": [1, "é"]})
    assert json.loads(path.read_text()) == {"b": [1, "é"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_exclusive_creation_happens_once(tmp_path: Path) -> None:
    path = tmp_path / "frozen.json"
    files.create_exclusive(path, b"first")
    with pytest.raises(EvidenceError, match="never overwritten"):
        files.create_exclusive(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["frozen.json"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_full_disk_is_typed_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a"
    files.write_bytes(path, b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(InfrastructureError, match="no space left") as caught:
        files.write_bytes(path, b"new")
    assert caught.value.where == str(path)
    assert "free some disk space" in caught.value.remedy
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_missing_directory_is_typed(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="cannot be written"):
        files.write_bytes(tmp_path / "no" / "a", b"")


def test_failed_append_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"whole\n")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data[: len(data) // 2]))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(InfrastructureError):
        files.append_bytes(descriptor, path, b"0123456789")
    os.close(descriptor)
    assert path.read_bytes() == b"whole\n"


def test_digests_name_every_file_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256_files(tmp_path) == {"sub/x": digest}
