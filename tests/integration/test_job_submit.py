"""`ray job submit -- python -m rl.final` on a fresh local head."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.evidence.layout import CampaignDir
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import (
    ROOT,
    SYSTEM,
    environment,
    processes_naming,
    small_config,
    write_config,
)

RAY = str(Path(sys.executable).parent / "ray")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ENGINE = {"kind": "scripted", "scripted": {"replies": ["```bash\ntouch a\n```"]}}


def head_environment() -> dict[str, str]:
    """As after `. .venv/bin/activate`, with token authentication."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, **TOKEN)


def free_port() -> int:
    with socket.socket() as probe:
        while True:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if not 10_002 <= port <= 19_999:  # the workers' range
                return port


def ask(head: str, path: str) -> dict[str, Any]:
    """The job server's answer, over its REST interface."""
    request = urllib.request.Request(
        f"{head}/api/jobs/{path}", headers={"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a job server."""
    port, dashboard = free_port(), free_port()
    folder = tmp_path_factory.mktemp("ray")
    command = [
        RAY,
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=2",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
    ]
    log = (folder / "head.log").open("wb")
    process = subprocess.Popen(
        command,
        env=head_environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=folder,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        for _ in range(240):
            if process.poll() is not None:
                pytest.fail((folder / "head.log").read_text())
            try:
                ask(address, "")
                break
            except OSError:  # the server is not up yet
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def submit(head: str, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of the README, with the checkout as the job's working directory."""
    command = [RAY, "job", "submit", "--address", head, "--submission-id", job]
    return subprocess.run(
        [*command, "--working-dir", ".", "--", "python", "-m", "rl.final", *arguments],
        cwd=ROOT,
        env=head_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.timeout(600)
def test_a_submitted_campaign_ends_with_exit_code_0_and_the_same_evidence(
    head: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", [SYSTEM, "```bash\ntouch a\n```"])
    settings = small_config(
        model,
        engine=ENGINE,
        schedule={"updates": 1},
        trainer={"ranks": 2, "shard_base": True},  # processes of their own inside a job, too
        checkpoints={"updates": []},
    )
    config = write_config(tmp_path / "small.toml", settings)
    arguments = ("--config", str(config), "--state", str(tmp_path), "--run-id", "small-1")
    done = submit(head, "small-1", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(tmp_path / "campaigns" / "small-1")
    assert json.loads(directory.audit.read_text())["findings"] == []
    assert directory.report.is_file()
    assert processes_naming("rl.learner.rank_process") == []

    again = submit(head, "small-1", *arguments)
    assert again.returncode != 0
    assert "already exists" in again.stdout + again.stderr


@pytest.mark.timeout(300)
def test_a_refused_campaign_fails_the_job_with_exit_code_2(head: str, tmp_path: Path) -> None:
    done = submit(head, "bad-1", "--config", str(tmp_path / "missing.toml"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert ask(head, "bad-1")["driver_exit_code"] == 2
    assert "no such configuration file" in ask(head, "bad-1/logs")["logs"]
