from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rl.errors import EvidenceError
from rl.learner.checkpoint import latest, load, prune, read_scheduler, save_checkpoint, verify
from tests.support.checkpoints import DIGEST, FILES, make_state, rewrite_manifest, save


def test_what_was_saved_is_loaded(tmp_path):
    path = save(tmp_path / "deep" / "root", 3)
    found = load(path, DIGEST)
    assert path.name == "update-0003"
    assert found.learner == make_state(3)
    assert found.scheduler == {"frontier": [3]}
    assert found.manifest.update == 3


def test_latest_is_the_greatest_update_not_the_greatest_name(tmp_path):
    assert latest(tmp_path) is None
    for update in (9999, 10000, 2):
        save(tmp_path, update)
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "update-10000"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "link"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name, damage):
    path = save(tmp_path / "root", 1)
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if damage == "flip":
        # inside a manifest's digest, elsewhere in the middle
        spot = content.index(b'"sha256"') + 15 if name == "manifest.json" else len(content) // 2
        file.write_bytes(content[:spot] + bytes([content[spot] ^ 1]) + content[spot + 1 :])
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "link":
        outside = tmp_path / "outside"
        outside.write_bytes(content)
        file.symlink_to(outside)
    with pytest.raises(EvidenceError) as error:
        load(path)
    assert error.value.where == str(file)


def test_an_extra_file_is_refused_by_name(tmp_path):
    path = save(tmp_path, 1)
    (path / "adapter" / "foreign.bin").write_bytes(b"x")
    with pytest.raises(EvidenceError, match=r"foreign\.bin"):
        verify(path)


def test_another_campaign_s_checkpoint_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="belongs to a campaign"):
        load(save(tmp_path, 1), "b" * 64)


def test_a_directory_without_its_own_manifest_is_never_latest(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "update-0007")
    (tmp_path / "update-0008").mkdir()
    (tmp_path / "update-0009").mkdir()
    (tmp_path / "update-0009" / "manifest.json").write_text("{}")
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "update-0001"


def test_saving_the_same_again_changes_nothing(tmp_path):
    path = save(tmp_path, 1)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert save(tmp_path, 1) == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_a_valid_checkpoint_is_never_replaced_by_a_different_one(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(EvidenceError, match="different, valid checkpoint"):
        save(tmp_path, 1, salt="other")


def test_a_damaged_checkpoint_is_replaced(tmp_path):
    path = save(tmp_path, 1)
    (path / "optimizer.pt").write_bytes(b"torn")
    assert load(save(tmp_path, 1)).learner == make_state(1)


def test_a_state_of_another_version_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="version 3"):
        save_checkpoint(tmp_path, 4, make_state(3), {}, DIGEST)


def test_a_scheduler_state_that_is_no_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 1, make_state(1), {"x": float("nan")}, DIGEST)
    assert not list(tmp_path.iterdir())


def test_prune_keeps_the_named_and_the_newest(tmp_path):
    for update in range(1, 6):
        save(tmp_path, update)
    removed = prune(tmp_path, {2})
    assert [path.name for path in removed] == ["update-0001", "update-0003", "update-0004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-0002", "update-0005"]
    assert prune(tmp_path, {2}) == []


@pytest.mark.parametrize("name", ["scheduler.json", "optimizer.pt", "adapter/"])
def test_a_manifest_that_lacks_a_part_is_damaged(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    files = json.loads((path / "manifest.json").read_text())["files"]
    for file in [file for file in files if file.startswith(name)]:
        del files[file]
        (path / file).unlink()
    rewrite_manifest(path, files=files)
    for read in (read_scheduler, load, verify):
        with pytest.raises(EvidenceError, match="names no") as caught:
            read(path)
        assert caught.value.where.endswith("manifest.json") and caught.value.remedy
    newest = latest(tmp_path)
    assert newest is not None and newest.name == "update-0001"


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_scheduler_that_is_none_is_damaged_whatever_its_digest(
    tmp_path: Path, content: bytes
) -> None:
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    digest = hashlib.sha256(content).hexdigest()
    files["scheduler.json"].update(bytes=len(content), sha256=digest)
    rewrite_manifest(path, files=files)
    (path / "scheduler.json").write_bytes(content)
    for read in (read_scheduler, load):
        with pytest.raises(EvidenceError, match="no scheduler's state"):
            read(path)


def test_a_manifest_that_is_a_folder_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()
    with pytest.raises(EvidenceError, match="Is a directory"):
        read_scheduler(path)
