"""Whatever happens to a checkpoint's files, it is refused by the file's name."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import EvidenceError
from rl.learner.checkpoint import latest, load, read_scheduler, verify
from tests.support.checkpoints import DIGEST, FILES, make_state, rewrite_manifest, save


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("damage"), 3)


@contextmanager
def altered(file: Path, content: bytes) -> Generator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def assert_refused(path: Path, file: Path) -> None:
    for read in (verify, load):
        with pytest.raises(EvidenceError) as caught:
            read(path, DIGEST)
        assert caught.value.where == str(file)
        assert caught.value.remedy


@given(st.sampled_from(FILES), st.integers(min_value=0), st.integers(1, 255))
def test_any_byte_that_differs_is_found(whole: Path, name: str, spot: int, change: int) -> None:
    file = whole / name
    content = bytearray(file.read_bytes())
    content[spot % len(content)] ^= change
    with altered(file, bytes(content)):
        assert_refused(whole, file)
    load(whole, DIGEST)


def test_each_byte_of_a_manifest_counts(whole: Path) -> None:
    file = whole / "manifest.json"
    content = file.read_bytes()
    for spot, byte in enumerate(content):
        # One space for another would leave the same JSON.
        other = ord("\t") if byte == ord(" ") else byte ^ 1
        with (
            altered(file, content[:spot] + bytes([other]) + content[spot + 1 :]),
            pytest.raises(EvidenceError) as caught,
        ):
            verify(whole, DIGEST)
        assert caught.value.where == str(file)


@given(st.sampled_from(FILES), st.integers(min_value=0))
def test_a_truncated_file_is_found(whole: Path, name: str, length: int) -> None:
    file = whole / name
    content = file.read_bytes()
    with altered(file, content[: length % len(content)]):
        assert_refused(whole, file)


@given(st.sampled_from(FILES), st.binary(min_size=1, max_size=40))
def test_a_longer_file_is_found(whole: Path, name: str, more: bytes) -> None:
    file = whole / name
    with altered(file, file.read_bytes() + more):
        assert_refused(whole, file)


@given(st.sampled_from(FILES), st.sampled_from(FILES))
def test_a_file_in_another_s_place_is_found(whole: Path, name: str, other: str) -> None:
    if name != other:
        with altered(whole / name, (whole / other).read_bytes()):
            assert_refused(whole, whole / name)


@pytest.mark.parametrize("name", ["extra", "adapter/extra.bin", "deep/er/extra", ".hidden"])
def test_a_file_more_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 3)
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"x")
    assert_refused(path, path / name)


@pytest.mark.parametrize("name", FILES)
def test_one_that_lacks_a_file_is_refused_and_never_latest(tmp_path: Path, name: str) -> None:
    save(tmp_path, 2)
    path = save(tmp_path, 3)
    (path / name).unlink()
    assert_refused(path, path / name)
    assert latest(tmp_path) == tmp_path / "update-0002"


@pytest.mark.parametrize("update", [2, 4])
def test_a_manifest_of_another_update_is_refused(tmp_path: Path, update: int) -> None:
    path = save(tmp_path / "a", 3)
    other = save(tmp_path / "b", update)
    shutil.copy(other / "manifest.json", path / "manifest.json")
    assert_refused(path, path / "manifest.json")
    assert latest(tmp_path / "a") is None


def test_a_checkpoint_may_be_copied_to_a_place_of_another_name(tmp_path: Path) -> None:
    copy = shutil.copytree(save(tmp_path, 3), tmp_path / "best")
    assert load(copy, DIGEST).learner == make_state(3)


def test_a_manifest_of_another_configuration_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    rewrite_manifest(path, config_digest="b" * 64)
    assert_refused(path, path / "manifest.json")
    verify(path)  # of some campaign it is


def test_a_manifest_with_the_digest_of_another_adapter_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    rewrite_manifest(path, adapter_sha256="c" * 64)
    with pytest.raises(EvidenceError, match="digest of the adapter") as caught:
        load(path)
    assert caught.value.where == str(path / "manifest.json")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "adapter/../../x", "adapter/", "adapter/a/b", "extra", ""]
)
def test_a_manifest_that_names_what_is_no_part_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 3)
    entry = {"bytes": 0, "sha256": "0" * 64}
    files = verify(path).model_dump()["files"] | {name: entry}
    rewrite_manifest(path, files=files)
    for read in (verify, load, read_scheduler):
        with pytest.raises(EvidenceError, match="no part of a checkpoint") as caught:
            read(path)
        assert caught.value.where == str(path / "manifest.json")
