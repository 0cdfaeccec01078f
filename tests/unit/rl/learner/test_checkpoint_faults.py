"""A checkpoint's writer may die, or be refused by the disk, at any operation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl.learner import durable
from rl.learner.checkpoint import latest, load, prune, verify
from rl.learner.manifest import update_of
from tests.support.checkpoints import DIGEST, make_state, save
from tests.support.faults import MODES, Mode, disturb, operations


@dataclass(frozen=True)
class Situation:
    """What lies on the disk, what is done then, and which updates `latest` may name."""

    prepare: Callable[[Path], Any]
    action: Callable[[Path], Any]
    before: int
    after: int
    untouched: tuple[int, ...]
    damaged: tuple[int, ...] = ()  # from the start


def one(root: Path) -> None:
    save(root, 1)


def one_and_a_dead_writer_s(root: Path) -> None:
    save(root, 1)
    leftover = root / f"{durable.TEMPORARY}update-0002-7"
    shutil.copytree(root / "update-0001", leftover)
    (root / f"{durable.TEMPORARY}file").write_bytes(b"x")


def one_and_a_damaged_one(root: Path) -> None:
    save(root, 1)
    (save(root, 2) / "optimizer.pt").unlink()


def three(root: Path) -> None:
    for update in (1, 2, 3):
        save(root, update)


def save_two_and_prune(root: Path) -> None:
    save(root, 2)
    prune(root, set())


SITUATIONS = {
    "the first": Situation(lambda _: None, lambda root: save(root / "new", 1), 0, 1, ()),
    "the second": Situation(one, lambda root: save(root, 2), 1, 2, (1,)),
    "after a death": Situation(one_and_a_dead_writer_s, lambda root: save(root, 2), 1, 2, (1,)),
    "over a damaged one": Situation(
        one_and_a_damaged_one, lambda root: save(root, 2), 1, 2, (1,), (2,)
    ),
    "save and prune": Situation(one, save_two_and_prune, 1, 2, ()),
    "prune": Situation(three, lambda root: prune(root, {1}), 3, 3, (1, 3)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_whatever_goes_wrong_at_any_operation_a_whole_one_is_latest(
    name: str, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    situation = SITUATIONS[name]
    template = tmp_path / "template"
    template.mkdir()
    situation.prepare(template)
    count = len(operations(lambda: situation.action(copy_of(template, tmp_path / "0"))))
    assert count >= 5
    ended = False
    for at in range(1, count + 2):
        root = copy_of(template, tmp_path / str(at))
        ended = disturb(lambda root=root: situation.action(root), at, mode)
        assert ended or at <= count
        check(root, situation, ended)
        shutil.rmtree(root)
    assert ended, "the last one was not disturbed"


def copy_of(template: Path, root: Path) -> Path:
    return Path(shutil.copytree(template, root))


def check(root: Path, situation: Situation, ended: bool) -> None:
    home = root / "new" if situation.before == 0 else root
    newest = latest(home) if home.exists() else None
    if newest is None:
        assert situation.before == 0 and not ended
    else:
        found = load(newest, DIGEST)  # whole, whichever it is
        assert found.learner == make_state(found.manifest.update)
        assert found.manifest.update in (
            (situation.after,) if ended else (situation.before, situation.after)
        )
    for update in situation.untouched:
        verify(home / f"update-{update:04d}")
    for path in home.glob("update-*"):  # none is ever half written or half removed
        if update_of(path) not in situation.damaged:
            verify(path)
    # The next writer succeeds, and clears away what was left.
    assert save(home, 7).name == "update-0007"
    assert latest(home) == home / "update-0007"
    assert not list(home.glob(f"{durable.TEMPORARY}*"))


@dataclass
class Journal:
    """What was written and what was synced, in order, by path."""

    rows: list[tuple[str, Path]] = field(default_factory=list)
    paths: dict[int, Path] = field(default_factory=dict)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real_open, real_write, real_rename, real_mkdir = os.open, os.write, os.rename, os.mkdir

        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            handle = real_open(path, flags, *args, **kwargs)
            self.paths[handle] = Path(path)
            if flags & os.O_CREAT:
                self.rows.append(("create", Path(path)))
            return handle

        def written(handle: int, data: Any) -> int:
            self.rows.append(("write", self.paths[handle]))
            return real_write(handle, data)

        def renamed(source: Any, target: Any) -> None:
            self.rows.append(("rename", Path(target)))
            real_rename(source, target)

        def made(path: Any, *args: Any) -> None:
            self.rows.append(("create", Path(path)))
            real_mkdir(path, *args)

        patch.setattr(os, "open", opened)
        patch.setattr(os, "write", written)
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "fsync", lambda h: self.rows.append(("sync", self.paths[h])))

    def last(self, kind: str, path: Path) -> int:
        return max(i for i, row in enumerate(self.rows) if row == (kind, path))


def test_everything_is_synced_before_the_rename_and_the_manifest_is_written_last(
    tmp_path: Path,
) -> None:
    journal = Journal()
    with pytest.MonkeyPatch.context() as patch:
        journal.install(patch)
        final = save(tmp_path, 1)
    renamed = journal.last("rename", final)
    before = journal.rows[:renamed]
    created = [path for kind, path in before if kind == "create"]
    written = {path for kind, path in before if kind == "write"}
    assert created[-1].name == "manifest.json"
    assert len(written) == 5
    for path in written:
        assert journal.last("write", path) < journal.last("sync", path) < renamed
    manifest = next(path for path in written if path.name == "manifest.json")
    for path in written - {manifest}:
        assert journal.last("sync", path) < journal.last("write", manifest)
    temporary = manifest.parent
    for folder in (temporary, temporary / "adapter"):
        inside = [journal.last("create", path) for path in created if path.parent == folder]
        assert max(inside) < journal.last("sync", folder) < renamed
    assert renamed < journal.last("sync", tmp_path)
