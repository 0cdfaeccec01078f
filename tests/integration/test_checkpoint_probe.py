"""`python -m rl.checkpoint probe` with a real engine on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.engine_command import engine_python
from rl.learner.checkpoint import save_checkpoint
from rl.learner.stand_in import make_tiny_model
from rl.learner.state import LearnerState
from tests.support.campaigns import ROOT, environment, processes_naming
from tests.support.tiny_adapter import make_adapter

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        engine_python(os.environ) == sys.executable, reason="no engine environment is installed"
    ),
]
PROBE = [5 + (11 * position) % 250 for position in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("probe") / "model", ["mkdir alpha"] * 5)


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("checkpoint")
    adapter = make_adapter(model, scratch, 3, PROBE)
    return save_checkpoint(scratch / "root", 3, LearnerState(adapter, b"-"), {}, "a" * 64)


def start_probe(checkpoint: Path, model: Path, scratch: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rl.checkpoint", "probe", str(checkpoint), "--json"]
    return subprocess.Popen(
        [*command, "--model", str(model)],
        cwd=ROOT,
        env=environment(TMPDIR=str(scratch)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_peft_and_vllm_make_the_same_of_a_checkpoint(
    checkpoint: Path, model: Path, tmp_path: Path
) -> None:
    probe = start_probe(checkpoint, model, tmp_path)
    out, err = probe.communicate(timeout=800)
    assert probe.returncode == 0, out + err
    report = json.loads(out)
    print(report)
    assert report["agrees"] and report["largest"] <= report["tolerance"]
    assert len(report["prompts"]) == 4
    for row in report["prompts"]:
        assert row["engine"] < 1e-3
        assert row["change"] > 0.1, "the adapter changes the base"
        assert abs(row["change"] - row["engine_change"]) < 1e-3, "in both alike"
    assert "starting a vllm replica" in err
    assert list(tmp_path.glob("rl-probe-*")) == []
    assert processes_naming(str(model)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_engine(
    checkpoint: Path, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    probe = start_probe(checkpoint, model, tmp_path)
    limit = time.monotonic() + 300
    while not list(tmp_path.glob("rl-probe-*/replica-0/engine-1.log")):
        assert probe.poll() is None, probe.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)
    os.kill(probe.pid, number)
    out, err = probe.communicate(timeout=120)
    assert probe.returncode == 130, out + err
    assert "Traceback" not in err
    assert list(tmp_path.glob("rl-probe-*")) == []
    assert processes_naming(str(model)) == []
