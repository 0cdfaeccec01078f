from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.errors import EvidenceError
from rl.learner import durable
from rl.learner.checkpoint import latest, load, prune, read_scheduler, save_checkpoint, verify
from rl.learner.state import LearnerState, files_sha256
from rl.records import AdapterBytes, Probe

DIGEST = "a" * 64
NAMES = [
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "optimizer.pt",
    "scheduler.json",
    "manifest.json",
]


def make_state(version: int, salt: str = "") -> LearnerState:
    files = {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": f"weights {version}{salt}".encode() * 50,
    }
    return LearnerState(
        adapter=AdapterBytes(
            version=version,
            files=files,
            sha256=files_sha256(files),
            probe=Probe(token_ids=[1, 2], logprobs=[-0.1 * version]),
        ),
        optimizer=f"moments {version}".encode() * 100,
    )


def save(root: Path, update: int, salt: str = "") -> Path:
    return save_checkpoint(root, update, make_state(update, salt), {"frontier": [update]}, DIGEST)


class Crash(OSError):
    """The moment of death."""


class Faulty:
    """The os functions behind every change on the disk; the `at`-th call dies."""

    CHANGES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0
        self.dead = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.CHANGES:
            patch.setattr(os, name, self._guard(getattr(os, name)))

    def _guard(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.dead or self.calls == self.at:
                self.dead = True  # a dead process changes nothing more, not even to tidy up
                raise Crash("crash")
            return real(*args, **kwargs)

        return call


def crashes(action: Callable[[], Any], at: int) -> bool:
    """Run `action`, dying at its `at`-th disk operation; whether it died."""
    fault = Faulty(at)
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        try:
            action()
        except Crash:
            return True
    return fault.dead


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


def test_a_crash_at_any_file_operation_leaves_the_previous_one_usable(tmp_path):
    at = 0
    while True:
        at += 1
        root = tmp_path / str(at)
        previous = save(root, 1)
        died = crashes(lambda root=root: save(root, 2), at)
        newest = latest(root)
        assert newest is not None
        loaded = load(newest)  # whole, whichever it is
        assert loaded.learner == make_state(loaded.manifest.update)
        assert load(previous).learner == make_state(1)
        if not died:
            assert newest.name == "update-0002"
            break
        assert save(root, 2).name == "update-0002"  # and the next try succeeds
        assert not list(root.glob(f"{durable.TEMPORARY}*"))
    assert at > 20  # the faults really were injected


def test_a_crash_while_pruning_leaves_only_whole_checkpoints(tmp_path):
    at = 0
    while True:
        at += 1
        root = tmp_path / str(at)
        for update in (1, 2, 3):
            save(root, update)
        died = crashes(lambda root=root: prune(root, {1}), at)
        for path in root.glob("update-*"):
            verify(path)
        newest = latest(root)
        assert newest is not None
        assert newest.name == "update-0003"
        if not died:
            break
    assert at > 3


@pytest.mark.parametrize("name", NAMES)
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
    if not (name == "manifest.json" and damage == "flip"):  # that one accuses the file it names
        assert file.name in error.value.where


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
    manifest = json.loads((path / "manifest.json").read_text())
    for file in [file for file in manifest["files"] if file.startswith(name)]:
        del manifest["files"][file]
        (path / file).unlink()
    (path / "manifest.json").write_text(json.dumps(manifest))
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
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["scheduler.json"].update(bytes=len(content), sha256=digest)
    (path / "manifest.json").write_text(json.dumps(manifest))
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
