"""Layers on disk: named by content, whole, private, bounded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl.errors import ConfigurationError
from sandboxes import layers
from sandboxes.layers import layer_name, read_layer, write_layer


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "files").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM x\nRUN true\n")
    (folder / "files" / "a").write_text("a")
    (folder / "link").symlink_to("files")
    return folder


def _edit(context: Path) -> None:
    (context / "files" / "a").write_text("b")


def _edit_steps(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM x\nRUN false\n")


def _change_mode(context: Path) -> None:
    (context / "files" / "a").chmod(0o700)


def _rename(context: Path) -> None:
    (context / "files" / "a").rename(context / "files" / "b")


def _relink(context: Path) -> None:
    (context / "link").unlink()
    (context / "link").symlink_to("Dockerfile")


def _add_folder(context: Path) -> None:
    (context / "files" / "empty").mkdir()


@pytest.mark.parametrize(
    "change", [_edit, _edit_steps, _change_mode, _rename, _relink, _add_folder]
)
def test_name_follows_every_part_of_the_context(context: Path, change: object) -> None:
    before = layer_name(context, full_map=True)
    assert layer_name(context, full_map=True) == before != layer_name(context, full_map=False)
    assert callable(change)
    change(context)
    assert layer_name(context, full_map=True) != before


def test_layer_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "layers"
    assert read_layer(folder, "a") is None
    write_layer(folder, "a", b"content")
    assert read_layer(folder, "a") == b"content"
    assert read_layer(folder, "b") is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"torn", b"x" * 40])
def test_torn_or_foreign_content_is_no_layer(tmp_path: Path, content: bytes) -> None:
    write_layer(tmp_path / "layers", "a", b"content")
    (tmp_path / "layers" / "a").write_bytes(content)
    assert read_layer(tmp_path / "layers", "a") is None


def test_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "layers"
    write_layer(folder, "a", b"content")
    folder.chmod(0o777)
    for attempt in (lambda: read_layer(folder, "a"), lambda: write_layer(folder, "b", b"x")):
        with pytest.raises(ConfigurationError, match="others could write"):
            attempt()
    real = folder.rename(tmp_path / "real")
    real.chmod(0o700)
    folder.symlink_to(real)
    with pytest.raises(ConfigurationError, match="others could write"):
        read_layer(folder, "a")


def test_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_BYTES", 3 * (layers.DIGEST_BYTES + 10))
    for number in range(3):
        write_layer(tmp_path / "layers", f"{number}", b"x" * 10)
        os.utime(tmp_path / "layers" / f"{number}", (number, number))
    assert read_layer(tmp_path / "layers", "0") is not None  # used now
    write_layer(tmp_path / "layers", "3", b"x" * 10)
    assert {path.name for path in (tmp_path / "layers").iterdir()} == {"0", "2", "3"}


def test_writers_at_once_leave_one_whole_layer(tmp_path: Path) -> None:
    content = os.urandom(1 << 18)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_layer, tmp_path / "l", "a", content) for _ in range(16)]
        for write in writes:
            write.result()
    assert read_layer(tmp_path / "l", "a") == content
    assert [path.name for path in (tmp_path / "l").iterdir()] == ["a"]
