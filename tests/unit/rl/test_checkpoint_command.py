"""`python -m rl.checkpoint`: what it says, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rl import checkpoint as command
from rl.errors import run_command
from rl.learner import durable
from rl.learner.checkpoint import save_checkpoint
from rl.learner.state import LearnerState
from tests.support.checkpoints import make_state, save


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder whose one campaign has checkpoints 1 and 2."""
    root = tmp_path / "state" / "campaigns" / "run" / "checkpoints"
    save(root, 1)
    save(root, 2)
    return tmp_path / "state"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        run_command(command.main, [str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_list_takes_a_run_id_a_campaign_and_a_folder(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = state / "campaigns" / "run"
    for path in ("run", campaign, campaign / "checkpoints"):
        assert run("list", path, "--state", state) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [
            ["update-0001", "complete"],
            ["update-0002", "complete"],
        ]
        assert lines[1].endswith("latest")


def test_list_names_damage_and_leftovers(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = state / "campaigns" / "run" / "checkpoints"
    (root / "update-0002" / "optimizer.pt").write_bytes(b"short")
    (root / f"{durable.TEMPORARY}update-0003-9").mkdir()
    assert run("list", "run", "--state", state, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    states = [(Path(row["path"]).name, row["state"]) for row in found["checkpoints"]]
    assert states == [
        ("update-0001", "complete"),
        ("update-0002", "damaged"),
        (".tmp-update-0003-9", "unfinished"),
    ]
    assert found["checkpoints"][1]["problem"].startswith("optimizer.pt has 5 bytes")
    assert run("list", "run", "--state", state) == 0
    assert "damaged: optimizer.pt" in capsys.readouterr().out


def test_verify_says_what_it_is_and_names_what_is_damaged(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / "campaigns" / "run" / "checkpoints" / "update-0001"
    assert run("verify", path) == 0
    assert "whole; update 1, 4 files" in capsys.readouterr().out
    assert run("verify", "run", "--state", state, "--json") == 0
    assert json.loads(capsys.readouterr().out)["update"] == 2
    content = bytearray((path / "optimizer.pt").read_bytes())
    content[7] ^= 1
    (path / "optimizer.pt").write_bytes(content)
    assert run("verify", path) == 2
    message = capsys.readouterr().err
    assert str(path / "optimizer.pt") in message and "sha256" in message


def test_diff_answers_as_diff_does(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = state / "campaigns" / "run" / "checkpoints"
    copy = shutil.copytree(root / "update-0002", tmp_path / "copy")
    assert run("diff", root / "update-0002", copy) == 0
    assert "the same" in capsys.readouterr().out
    assert run("diff", root / "update-0001", "run", "--state", state) == 1
    text = capsys.readouterr().out
    assert "update         1 and 2" in text and text.endswith("different\n")
    assert run("diff", root / "update-0001", copy, "--json") == 1
    assert json.loads(capsys.readouterr().out)["same"] is False


@pytest.mark.parametrize("verb", ["list", "verify", "probe", "diff"])
@pytest.mark.parametrize("what", ["missing", "file", "empty", "no-checkpoints"])
def test_bad_input_is_one_message(
    tmp_path: Path, verb: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("x")
    elif what == "empty":
        path.mkdir()
    elif what == "no-checkpoints":
        path.mkdir()
        (path / "frozen.json").write_text("{}")
    both = (path, path) if verb == "diff" else (path,)
    assert run(verb, *both, "--state", tmp_path / "none") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {path}")
    assert message.count("error:") == 1 and "Traceback" not in message


def test_probe_needs_to_know_the_base_model(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("probe", "run", "--state", state, "--engine", "none") == 2
    assert "--model DIR" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tolerance=-1", "--tolerance=nan", "--deadline=0"])
def test_probe_refuses_a_limit_that_is_none(
    state: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("probe", "run", "--state", state, option) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_probe_compares_peft_with_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rl.learner.stand_in import make_tiny_model
    from tests.support.tiny_adapter import make_adapter

    model = make_tiny_model(tmp_path / "model", ["a short text"] * 5)
    adapter = make_adapter(model, tmp_path, 3, list(range(5, 29)))
    good = save_checkpoint(tmp_path / "good", 3, LearnerState(adapter, b"x"), {}, "a" * 64)
    probe = ("probe", good, "--model", model, "--engine", "none")
    assert run(*probe) == 0
    printed = capsys.readouterr()
    assert "in agreement" in printed.out
    assert "verifying manifest and hashes" in printed.err
    assert run(*probe, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] and report["largest"] < 1e-4
    assert report["prompts"][0]["change"] > 0.01, "the adapter does something"

    other = make_adapter(model, tmp_path, 4, list(range(5, 29)))
    wrong = adapter.model_copy(update={"probe": other.probe})
    bad = save_checkpoint(tmp_path / "bad", 3, LearnerState(wrong, b"x"), {}, "a" * 64)
    assert run("probe", bad, "--model", model, "--engine", "none") == 1
    assert "DIFFERENT" in capsys.readouterr().out

    foreign = LearnerState(make_state(3).adapter, b"x")
    path = save_checkpoint(tmp_path / "foreign", 3, foreign, {}, "a" * 64)
    assert run("probe", path, "--model", model, "--engine", "none") == 2
    assert str(path / "adapter") in capsys.readouterr().err
