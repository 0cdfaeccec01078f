"""`rl.final`'s command line: bad input is one message with a remedy and exit code 2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def final(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl.final", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "nowhere.toml"], ["nowhere.toml", "no such configuration file"]),
        (["--set", "schedule.batchsize=4"], ["schedule.batchsize", "batch_size"]),
        (["--set", "schedule.updates=many"], ["schedule.updates", "integer"]),
        (["--set", "schedule.batch_size=47"], ["47", "multiple of group_size"]),
        (["--set", "oops"], ["--set oops", "KEY=VALUE"]),
        (["--resume", "never-was", "--state", "nowhere"], ["never-was", "no run"]),
        (["--run-id", "../x"], ["../x", "run id"]),
    ],
)
def test_bad_input_ends_in_one_message_with_exit_code_2(
    arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    if "--state" not in arguments:
        arguments = [*arguments, "--state", str(tmp_path)]
    if "--run-id" in arguments:  # reach the directory's creation without a model
        model = tmp_path / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
        arguments += [
            "--set",
            "model.source=path",
            "--set",
            f"model.path={model}",
            "--set",
            "tasks.train=6",
            "--set",
            "tasks.heldout=6",
        ]
    done = final(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    for text in expected:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "campaigns").exists() or not any((tmp_path / "campaigns").iterdir())


def test_a_missing_bubblewrap_is_named_with_its_install_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rl.final", "--state", str(tmp_path)],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "bubblewrap" in done.stderr
    assert "apt-get install bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr


def test_resume_refuses_another_configuration(tmp_path: Path) -> None:
    (tmp_path / "campaigns" / "old").mkdir(parents=True)
    done = final("--resume", "old", "--seed", "3", "--state", str(tmp_path))
    assert done.returncode == 2
    assert "--seed" in done.stderr
    assert "frozen" in done.stderr


def test_a_corrupt_task_package_is_named_before_anything_starts(tmp_path: Path) -> None:
    from sandboxes.bank import write_bank

    tasks = tmp_path / "tasks"
    packages = write_bank(tasks, (), 12, 0)
    with (packages[0] / "task.toml").open("a", encoding="utf-8") as file:
        file.write("\n[agent]\ntimeout_seconds = 5\n")
    done = final(
        "--plan",
        "--state",
        str(tmp_path),
        "--set",
        "tasks.source=path",
        "--set",
        f"tasks.path={tasks}",
        "--set",
        "tasks.families=[]",
        "--set",
        "tasks.train=6",
        "--set",
        "tasks.heldout=6",
    )
    assert done.returncode == 2
    assert packages[0].name in done.stderr
    assert "Traceback" not in done.stderr
    shutil.rmtree(tasks)


def test_a_missing_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    done = final(
        "--state", str(tmp_path), "--set", "model.source=path", "--set", f"model.path={tmp_path}/no"
    )
    assert done.returncode == 2
    assert f"{tmp_path}/no" in done.stderr
    assert "no such model directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_packaged_model_with_another_digest_is_refused(tmp_path: Path) -> None:
    done = final("--state", str(tmp_path), "--set", f"model.sha256={'0' * 64}")
    assert done.returncode == 2
    assert "sha256" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_checks_the_model_and_the_tasks_and_leaves_no_campaign(tmp_path: Path) -> None:
    done = final("--plan", "--state", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "has the pinned sha256" in done.stdout
    assert "Nothing was started" in done.stdout
    assert not (tmp_path / "campaigns").exists()
    wrong = final("--plan", "--state", str(tmp_path), "--set", f"model.sha256={'0' * 64}")
    assert wrong.returncode == 2
    assert "sha256" in wrong.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume", ""],
        ["--resume", "x", "--seed", "0"],
        ["--plan", "--resume", "x"],
        ["--plan", "--train-only"],
        ["--rehearse", "--train-only"],
        ["--plan", "--take-in", "x"],
        ["--state", ""],
        ["--set", "seed=1\nschedule.updates=2"],
    ],
)
def test_nothing_that_was_asked_for_is_ignored(arguments: list[str]) -> None:
    done = final(*arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ")


def test_describe_config_lists_every_key_with_its_meaning() -> None:
    done = final("--describe-config")
    assert done.returncode == 0
    assert "schedule.max_staleness" in done.stdout
    assert all(len(line.split(None, 1)) == 2 for line in done.stdout.splitlines())
