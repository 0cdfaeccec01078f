"""The embedded bank."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from rl.errors import ConfigurationError
from sandboxes.bank import FAMILIES, write_bank
from sandboxes.tasks import load_folder

# Of the names and content digests below; it changes exactly when the bank's tasks do.
FROZEN = "fcb72e084719603b4f3601056193b1272a624a22155813d2e7c7038d04d87967"


def _fingerprint(root: Path) -> str:
    lines = [f"{package.name} {package.digest}" for package in load_folder(root)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_same_seed_gives_the_frozen_digests(tmp_path: Path) -> None:
    write_bank(tmp_path / "a", FAMILIES, 18, seed=0)
    assert _fingerprint(tmp_path / "a") == FROZEN


def test_umask_does_not_show(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        write_bank(tmp_path / "a", FAMILIES, 18, seed=0)
    finally:
        os.umask(old)
    assert _fingerprint(tmp_path / "a") == FROZEN


def test_another_seed_gives_other_tasks(tmp_path: Path) -> None:
    write_bank(tmp_path / "a", FAMILIES, 6, seed=1)
    write_bank(tmp_path / "b", FAMILIES, 6, seed=2)
    digests = [{item.digest for item in load_folder(tmp_path / name)} for name in "ab"]
    assert not digests[0] & digests[1]


def test_families_are_balanced_and_instructions_distinct(tmp_path: Path) -> None:
    write_bank(tmp_path, (), 30, seed=0)
    packages = load_folder(tmp_path)
    counts = [sum(item.family == family for item in packages) for family in FAMILIES]
    assert counts == [5] * 6
    assert len({item.instruction for item in packages}) == 30


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_over_150_distinct_tasks(tmp_path: Path, family: str) -> None:
    assert len(write_bank(tmp_path, [family], 151, seed=0)) == 151


def test_what_is_there_is_kept_and_what_differs_replaced(tmp_path: Path) -> None:
    first, second = write_bank(tmp_path, ["mv"], 2, seed=0)
    before = (first / "task.toml").stat().st_ino
    (second / "instruction.md").write_text("changed")
    (second / "extra").write_text("x")
    write_bank(tmp_path, ["mv"], 2, seed=0)
    assert (first / "task.toml").stat().st_ino == before
    assert (second / "instruction.md").read_text() != "changed"
    assert not (second / "extra").exists()
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted([first.name, second.name])


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown task family 'fly'"):
        write_bank(tmp_path, ["fly"], 1, seed=0)


def test_more_tasks_than_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no further distinct task"):
        write_bank(tmp_path, ["mkdir"], 400, seed=0)
