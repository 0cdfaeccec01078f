"""A whole campaign: real Ray, real vLLM on CPU, real sandboxes, real PEFT."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from rl.evidence.layout import STAGES, CampaignDir
from rl.evidence.traces import read_traces
from tests.support.campaigns import (
    ROOT,
    events,
    processes_naming,
    run_final,
    small_config,
    start_final,
    write_config,
)
from tests.support.warm_start import make_warm_model

SLOW_REPLIES = {"replies": ["```bash\ntrue\n```"], "latency_s": 0.3}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_warm_model(tmp_path_factory.mktemp("model") / "tiny")


def wait_for(condition, log: Path, seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, log.read_text(encoding="utf-8")
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_two_updates_with_real_engines_end_in_an_audited_report(
    model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "small.toml", small_config(model_dir))
    done = run_final("--config", str(config), "--state", str(tmp_path), "--run-id", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(tmp_path / "campaigns" / "whole")

    assert json.loads(directory.audit.read_text())["findings"] == []
    rows = directory.metrics_rows().read()
    assert [row.update for row in rows] == [1, 2]
    for row in rows:
        assert row.episodes == 8
        assert max(row.staleness) <= 1
        on_policy = row.staleness.get(0, 0) == row.episodes
        assert not on_policy or abs(row.mismatch_kl) < 1e-5
    train = list(read_traces(directory.trace("train")))
    assert Counter(record.outcome for record in train)["graded"] >= 16
    rewards = {record.reward for record in train if record.outcome == "graded"}
    assert rewards == {0.0, 1.0}, "rewards must differ to teach anything"
    assert not [row for row in events(directory.root) if row["kind"] == "replica_lost"]
    heldout = list(read_traces(directory.trace("heldout")))
    assert Counter(record.arm for record in heldout if record.outcome == "graded") == {
        "base": 8,
        "step2": 8,
    }
    published = [e["fields"]["version"] for e in events(directory.root) if e["kind"] == "publish"]
    assert published == [0, 1]
    checkpoints = sorted(path.name for path in directory.checkpoints.iterdir())
    assert len(checkpoints) == 2, checkpoints
    assert "<html" in directory.report.read_text(encoding="utf-8")
    assert "report:" in done.stdout
    assert processes_naming(str(tmp_path)) == []


INTERRUPTED_AT = ("gates", "start", "first batch", "train", "heldout")


@pytest.mark.timeout(900)
def test_a_campaign_interrupted_at_every_stage_stops_in_seconds_and_is_continued(
    model_dir: Path, tmp_path: Path
) -> None:
    settings = small_config(
        model_dir,
        schedule={"updates": 3},
        engine={
            "kind": "scripted",
            "scripted": {"replies": ["```bash\ntrue\n```"], "latency_s": 0.3},
        },
        checkpoints={"updates": []},
    )
    config = write_config(tmp_path / "small.toml", settings)
    campaign = tmp_path / "campaigns" / "cut"
    which = ("--config", str(config), "--run-id", "cut")
    for stage in INTERRUPTED_AT:
        interrupt_at(stage, campaign, tmp_path / f"log {stage}", *which)
        which = ("--resume", "cut")

    done = run_final("--resume", "cut", "--state", str(tmp_path), "--no-dashboard")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(campaign)
    assert json.loads(directory.audit.read_text())["findings"] == []
    ids = [r.attempt_id for stage in STAGES for r in directory.episodes(stage)]
    assert len(ids) == len(set(ids))
    dispatched = {e["fields"]["attempt_id"] for e in events(campaign) if e["kind"] == "dispatch"}
    assert dispatched == set(ids)


def interrupt_at(stage: str, campaign: Path, log: Path, *which: str) -> None:
    """Start or continue a campaign, and interrupt this driver when it reaches a stage."""
    before = len(events(campaign))
    state = campaign.parents[1]
    driver = start_final(*which, "--state", str(state), "--no-dashboard", log=log)

    def reached() -> bool:
        assert driver.poll() is None, log.read_text(encoding="utf-8")
        rows = events(campaign)[before:]
        stages = [row["fields"].get("stage") for row in rows if row["kind"] == "stage"]
        if stage == "first batch":  # before any checkpoint
            return any(row["kind"] == "dispatch" for row in rows)
        if stage == "train":
            return any(row["kind"] == "checkpoint" for row in rows)
        if stage == "heldout":
            return any(row["fields"].get("arm") for row in rows)
        return stage in stages

    wait_for(reached, log)
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: every process of the job gets it
    assert driver.wait(timeout=60) == 130, log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert "--resume cut" in text
    assert "Traceback" not in text
    assert processes_naming(str(state)) == []


def test_an_occupied_run_id_is_refused_with_a_remedy(model_dir: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.toml", small_config(model_dir))
    (tmp_path / "campaigns" / "taken").mkdir(parents=True)
    (tmp_path / "campaigns" / "taken" / "frozen.json").write_text("{}")
    done = run_final("--config", str(config), "--state", str(tmp_path), "--run-id", "taken")
    assert done.returncode == 2
    assert "taken" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plan_of_every_shipped_configuration_is_validated_and_starts_nothing(
    tmp_path: Path,
) -> None:
    for config in sorted((ROOT / "configs").glob("*.toml")):
        done = run_final("--config", str(config), "--plan", "--state", str(tmp_path), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["name"] == config.stem
        assert not (tmp_path / "campaigns").exists()


def test_the_reference_campaign_has_the_published_numbers(tmp_path: Path) -> None:
    done = run_final("--config", "configs/final.toml", "--plan", "--json", "--state", str(tmp_path))
    plan = json.loads(done.stdout)
    assert plan["training"]["episodes"] == 640
    assert plan["evaluation"]["attempts"] == 368
    assert plan["resources"]["concurrent_episodes"] == 128
    assert plan["resources"]["replicas"]["count"] == 2
    assert plan["resources"]["replicas"]["max_num_seqs"] == 64
    assert plan["training"]["max_staleness"] == 1
    assert plan["training"]["checkpoints"] == [5, 10]
    assert plan["bounds"]["watchdog_s"] == 9 * 3600
    assert plan["bounds"]["function_bound_s"] == 550 * 60
