"""A whole campaign of the prime-rl backend, with the stand-in for prime-rl's process.

The GPU that it asks for is a logical one: Ray counts it, nothing uses it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.engine_command import REPOSITORY
from rl.evidence.layout import CampaignDir
from rl.learner.prime.files import StepManifest
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import ROOT, SYSTEM, environment, small_config, write_config
from tests.support.prime_config import STAND_IN

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RUN_S = 500.0
REPLY = "```bash\ntouch a\n```"


def write_interpreter(path: Path) -> Path:
    """What takes the place of prime-rl's Python: asked or told to train as it would be."""
    program = shlex.join([sys.executable, STAND_IN])
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in *inspect_prime.py) exec {program} inspect;; esac\n'
        "for last; do :; done\n"
        f'exec {program} train @ "$last"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A Ray cluster with one logical GPU, whose workers know prime-rl's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("RL_PRIME_PYTHON", str(write_interpreter(tmp_path / "python")))
        ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def final(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl.final", "--address", address, *arguments],
        cwd=ROOT,
        env=environment(RAY_AUTH_MODE="token"),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def test_a_campaign_trains_by_prime_rl_and_its_evidence_holds(address: str, tmp_path: Path) -> None:
    settings = small_config(
        make_tiny_model(tmp_path / "model", [SYSTEM, REPLY]),
        engine={"kind": "scripted", "scripted": {"replies": [REPLY]}},
        trainer={"backend": "prime-rl", "device": "cuda", "prime": {"start_timeout_s": 120.0}},
        resources={"trainer_gpus": 1.0},
    )
    config = write_config(tmp_path / "prime.toml", settings)
    state = tmp_path / "state"
    done = final(address, "--config", str(config), "--state", str(state), "--run-id", "prime")
    assert done.returncode == 0, done.stdout + done.stderr
    campaign = CampaignDir(state / "campaigns" / "prime")
    updates = [row.update for row in campaign.metrics_rows().read()]
    assert updates == [1, 2]
    manifests = campaign.root / "prime-rl" / "complete"
    for update in updates:
        path = manifests / f"step_{update}.json"
        assert StepManifest.model_validate_json(path.read_bytes()).update == update
