"""A rehearsal from its command line: the whole launch, two failures, and their recovery."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from rl.evidence.rehearsals import FILE, Rehearsal
from tests.support.campaigns import ROOT, environment, processes_naming, small_config, write_config


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl.final", "--rehearse", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.timeout(600)
def test_a_rehearsal_walks_a_launch_and_its_failures(tmp_path: Path) -> None:
    # What it would cost is not there: no such model, no GPU, no sandboxes to rent.
    settings = small_config(
        tmp_path / "no-model",
        model={"source": "hub", "name": "nobody/nothing", "revision": "a" * 40, "path": "unused"},
        engine={"device": "cuda"},
        trainer={"device": "cuda"},
        sandbox={"provider": "modal"},
        resources={"trainer_gpus": 1.0, "replica_gpus": 1.0, "worker_cpus": 1.0},
        schedule={"updates": 6},
        checkpoints={"updates": []},
        limits={"function_bound_s": 2400.0},
        modal={"workspace": "nobodys"},
    )
    config = write_config(tmp_path / "small.toml", settings)
    done = rehearse("--config", str(config), "--state", str(tmp_path / "state"))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "state" / "rehearsals").iterdir()
    rehearsal = Rehearsal.model_validate_json((folder / FILE).read_bytes())
    assert rehearsal.problems == []
    walked = {step.name for step in rehearsal.steps}
    assert walked >= {
        "a replica's engine is killed",
        "the driver is killed",
        "engines of a killed driver",
        "the continued campaign",
        "the same launch again",
        "the held-out workers, and the report",
        "a launcher dies between intent and receipt",
        "guard: every task has passed its gate",
        "audit",
    }
    assert [(run.name, run.planned) for run in rehearsal.dry_runs] == [
        ("train", 48),
        ("base/shard 0", 4),
        ("base/shard 1", 4),
        ("step6/shard 0", 4),
        ("step6/shard 1", 4),
    ]
    directory = CampaignDir(folder / "campaigns" / folder.name)
    assert json.loads(directory.audit.read_text())["findings"] == []
    assert processes_naming(str(folder)) == []

    # Its outcome is what a launch asks for, and only of this very configuration.
    launched = ["-m", "rl.submit", "--config", str(config), "--address", "http://127.0.0.1:9"]
    receipts = ["--receipts", str(tmp_path / "state" / "receipts")]
    for more, wanted in (([], "no Ray job server"), (["--seed", "9"], "has not been rehearsed")):
        refused = subprocess.run(
            [sys.executable, *launched, *receipts, *more],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert refused.returncode == 2
        assert wanted in refused.stderr


def test_a_rehearsal_takes_no_run_and_no_cluster(tmp_path: Path) -> None:
    done = rehearse("--run-id", "mine", "--state", str(tmp_path))
    assert done.returncode == 2
    assert "--run-id can't be combined with --rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []
