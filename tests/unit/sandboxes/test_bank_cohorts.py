"""The cohort screen116: frozen, the same everywhere, and what is drawn from it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rl.config import TasksConfig
from rl.records import TaskRef
from rl.split import load_tasks, split
from sandboxes.bank import write_bank
from sandboxes.bank.cohorts import COHORTS
from sandboxes.bank.families import FAMILIES, Family, draw_package
from sandboxes.dockerfile import parse_dockerfile
from tests.support.packages import expectations

COHORT = COHORTS["screen116"]
# Of the names and content digests below; each changes exactly when the cohort does.
FROZEN = "f1b50e4f50cb392af943ab690c64039207259c4fc10a75eae185561e6b1079d7"
FROZEN_SPLIT = "0930713a81fa8913ed4e31cb9d67ad7fcd6171c7b5bd1828ee6fc0988bc13377"
FROZEN_NEW = "2a258c43619a613ee910c307b1d25b27f088a30281b18744b446fec898559385"
PRINT = """
from sandboxes.bank.cohorts import COHORTS
for task in COHORTS["screen116"].tasks():
    print(task.name, task.digest)
"""


def _fingerprint(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screen116")
    COHORT.write(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(root: Path) -> list[TaskRef]:
    return load_tasks(root)


def test_listing_is_frozen() -> None:
    lines = [f"{task.name} {task.digest}" for task in COHORT.tasks()]
    assert _fingerprint(lines) == FROZEN


def test_the_new_cohort_is_frozen_and_repeats_nothing() -> None:
    new = COHORTS["screen100"].tasks()
    assert _fingerprint([f"{task.name} {task.digest}" for task in new]) == FROZEN_NEW
    assert Counter(task.tier for task in new) == {1: 18, 2: 42, 3: 40}
    old = COHORT.tasks()
    assert not {task.digest for task in new} & {task.digest for task in old}
    assert not {task.name for task in new} & {task.name for task in old}


def test_listing_is_that_of_another_process_with_another_hash_seed(project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [f"{task.name} {task.digest}" for task in COHORT.tasks()]


def test_digests_are_those_of_the_packages_on_disk(tasks: list[TaskRef]) -> None:
    listed = {task.name: (task.digest, task.family) for task in COHORT.tasks()}
    assert {task.name: (task.digest, task.family) for task in tasks} == listed


def test_116_tasks_in_23_families_over_three_tiers(tasks: list[TaskRef]) -> None:
    assert Counter(task.tier for task in COHORT.tasks()) == {1: 24, 2: 42, 3: 50}
    assert set(Counter(task.family for task in COHORT.tasks())) == set(FAMILIES)
    assert len({task.instruction for task in tasks}) == len({task.digest for task in tasks}) == 116


def test_frozen_split_has_every_family_on_both_sides(tasks: list[TaskRef]) -> None:
    config = TasksConfig(source="path", path="screen116", train=80, heldout=23)
    train, heldout = split(tasks, config, "screen116")
    assert (len(train), len(heldout)) == (80, 23)
    assert not {task.digest for task in train} & {task.digest for task in heldout}
    assert Counter(task.family for task in heldout) == dict.fromkeys(FAMILIES, 1)
    assert set(Counter(task.family for task in train).values()) <= {2, 3, 4, 5}
    lines = [task.digest for task in (*train, *heldout)]
    assert _fingerprint(lines) == FROZEN_SPLIT


def test_every_given_file_is_looked_at(root: Path) -> None:
    """By itself, as part of a folder, or as a program; those that the set-up packs aside."""
    for package in root.iterdir():
        expected = package / "tests" / "expected.py"
        if not expected.exists() or (package / "environment" / "setup.sh").exists():
            continue
        items = expectations(package)
        paths = {item.get("path") for item in items}
        folders = tuple(f"{item['path']}/" for item in items if item["kind"] == "files.names")
        given = package / "environment" / "files"
        for path in given.rglob("*"):
            name = path.relative_to(given).as_posix()
            assert path.is_dir() or name in paths or name.startswith(folders), package.name


def test_no_environment_gives_away_what_is_expected(root: Path) -> None:
    for package in root.iterdir():
        expected = package / "tests" / "expected.py"
        if not expected.exists():
            continue
        given = [
            path.read_bytes().decode("latin-1")
            for path in (package / "environment" / "files").rglob("*")
            if path.is_file()
        ]
        for item in expectations(package):
            if item["kind"] == "files.text":
                assert not any(item["content"] in text for text in given), package.name


def test_environment_builds_from_the_supported_dockerfile_alone(root: Path) -> None:
    for package in root.iterdir():
        assert parse_dockerfile(package / "environment" / "Dockerfile").workdir == "/app"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_family_has_other_tasks_under_another_seed(family: Family) -> None:
    first, second = (
        {draw_package(family, seed, turn, turn, seen).digest for turn in range(8)}
        for seed, seen in ((1, set[str]()), (2, set[str]()))
    )
    assert len(first) == len(second) == 8
    assert not first & second


def test_write_bank_takes_families_of_any_tier_in_turn(tmp_path: Path) -> None:
    paths = write_bank(tmp_path, ["tally", "rm", "repair"], 6, seed=0)
    assert [path.name.split("-")[0] for path in paths] == ["tally", "rm", "repair"] * 2
    assert {path.parent for path in paths} == {tmp_path}
