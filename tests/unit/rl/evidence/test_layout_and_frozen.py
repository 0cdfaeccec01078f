import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence import layout
from rl.evidence.code_pin import pin_code
from rl.evidence.frozen import (
    CodePin,
    Frozen,
    ModelPin,
    freeze,
    load_frozen,
    pin_model,
    verify_frozen,
)
from rl.evidence.layout import CampaignDir
from tests.unit.rl.evidence.synthetic import build, campaign_config, tasks

MODEL = ModelPin(name="m", source="path", pin="p", files={"w": "0" * 64})
CODE = CodePin(commit="1" * 40, dirty=False, packages={"ray": "1"})


def frozen(root: Path) -> tuple[CampaignDir, Frozen]:
    directory = layout.create("run-1", root)
    train, held = tasks("train", 2), tasks("held", 2)
    made = freeze(directory, campaign_config(), train=train, heldout=held, model=MODEL, code=CODE)
    return directory, made


def test_run_ids_carry_name_and_time() -> None:
    assert layout.new_run_id("local", 0.0).startswith("local-19")
    assert len(layout.new_run_id("x", 1.0)) == len("x-YYYYmmdd-HHMMSS")


def test_an_occupied_run_id_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    frozen(tmp_path)
    with pytest.raises(ConfigurationError, match="is taken by a run of 20") as caught:
        layout.create("run-1", tmp_path)
    assert "--resume" in caught.value.remedy and "--run-id" in caught.value.remedy


def test_an_occupied_run_id_that_was_not_frozen_cannot_be_continued(tmp_path: Path) -> None:
    layout.create("run-1", tmp_path)
    with pytest.raises(ConfigurationError, match="was not frozen") as caught:
        layout.create("run-1", tmp_path)
    assert "--resume" not in caught.value.remedy
    assert "--run-id" in caught.value.remedy and "remove the directory" in caught.value.remedy


@pytest.mark.parametrize("run_id", ["../x", "", "a/b", ".hidden", "nl\n", "x" * 101, "\udcff"])
@pytest.mark.parametrize("use", [layout.create, layout.open_existing])
def test_a_run_id_is_a_plain_name(tmp_path: Path, run_id: str, use: Any) -> None:
    with pytest.raises(ConfigurationError, match="can't be a run id") as caught:
        use(run_id, tmp_path)
    assert caught.value.where == "run id" and caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda path: path.mkdir(), "cannot be read: is a directory"),
        (lambda path: path.write_text("{"), "not a valid record"),
        (lambda path: path.write_text("[" * 100_000), "not a valid record"),
        (lambda path: None, "stopped before it was frozen"),
    ],
)
def test_an_unreadable_frozen_json_is_one_message(
    tmp_path: Path, damage: Callable[[Path], object], wanted: str
) -> None:
    directory = layout.create("run-1", tmp_path)
    damage(directory.frozen)
    with pytest.raises(EvidenceError, match=wanted) as caught:
        load_frozen(directory)
    assert caught.value.where == str(directory.frozen) and caught.value.remedy


def test_a_git_that_fails_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /nowhere")
    with pytest.raises(EvidenceError, match="git rev-parse failed") as caught:
        pin_code(tmp_path)
    assert f"git -C {tmp_path} rev-parse HEAD" in caught.value.remedy


def test_an_unknown_run_names_the_newest_ones(tmp_path: Path) -> None:
    layout.create("run-1", tmp_path)
    assert layout.open_existing("run-1", tmp_path).run_id == "run-1"
    with pytest.raises(ConfigurationError) as caught:
        layout.open_existing("run-2", tmp_path)
    assert "run-1" in caught.value.remedy


def test_a_folder_without_frozen_json_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"frozen\.json"):
        layout.open_path(tmp_path)


def test_what_was_frozen_verifies_and_is_written_once(tmp_path: Path) -> None:
    directory, made = frozen(tmp_path)
    train, held = tasks("train", 2), tasks("held", 2)
    config = campaign_config()
    again = verify_frozen(directory, config, train=train, heldout=held, model=MODEL, code=CODE)
    assert again == made == load_frozen(directory)
    assert made.campaign_config() == config
    with pytest.raises(EvidenceError, match="never overwritten"):
        freeze(directory, config, train=train, heldout=held, model=MODEL, code=CODE)


def test_every_difference_is_named(tmp_path: Path) -> None:
    directory, _ = frozen(tmp_path)
    train = tasks("train", 2)
    changed = [train[0].model_copy(update={"digest": "f" * 64})]
    with pytest.raises(ConfigurationError) as caught:
        verify_frozen(
            directory,
            campaign_config(updates=7),
            train=changed,
            heldout=tasks("held", 3),
            model=MODEL.model_copy(update={"files": {"w": "1" * 64}}),
            code=CODE.model_copy(update={"packages": {"ray": "2"}}),
        )
    for part in (
        "configuration schedule.updates: 6 -> 7",
        "training task 'mkdir-train-00' has other content",
        "training task 'touch-train-01' is gone",
        "held-out task 'remove-held-02' is new",
        "model file w differs",
        "package ray: 1 -> 2",
    ):
        assert part in caught.value.what


def test_a_leaked_task_is_named_before_anything_is_written(tmp_path: Path) -> None:
    directory = layout.create("run-1", tmp_path)
    train = tasks("train", 2)
    leaked = train[1].model_copy(update={"name": "innocent"})
    with pytest.raises(ConfigurationError, match=r"'innocent'.*'touch-train-01'"):
        freeze(directory, campaign_config(), train=train, heldout=[leaked], model=MODEL, code=CODE)
    assert not directory.frozen.exists()


def test_the_model_is_pinned_by_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    pin = pin_model(campaign_config().model, tmp_path)
    assert (pin.name, pin.pin, list(pin.files)) == (
        "tiny-135m",
        "state/models/tiny",
        ["config.json"],
    )


def test_the_code_pin_sees_local_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    assert pin_code(tmp_path).commit is None
    git("init", "-q")
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    clean = pin_code(tmp_path)
    assert clean.commit and not clean.dirty and clean.diff_sha256 is None
    (tmp_path / "b.py").write_text("2")
    new = pin_code(tmp_path)
    (tmp_path / "b.py").write_text("3")
    assert new.dirty and new.diff_sha256 != pin_code(tmp_path).diff_sha256


def test_repair_and_rewind_keep_each_update_once(tmp_path: Path) -> None:
    directory = build(tmp_path, finish=False)
    with directory.metrics.open("a") as file:
        file.write("{")
    directory.trace("train").write_bytes(directory.trace("train").read_bytes()[:-3])
    cut = directory.repair()
    assert cut["metrics.jsonl"] == 1 and cut["traces/train.jsonl.zst"] > 0
    assert directory.repair() == {}
    assert directory.rewind(2) == 2
    assert [row.update for row in directory.metrics_rows().read()] == [1, 2]
    assert [row.update for row in directory.update_rows().read()] == [1, 2]
    assert len(directory.superseded.read_text().splitlines()) == 2
    assert directory.rewind(2) == 0
