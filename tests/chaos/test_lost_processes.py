"""Processes that are killed in the middle of training: nothing is lost, nobody is blamed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from rl.evidence.traces import read_traces
from tests.support.campaigns import (
    SYSTEM,
    events,
    processes_naming,
    small_config,
    start_final,
    write_config,
)
from tests.support.tiny_model import make_tiny_model

ENGINE = {
    "kind": "scripted",
    "scripted": {"replies": ["```bash\ntouch a\n```"], "latency_s": 0.5},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["actors.scripted_engine", "ray::EpisodeWorker"])
def test_a_killed_process_is_replaced_and_its_attempts_are_masked(
    victim: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", [SYSTEM, "```bash\ntouch a\n```"])
    settings = small_config(
        model, engine=ENGINE, schedule={"updates": 5}, checkpoints={"updates": []}
    )
    config = write_config(tmp_path / "small.toml", settings)
    log = tmp_path / "log"
    run = start_final(
        *("--config", str(config), "--state", str(tmp_path), "--run-id", "hurt"),
        "--no-dashboard",
        log=log,
    )
    campaign = tmp_path / "campaigns" / "hurt"
    limit = time.monotonic() + 300
    while not any(row["kind"] == "checkpoint" for row in events(campaign)):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(max(processes_naming(victim)), signal.SIGKILL)
    assert run.wait(timeout=400) == 0, log.read_text()

    directory = CampaignDir(campaign)
    assert json.loads(directory.audit.read_text())["findings"] == []
    records = list(read_traces(directory.train_trace))
    outcomes = Counter(record.outcome for record in records)
    assert outcomes["graded"] >= 5 * 8
    assert all(record.reward is None for record in records if record.outcome == "masked")
    if victim == "actors.scripted_engine":
        kinds = Counter(row["kind"] for row in events(campaign))
        assert kinds["replica_lost"] == kinds["replica_back"] == 1
    else:
        assert outcomes["masked"] > 0
    assert not processes_naming(str(tmp_path))
