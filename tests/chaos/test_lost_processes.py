"""Processes that are killed in the middle of training: nothing is lost, nobody is blamed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from tests.support.campaigns import events, processes_naming, start_scripted


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["actors.scripted_engine", "ray::EpisodeWorker"])
def test_a_killed_process_is_replaced_and_its_attempts_are_masked(
    victim: str, tmp_path: Path
) -> None:
    run = start_scripted(tmp_path, tmp_path, "hurt", updates=5)
    os.kill(max(processes_naming(victim)), signal.SIGKILL)
    assert run.process.wait(timeout=400) == 0, run.log.read_text()

    directory = CampaignDir(run.campaign)
    assert json.loads(directory.audit.read_text())["findings"] == []
    records = list(directory.episodes("train"))
    outcomes = Counter(record.outcome for record in records)
    assert [row.update for row in directory.metrics_rows().read()] == [1, 2, 3, 4, 5]
    assert outcomes["graded"] > 4 * 8  # groups may lose attempts to the fault, never a batch
    assert all(record.reward is None for record in records if record.outcome == "masked")
    if victim == "actors.scripted_engine":
        kinds = Counter(row["kind"] for row in events(run.campaign))
        assert kinds["replica_lost"] == kinds["replica_back"] == 1
    else:
        assert outcomes["masked"] > 0
    assert not processes_naming(str(tmp_path))
