"""A campaign that is stopped and continued makes, bit for bit, what it would have made."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import lifecycle_steps
from rl.evidence.traces import read_traces
from rl.learner.checkpoint import latest, load
from rl.learner.compare import compare
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import SYSTEM, events, run_final, small_config, start_final
from tests.support.campaigns import write_config as write
from tests.support.warm_start import asks_and_commands

UPDATES = 4
GROUPS = 2  # of an update
# What a metrics row says of time, and so differs between equal runs.
MEASURED = {"seconds", "wall_s"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that is a function of its configuration.

    Every group of an update is of the version before it (`max_staleness = 0`), so what
    is trained does not depend on which one is ready first; `streaming = false` takes
    the order of their sums from that as well.
    """
    folder = tmp_path_factory.mktemp("resume")
    pairs = asks_and_commands()
    replies = [f"```bash\n{command}\n```" for _, command in pairs]
    corpus = [SYSTEM, *replies, *(ask for ask, _ in pairs)]
    settings = small_config(
        make_tiny_model(folder / "model", corpus),
        schedule={"updates": UPDATES, "max_staleness": 0},
        engine={
            "kind": "scripted",
            "replicas": 1,
            "scripted": {"replies": replies, "latency_s": 0.2},
        },
        trainer={"streaming": False},
        checkpoints={"updates": [2]},
        heldout={"attempts": 1, "shards": 1, "tasks": 1},
    )
    return write(folder / "resume.toml", settings)


def stop_after(update: int, state: Path, log: Path, *arguments: str) -> None:
    """Start or continue the campaign and interrupt it when that checkpoint is written."""
    process = start_final(*arguments, "--state", str(state), "--no-dashboard", log=log)
    limit = time.monotonic() + 300
    while not any(
        row["kind"] == "checkpoint" and row["fields"]["updates_done"] >= update
        for row in events(state / "campaigns" / "run")
    ):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < limit, log.read_text(encoding="utf-8")
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130, log.read_text(encoding="utf-8")


def draw_of(group_id: str) -> int:
    found = re.fullmatch(r"g(\d+)\.\d+", group_id)
    assert found is not None
    return int(found[1])


def trained(directory: CampaignDir) -> dict[int, list[Any]]:
    """By update: each group's draw, version, and its attempts with tokens and reward."""
    records = {record.attempt_id: record for record in read_traces(directory.trace("train"))}
    return {
        row.update: sorted(
            (
                draw_of(group.group_id),
                group.version,
                [
                    (
                        attempt_id.partition("-")[2],
                        records[attempt_id].task_name,
                        records[attempt_id].reward,
                        [(s.token_ids, s.sampled, s.logprobs) for s in records[attempt_id].samples],
                    )
                    for attempt_id in group.attempt_ids
                ],
            )
            for group in row.groups
        )
        for row in directory.update_rows().read()
    }


def figures(directory: CampaignDir) -> list[dict[str, Any]]:
    rows = directory.metrics_rows().read()
    return [row.model_dump(exclude=MEASURED) for row in rows]


@pytest.mark.timeout(1800)
def test_a_stopped_and_continued_run_equals_the_undisturbed_one(
    config: Path, tmp_path: Path
) -> None:
    whole_state, cut_state = tmp_path / "whole", tmp_path / "cut"
    begin = ("--config", str(config), "--run-id", "run")
    done = run_final(*begin, "--state", str(whole_state), "--no-dashboard")
    assert done.returncode == 0, done.stdout + done.stderr
    stop_after(1, cut_state, tmp_path / "log-1", *begin)
    stop_after(2, cut_state, tmp_path / "log-2", "--resume", "run")
    done = run_final("--resume", "run", "--state", str(cut_state), "--no-dashboard")
    assert done.returncode == 0, done.stdout + done.stderr

    whole, cut = (CampaignDir(state / "campaigns" / "run") for state in (whole_state, cut_state))
    assert trained(cut) == trained(whole)
    assert figures(cut) == figures(whole)
    draws = [draw for groups in trained(cut).values() for draw, *_ in groups]
    assert draws == list(range(UPDATES * GROUPS)), "each prompt once, none skipped"
    rewards = {
        a[2] for groups in trained(cut).values() for *_, attempts in groups for a in attempts
    }
    assert rewards == {0.0, 1.0}
    adapters = [row.adapter_sha256 for row in cut.update_rows().read()]
    assert adapters == [row.adapter_sha256 for row in whole.update_rows().read()]
    assert len(set(adapters)) == UPDATES, "each update changes the adapter"
    for update in (2, UPDATES):
        name = f"update-{update:04d}"
        comparison = compare(load(cut.checkpoints / name), load(whole.checkpoints / name))
        assert comparison.same, comparison.differences
    newest = latest(cut.checkpoints)
    assert newest is not None and newest.name == f"update-{UPDATES:04d}"
    assert sorted(path.name for path in cut.checkpoints.iterdir()) == ["update-0002", newest.name]
    check_lifecycle(cut)


def check_lifecycle(directory: CampaignDir) -> None:
    """Each of three drivers started, drained, and stopped; each checkpoint has a receipt."""
    assert json.loads(directory.audit.read_text())["findings"] == []
    steps = lifecycle_steps(directory.lifecycle_rows().read())
    assert all(step.receipt is not None for step in steps)
    for incarnation in range(3):
        names = [s.intent.step for s in steps if s.intent.incarnation == incarnation]
        assert names[0] == "start" and names[-1] == "stop"
        assert "drain" in names and "checkpoint" in names
    written = [
        step.intent.detail
        for step in steps
        if step.intent.step == "checkpoint" and step.receipt and step.receipt.ending == "done"
    ]
    assert set(written) == {f"update {update}" for update in range(1, UPDATES + 1)}
