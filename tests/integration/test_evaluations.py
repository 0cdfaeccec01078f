"""Evaluations during training, after it and elsewhere, and probes, with the scripted engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import (
    SYSTEM,
    events,
    processes_naming,
    run_final,
    small_config,
    write_config,
)
from tests.support.screens import run_command

REPLIES = ["```bash\nmkdir -p a\n```", "```bash\nls\n```"]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a campaign whose versions 0 and 2 were evaluated on the way.

    Its held-out stage was evaluated in two runs of their own.
    """
    folder = tmp_path_factory.mktemp("evaluations")
    settings = small_config(
        make_tiny_model(folder / "model", [SYSTEM, *REPLIES]),
        engine={
            "kind": "scripted",
            "scripted": {"replies": REPLIES, "latency_s": 0.1},
            "max_loras": 3,
        },
        schedule={"updates": 3},
        checkpoints={"updates": [1, 2, 3]},
        eval={"interval": 2, "at_start": True, "attempts": 2, "tasks": 3},
    )
    config = write_config(folder / "small.toml", settings)
    where = ("--state", str(folder), "--no-dashboard")
    begin = ("--config", str(config), "--run-id", "trained", "--train-only", "--json")
    done = run_final(*begin, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [arm["arm"] for arm in json.loads(done.stdout)["arms"]] == ["base", "step3"]
    assert "rl.heldout trained --shard 1/2" in done.stderr
    again = run_final("--resume", "trained", "--train-only", *where)
    assert again.returncode == 0, again.stdout + again.stderr
    for shard in (1, 2):
        which = ("trained", "--shard", f"{shard}/2", "--run-id", f"part{shard}")
        done = run_command("rl.heldout", *which, *where)
        assert done.returncode == 0, done.stdout + done.stderr
    end = run_final("--resume", "trained", "--take-in", "part1", "--take-in", "part2", *where)
    assert end.returncode == 0, end.stdout + end.stderr
    return folder


def test_shards_that_were_evaluated_elsewhere_make_the_campaign_whole(state: Path) -> None:
    directory = CampaignDir(state / "campaigns" / "trained")
    begun, stages = 0, dict[int, list[str]]()
    for row in events(directory.root):
        begun += row["kind"] == "begin"
        if row["kind"] == "stage":
            stages.setdefault(begun, []).append(row["fields"]["stage"])
    assert stages == {
        1: ["gates", "start", "train", "checkpoint"],
        2: ["gates"],  # nothing was left to train, so nothing was started
        3: ["gates", "report", "done"],  # nor to evaluate
    }
    audit = json.loads(directory.audit.read_text())
    assert audit["findings"] == []
    assert audit["checked"]["held-out episodes"] == 2 * 4 * 2
    records = list(directory.episodes("heldout"))
    assert Counter(record.arm for record in records) == {"base": 8, "step3": 8}
    assert json.loads(directory.summary.read_text())["missing"] == []
    assert directory.report.is_file()
    part = json.loads((state / "heldout" / "part1" / "frozen.json").read_text())
    assert part["config"]["engine"]["replicas"] == 1
    assert part["config"]["episodes"]["concurrency"] == 4


def test_versions_are_evaluated_on_the_way(state: Path) -> None:
    directory = CampaignDir(state / "campaigns" / "trained")
    records = list(directory.episodes("eval"))
    assert Counter(record.arm for record in records) == {"update0": 6, "update2": 6}
    weights = {row.update: row.adapter_sha256 for row in directory.update_rows().read()}
    assert {r.adapter_sha256 for r in records if r.version == 2} == {weights[2]}
    trained = {
        attempt
        for row in directory.update_rows().read()
        for group in row.groups
        for attempt in group.attempt_ids
    }
    assert not trained & {record.attempt_id for record in records}
    over = [row["fields"] for row in events(directory.root) if row["kind"] == "eval_over"]
    assert [(row["version"], row["graded"], row["reason"]) for row in over] == [
        (0, 6, ""),
        (2, 6, ""),
    ]
    assert json.loads(directory.audit.read_text())["findings"] == []
    summary = json.loads(directory.summary.read_text())
    assert [arm["version"] for arm in summary["evals"]] == [0, 2]


def test_updates_of_a_campaign_are_evaluated_afterwards(state: Path) -> None:
    arguments = ("trained", "--update", "1", "--update", "3", "--attempts", "2", "--tasks", "3")
    done = run_command(
        "rl.heldout", *arguments, "--state", str(state), "--run-id", "after", "--no-dashboard"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(state / "heldout" / "after")
    records = list(directory.episodes("heldout"))
    assert Counter(record.arm for record in records) == {"base": 6, "step1": 6, "step3": 6}
    for replica in (0, 1):  # every shard: base, then older, then newer weights
        arms = [str(record.arm) for record in records if record.replica == replica]
        assert arms == sorted(arms)
    audit = json.loads(directory.audit.read_text())
    assert audit["findings"] == []
    assert audit["checked"]["arms"] == 3
    stopped = [row["fields"] for row in events(directory.root) if row["kind"] == "stopped"]
    assert stopped == [{"problems": [], "left": []}]
    assert processes_naming(str(state)) == []


def test_a_probe_is_repeated_from_its_record(state: Path) -> None:
    probe = ("--campaign", "trained", "--tasks", "2", "--attempts", "2", "--state", str(state))
    first = run_command("rl.probe", *probe, "--run-id", "one", "--no-dashboard")
    assert first.returncode == 0, first.stdout + first.stderr
    for word in ("generate", "sampled tokens", "stop reasons", "exit codes"):
        assert word in first.stdout
    second = run_command(
        "rl.probe", "--repeat", "one", "--state", str(state), "--run-id", "two", "--no-dashboard"
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "repeated: 8 of 8 attempts sampled the same tokens as one" in second.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rl.heldout", "nobody"), "no run 'nobody'"),
        (("rl.heldout", "trained", "--update", "9"), "no checkpoint of update 9"),
        (("rl.heldout", "trained", "--shards", "5"), "5 shards"),
        (("rl.heldout", "trained", "--set", "engine.replica=1"), "did you mean 'replicas'"),
        (("rl.heldout", "--resume", "x", "--attempts", "3"), "can't be combined with --resume"),
        (("rl.probe", "--campaign", "trained", "--tasks", "99"), "99 tasks are wanted"),
        (
            ("rl.probe", "--campaign", "trained", "--families", "cooking"),
            "unknown family 'cooking'",
        ),
        (("rl.probe", "--repeat", "none"), "none"),
        (("rl.screen", "--select", "none"), "none"),
        (("rl.screen", "--low", "0.1"), "goes with --select"),
        (("rl.screen", "--select", "x", "--plan"), "can't be combined with --select"),
        (("rl.heldout", "trained", "--set", "model.name=x"), "is the campaign's own"),
        (("rl.heldout", "trained", "--tasks", "99"), "99 tasks are wanted and 4 are held out"),
        (("rl.probe", "--campaign", "trained", "--tasks", "0"), "must be at least 1"),
        (("rl.screen", "--config", "configs/local.toml"), "unknown key 'schedule'"),
        (("rl.heldout", "trained", "--shard", "3/2"), "there are shards 1 to N, N at most 4"),
        (("rl.heldout", "trained", "--shard", "0/2"), "there are shards 1 to N"),
        (("rl.heldout", "trained", "--shard", "half"), "not of the form K/N"),
        (("rl.heldout", "trained", "--shard", "1/2", "--attempts", "9"), "--attempts can't be"),
        (
            ("rl.heldout", "trained", "--shard", "1/2", "--set", "agent.temperature=0.1"),
            "agent.temperature can't be combined with --shard",
        ),
        (("rl.final", "--take-in", "part1"), "goes with --resume"),
        (("rl.final", "--resume", "trained", "--train-only", "--take-in", "x"), "without --train"),
        (("rl.final", "--resume", "trained", "--take-in", "nobody"), "no run 'nobody'"),
    ],
)
def test_wrong_input_gets_one_message(state: Path, arguments: tuple[str, ...], said: str) -> None:
    before = sorted(path.name for path in state.iterdir())
    done = run_command(*arguments, "--state", str(state))
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in state.iterdir()) == before
