"""A cohort is pinned to the byte: what differs anywhere is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.errors import ConfigurationError, EvidenceError, TaskPackageError
from sandboxes.manifest import pin_folder, prepare_cohort
from sandboxes.source import (
    SHIPPED,
    FolderSource,
    TaskSource,
    pin_embedded,
    read_task_source,
)
from tests.support.packages import write_package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("copy-a", "move-b"):
        write_package(tmp_path / "bank", name, family=name.split("-")[0], tier=2)
    return tmp_path / "bank"


@pytest.fixture
def source(folder: Path) -> TaskSource:
    return pin_folder(folder, "two").source


def test_manifest_holds_source_packages_and_every_file(
    folder: Path, source: TaskSource, tmp_path: Path
) -> None:
    cohort = prepare_cohort(source, "two", tmp_path / "state")
    data = json.loads(cohort.path.read_text())
    assert data["cohort"] == "two"
    assert data["source"] == {"kind": "folder", "path": str(folder)}
    first = data["packages"][0]
    assert (first["name"], first["family"], first["tier"]) == ("copy-a", "copy", 2)
    assert first["digest"] == source.cohorts["two"]["copy-a"]
    assert set(first["files"]) == {
        "task.toml",
        "instruction.md",
        "environment/Dockerfile",
        "environment/files/copy-a.txt",
        "solution/solve.sh",
        "tests/test.sh",
    }
    assert first["files"]["tests/test.sh"].startswith("100755 ")


def change_a_byte(package: Path) -> str:
    path = package / "solution" / "solve.sh"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    return "solution/solve.sh has changed"


def add_a_file(package: Path) -> str:
    (package / "environment" / "files" / "extra").write_text("")
    return "environment/files/extra has been added"


def add_what_harbor_ignores(package: Path) -> str:
    (package / "environment" / "files" / "x.pyc").write_text("")
    return "environment/files/x.pyc has been added"


def add_outside_the_published_folders(package: Path) -> str:
    (package / "notes.txt").write_text("")
    return "notes.txt has been added"


def remove_a_file(package: Path) -> str:
    (package / "environment" / "files" / "copy-a.txt").unlink()
    return "environment/files/copy-a.txt is missing"


def replace_by_a_link(package: Path) -> str:
    (package / "instruction.md").rename(package / "README.md")
    (package / "instruction.md").symlink_to("README.md")
    return "instruction.md has changed"


def make_executable(package: Path) -> str:
    (package / "instruction.md").chmod(0o755)
    return "instruction.md is of another mode"


def break_the_configuration(package: Path) -> str:
    (package / "task.toml").write_text("= nothing")
    return "task.toml has changed"


@pytest.mark.parametrize(
    "damage",
    [
        change_a_byte,
        add_a_file,
        add_what_harbor_ignores,
        add_outside_the_published_folders,
        remove_a_file,
        replace_by_a_link,
        make_executable,
        break_the_configuration,
    ],
)
def test_any_difference_is_refused_by_name(
    folder: Path, source: TaskSource, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    written = prepare_cohort(source, "two", tmp_path / "state").path
    before = written.read_bytes()
    prepare_cohort(source, "two", tmp_path / "state")
    expected = damage(folder / "copy-a")
    with pytest.raises(TaskPackageError) as caught:
        prepare_cohort(source, "two", tmp_path / "state")
    assert expected in caught.value.what and caught.value.where == str(folder / "copy-a")
    assert caught.value.remedy
    assert written.read_bytes() == before


def test_missing_package_is_refused_by_name(
    folder: Path, source: TaskSource, tmp_path: Path
) -> None:
    prepare_cohort(source, "two", tmp_path / "state")
    (folder / "move-b").rename(folder / "gone")
    with pytest.raises(TaskPackageError, match="the package is missing") as caught:
        prepare_cohort(source, "two", tmp_path / "state")
    assert caught.value.where == str(folder / "move-b")


def test_digest_other_than_the_pin_is_refused_before_anything_is_written(
    folder: Path, source: TaskSource, tmp_path: Path
) -> None:
    change_a_byte(folder / "move-b")
    with pytest.raises(TaskPackageError, match=r"content digest .* pinned") as caught:
        prepare_cohort(source, "two", tmp_path / "state")
    assert caught.value.where == str(folder / "move-b")
    assert not (tmp_path / "state" / "cohorts" / "two.json").exists()


def test_manifest_is_never_overwritten_by_another(
    folder: Path, source: TaskSource, tmp_path: Path
) -> None:
    path = prepare_cohort(source, "two", tmp_path / "state").path
    before = path.read_bytes()
    write_package(folder, "touch-c")
    larger = pin_folder(folder, "two").source
    with pytest.raises(ConfigurationError, match="package touch-c is new in it") as caught:
        prepare_cohort(larger, "two", tmp_path / "state")
    assert caught.value.where == str(path) and "--cohort" in caught.value.remedy
    moved = source.model_copy(update={"source": FolderSource(path=str(folder.parent))})
    with pytest.raises(ConfigurationError, match="was another one before: source"):
        prepare_cohort(moved, "two", tmp_path / "state")
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema_version": 2}', b"\xff"])
def test_manifest_that_is_none_is_refused(
    source: TaskSource, tmp_path: Path, content: bytes
) -> None:
    path = prepare_cohort(source, "two", tmp_path / "state").path
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="no valid manifest"):
        prepare_cohort(source, "two", tmp_path / "state")


def test_folder_is_pinned_without_what_cannot_be_used(folder: Path) -> None:
    (folder / "move-b" / "instruction.md").write_text("")
    pinned = pin_folder(folder)
    source, left_out = pinned.source, pinned.left_out
    assert list(source.cohorts) == ["bank"] and list(source.cohorts["bank"]) == ["copy-a"]
    assert left_out is not None and left_out.where.endswith("move-b/instruction.md")


def test_linked_package_is_left_out_by_name(folder: Path, tmp_path: Path) -> None:
    elsewhere = write_package(tmp_path / "elsewhere", "far-c")
    (folder / "linked").symlink_to(elsewhere)
    pinned = pin_folder(folder)
    assert set(pinned.source.cohorts["bank"]) == {"copy-a", "move-b"}
    assert pinned.left_out is not None and pinned.left_out.where == str(elsewhere)


def test_name_that_no_cohort_has_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="cohort's or a package's name"):
        pin_folder(folder, "../x")


# --- the task source file -----------------------------------------------------


def write_source(path: Path, **changes: object) -> Path:
    data = {
        "schema_version": 1,
        "source": {"kind": "git", "url": "https://example.org/x.git", "commit": "a" * 40},
        "cohorts": {"c": {"p": "b" * 64}},
    }
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_relative_folder_is_taken_from_the_file(tmp_path: Path) -> None:
    path = write_source(tmp_path / "s.json", source={"kind": "folder", "path": "bank"})
    assert read_task_source(path).source == FolderSource(path=str(tmp_path / "bank"))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"more": 1}, "more"),
        ({"cohorts": {}}, "cohorts"),
        ({"cohorts": {"c": {"p": "b" * 63}}}, "cohorts.c.p"),
        ({"cohorts": {"c": {"../p": "b" * 64}}}, "cohorts.c.../p"),
        ({"cohorts": {"C/": {"p": "b" * 64}}}, "cohorts.C/"),
        ({"source": {"kind": "git", "url": "https://h/x", "commit": "abc"}}, "commit"),
        ({"source": {"kind": "git", "url": "https://h/x", "commit": "a" * 40, "ref": "v1"}}, "ref"),
        ({"source": {"kind": "git", "url": "https://u:s@h/x", "commit": "a" * 40}}, "password"),
        ({"source": {"kind": "git", "url": "ext::sh -c id", "commit": "a" * 40}}, "URL"),
        ({"source": {"kind": "git", "url": "--upload-pack=id", "commit": "a" * 40}}, "URL"),
        (
            {"source": {"kind": "git", "url": "https://h/x", "commit": "a" * 40, "folder": "../x"}},
            "folder",
        ),
        ({"source": {"kind": "else"}}, "source"),
    ],
)
def test_source_file_is_strict(tmp_path: Path, changes: dict[str, object], key: str) -> None:
    path = write_source(tmp_path / "s.json", **changes)
    with pytest.raises(ConfigurationError) as caught:
        read_task_source(path)
    assert key in caught.value.what and caught.value.where == str(path) and caught.value.remedy


def test_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    text = write_source(path).read_text()
    path.write_text(text.replace('{"p": "', '{"p": "' + "c" * 64 + '", "p": "'))
    with pytest.raises(ConfigurationError, match="key 'p' stands twice"):
        read_task_source(path)


def test_shipped_source_pins_the_bank_as_it_is_made() -> None:
    assert read_task_source(SHIPPED) == pin_embedded()


def test_shipped_cohort_is_made_verified_and_guarded(tmp_path: Path) -> None:
    cohort = prepare_cohort(read_task_source(SHIPPED), "screen116", tmp_path)
    assert len(cohort.packages) == 116
    assert not [warning for package in cohort.packages for warning in package.warnings]
    (cohort.folder / cohort.packages[7].name / "x").write_text("")
    with pytest.raises(TaskPackageError, match="x has been added") as caught:
        prepare_cohort(read_task_source(SHIPPED), "screen116", tmp_path)
    assert f"rm -r {cohort.folder}" in caught.value.remedy
