"""`python -m rl.prepare tasks`: cohorts are listed, pinned, guarded; bad input is explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.config import TasksConfig
from rl.errors import EXIT_OK, ConfigurationError, TaskPackageError
from rl.prepare import main, prepare_tasks
from sandboxes.tasks import load_folder
from tests.support.packages import write_package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("copy-a", "copy-b", "move-a", "move-b")):
        write_package(tmp_path / "bank", name, family=name.split("-")[0], tier=1 + index % 2)
    return tmp_path / "bank"


def run(tmp_path: Path, *arguments: str) -> None:
    assert main(["tasks", "--root", str(tmp_path / "state"), *arguments]) == EXIT_OK


def test_list_prints_one_task_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--from", str(folder), "--cohort", "four", "--list")
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        [package.name, package.family, str(package.tier), package.digest]
        for package in load_folder(folder)
    ]


def test_json_names_folder_manifest_and_tasks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--from", str(folder), "--json")
    (cohort,) = json.loads(capsys.readouterr().out)
    assert cohort["folder"] == str(folder)
    assert cohort["manifest"] == str(tmp_path / "state" / "cohorts" / "bank.json")
    assert [package["name"] for package in cohort["packages"]] == [
        path.name for path in sorted(folder.iterdir())
    ]


def test_printed_pins_are_a_source_that_prepares_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--from", str(folder), "--cohort", "four", "--pins")
    source = tmp_path / "task-source.json"
    source.write_text(capsys.readouterr().out)
    assert not (tmp_path / "state").exists()
    run(tmp_path, "--source", str(source))
    assert "cohort four is ready: 4 packages" in capsys.readouterr().out
    config = TasksConfig(source="cohort", cohort="four", pins=str(source), train=2, heldout=2)
    tasks = prepare_tasks(config, tmp_path / "state")
    assert {task.name for task in (*tasks.train, *tasks.heldout)} == {
        path.name for path in folder.iterdir()
    }
    assert all((tasks.root / task.path / "task.toml").is_file() for task in tasks.train)


def test_folder_that_has_changed_since_it_was_pinned_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    run(tmp_path, "--from", str(folder))
    (folder / "copy-b" / "environment" / "files" / "x~").write_text("")
    with pytest.raises(TaskPackageError, match="environment/files/x~ has been added"):
        run(tmp_path, "--from", str(folder))


def test_unfit_packages_are_all_named_and_may_be_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "copy-a" / "instruction.md").write_text("")
    with (folder / "move-a" / "task.toml").open("a") as file:
        file.write("gpus = 1\n")
    with pytest.raises(TaskPackageError) as caught:
        run(tmp_path, "--from", str(folder), "--list")
    assert "copy-a/instruction.md: is empty" in caught.value.what
    assert "move-a/task.toml: line 17: environment.gpus: GPUs" in caught.value.what
    assert "--skip-unfit" in caught.value.remedy
    capsys.readouterr()
    run(tmp_path, "--from", str(folder), "--list", "--skip-unfit")
    printed = capsys.readouterr()
    assert [line.split("\t")[0] for line in printed.out.splitlines()] == ["copy-b", "move-b"]
    assert "left out" in printed.err and "copy-a" in printed.err


def test_key_without_effect_is_a_warning_beside_the_list(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "copy-a" / "task.toml"
    path.write_text(f'difficulty = "hard"\n{path.read_text()}')
    run(tmp_path, "--from", str(folder), "--list")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert printed.err == f"warning: {path}: line 1: unknown key 'difficulty' is ignored\n"


def test_unknown_cohort_names_those_there_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--from", str(folder), "--pins")
    source = tmp_path / "task-source.json"
    source.write_text(capsys.readouterr().out)
    with pytest.raises(ConfigurationError, match="no cohort 'x'") as caught:
        run(tmp_path, "--source", str(source), "--cohort", "x")
    assert "bank" in caught.value.remedy


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "--list"],
        ["model", "--from", "x"],
        ["tasks", "--config", "x", "--list"],
        ["tasks", "--pins", "--list"],
        ["tasks", "--pins", "--source", "x"],
        ["tasks", "--skip-unfit"],
        ["tasks", "--from", "x", "--source", "y"],
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "cohort"},
        {"source": "path", "path": "x", "cohort": "c"},
        {"source": "path", "path": "x", "pins": "x"},
    ],
)
def test_half_a_cohort_is_no_configuration(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is given"):
        TasksConfig.model_validate({"train": 1, "heldout": 1, **changes})
