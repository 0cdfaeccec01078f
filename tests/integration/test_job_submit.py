"""Campaigns as jobs of a fresh local head: by Ray's own command and by `rl.submit`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.local_head import LocalHead
from rl.evidence.code_pin import pin_code
from rl.evidence.frozen import load_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.receipts import Ledger
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import ROOT, SYSTEM, events, processes_naming, small_config
from tests.support.campaigns import write_config as write

RAY = str(Path(sys.executable).parent / "ray")
REPLY = "```bash\ntouch a\n```"
SCRIPTED = {"kind": "scripted", "scripted": {"replies": [REPLY]}}
SLOW = {"kind": "scripted", "scripted": {"replies": [REPLY], "latency_s": 1.0}}
CANARY = "canary-5f1c0a9b"

# Runs `rl.submit` and dies at the step that is named.
DIE = """
import os, sys
import rl.submitting as submitting
from rl.evidence.receipts import Ledger
step = sys.argv.pop(1)
submit, record = submitting.RayJobs.submit, Ledger.record
async def submitted(self, *arguments):
    if step == "before the call":
        os._exit(9)
    await submit(self, *arguments)
    if step == "after the call":
        os._exit(9)
def recorded(self, *arguments):
    if step == "before the receipt":
        os._exit(9)
    record(self, *arguments)
    os._exit(9)
submitting.RayJobs.submit, Ledger.record = submitted, recorded
from rl.submit import cli
cli()
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHead]:
    made = LocalHead(tmp_path_factory.mktemp("head"), cpus=2, gpus=0)
    asyncio.run(made.start(120.0))
    try:
        yield made
    finally:
        asyncio.run(made.stop(60.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", [SYSTEM, REPLY])


def token(head: LocalHead) -> str:
    return Path(head.environment()["RAY_AUTH_TOKEN_PATH"]).read_text()


def ask(head: LocalHead, path: str) -> Any:
    """The job server's answer, over its REST interface."""
    request = urllib.request.Request(
        f"{head.job_server}/api/jobs/{path}", headers={"Authorization": f"Bearer {token(head)}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def jobs_of(head: LocalHead, run_id: str) -> list[str]:
    found = [str(job["submission_id"]) for job in ask(head, "")]
    return sorted(name for name in found if name.startswith(f"{run_id}."))


def command(tmp_path: Path, *arguments: str) -> list[str]:
    places = ("--state", str(tmp_path / "state"), "--receipts", str(tmp_path / "receipts"))
    return [*arguments, *places]


def submit(
    head: LocalHead, tmp_path: Path, *arguments: str, script: tuple[str, ...] = ("-m", "rl.submit")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script, *command(tmp_path, *arguments)],
        cwd=ROOT,
        env=head.environment() | {"HF_TOKEN": CANARY, "MODAL_TOKEN_SECRET": CANARY},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def refused_config(tmp_path: Path) -> Path:
    """A campaign whose driver refuses within seconds, with exit code 2."""
    return write(tmp_path / "refused.toml", small_config(tmp_path / "no-model", engine=SCRIPTED))


def test_rays_own_command_ends_with_exit_code_0_and_the_same_evidence(
    head: LocalHead, model: Path, tmp_path: Path
) -> None:
    settings = small_config(
        model,
        engine=SCRIPTED,
        schedule={"updates": 1},
        trainer={"ranks": 2, "shard_base": True},  # processes of their own inside a job, too
        checkpoints={"updates": []},
    )
    config = write(tmp_path / "small.toml", settings)
    line = [RAY, "job", "submit", "--address", head.job_server, "--submission-id", "small-1"]
    line += ["--working-dir", ".", "--", "python", "-m", "rl.final", "--config", str(config)]
    line += ["--state", str(tmp_path), "--run-id", "small-1"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line, cwd=ROOT, env=head.environment(), capture_output=True, text=True, timeout=400
        )

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(tmp_path / "campaigns" / "small-1")
    assert json.loads(directory.audit.read_text())["findings"] == []
    assert directory.report.is_file()
    assert processes_naming("rl.learner.rank_process") == []

    again = run()
    assert again.returncode != 0
    assert "already exists" in again.stdout + again.stderr


def test_a_submitted_campaign_leaves_evidence_receipts_and_no_secret(
    head: LocalHead, model: Path, tmp_path: Path
) -> None:
    settings = small_config(
        model, engine=SCRIPTED, schedule={"updates": 1}, checkpoints={"updates": []}
    )
    config = write(tmp_path / "small.toml", settings)
    done = submit(head, tmp_path, "--config", str(config), "--run-id", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(tmp_path / "state" / "campaigns" / "whole")
    assert json.loads(directory.audit.read_text())["findings"] == []
    # The job ran in a copy of the sources, and knows all the same what they are.
    ours, theirs = pin_code(ROOT), load_frozen(directory).code
    assert (theirs.commit, theirs.diff_sha256) == (ours.commit, ours.diff_sha256)
    (entry,) = Ledger(tmp_path / "receipts").entries("whole")
    assert entry.standing == "submitted" and entry.calls == {"job": "whole.a1"}
    assert "audit      no findings" in done.stdout

    again = submit(head, tmp_path, "--config", str(config), "--run-id", "whole")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "attached to whole.a1: SUCCEEDED" in again.stdout
    assert jobs_of(head, "whole") == ["whole.a1"]

    told = json.dumps(ask(head, "whole.a1")) + ask(head, "whole.a1/logs")["logs"] + done.stdout
    for secret in (CANARY, token(head)):
        assert secret not in told
        for path in [*tmp_path.rglob("*")]:
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_killed_follower_attaches_and_a_stopped_job_leaves_nothing(
    head: LocalHead, model: Path, tmp_path: Path
) -> None:
    settings = small_config(
        model, engine=SLOW, schedule={"updates": 50}, resources={"replica_cpus": 0.5}
    )
    config = write(tmp_path / "slow.toml", settings)
    line = [sys.executable, "-m", "rl.submit"]
    line += command(tmp_path, "--config", str(config), "--run-id", "long")
    campaign = tmp_path / "state" / "campaigns" / "long"
    with (tmp_path / "log").open("wb") as log:
        follower = subprocess.Popen(line, cwd=ROOT, env=head.environment(), stdout=log, stderr=log)
    limit = time.monotonic() + 200
    while not any(row["kind"] == "publish" for row in events(campaign)):
        assert time.monotonic() < limit and follower.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.2)
    follower.kill()
    follower.wait()

    # While it runs: no key and no token in any command line, and a second campaign has no room.
    lines = command_lines()
    assert token(head).encode() not in lines
    full = write(
        tmp_path / "full.toml",
        small_config(
            model,
            engine=SCRIPTED,
            resources={"trainer_cpus": 2.0},
            limits={"watchdog_s": 600.0, "placement_s": 2.0},
        ),
    )
    second = submit(head, tmp_path, "--config", str(full), "--run-id", "second")
    assert second.returncode == 2, second.stdout + second.stderr
    assert "the cluster is full: the run needs 2 CPU, and 1 CPU is free (held by long)" in (
        second.stdout
    )

    attached = subprocess.Popen(
        line, cwd=ROOT, env=head.environment(), stdout=subprocess.PIPE, text=True
    )
    assert attached.stdout is not None
    assert "attached to long.a1: RUNNING" in attached.stdout.readline()
    attached.send_signal(signal.SIGINT)
    attached.communicate(timeout=60)
    assert attached.returncode == 130

    stopped = submit(head, tmp_path, "--stop", "long")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert processes_naming(str(campaign)) == []
    left = subprocess.run(
        [RAY, "list", "placement-groups", "--format", "json", "--address", head.job_server],
        env=head.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    states = {row["state"] for row in json.loads(left.stdout) if row["name"] == "long"}
    assert states == {"REMOVED"}, left.stdout + left.stderr
    assert any(row["kind"] == "stopped" for row in events(campaign))


def command_lines() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            found += path.read_bytes()
    return found


@pytest.mark.parametrize("step", ["before the call", "after the call", "before the receipt"])
def test_a_launcher_that_dies_in_between_submits_once(
    head: LocalHead, tmp_path: Path, step: str
) -> None:
    run_id = step.replace(" ", "-")
    arguments = ("--config", str(refused_config(tmp_path)), "--run-id", run_id)
    died = submit(head, tmp_path, step, *arguments, script=("-c", DIE))
    assert died.returncode == 9, died.stdout + died.stderr
    (entry,) = Ledger(tmp_path / "receipts").entries(run_id)
    assert entry.standing == "ambiguous"
    done = submit(head, tmp_path, *arguments)
    # The driver's own exit code and message, not the follower's.
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no-model" in done.stdout
    assert "has no receipt: asking the cluster" in done.stdout
    assert jobs_of(head, run_id) == [f"{run_id}.a1"]
    (entry,) = Ledger(tmp_path / "receipts").entries(run_id)
    assert entry.standing == "submitted"


def test_launchers_that_race_make_one_job_and_all_follow_it(
    head: LocalHead, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "rl.submit"]
    line += command(tmp_path, "--config", str(refused_config(tmp_path)), "--run-id", "race")
    racing = [
        subprocess.Popen(line, cwd=ROOT, env=head.environment(), stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in racing]
    assert [process.returncode for process in racing] == [2] * 6, outputs
    assert all(b"no-model" in output for output in outputs)
    assert jobs_of(head, "race") == ["race.a1"]


def test_what_is_wrong_is_one_message_and_submits_nothing(head: LocalHead, tmp_path: Path) -> None:
    config = refused_config(tmp_path)
    ours = ("--config", str(config), "--run-id", "wrong")
    stranger = tmp_path / "token"
    stranger.write_text("0" * 64)
    cases = [
        ({}, ("--config", str(tmp_path / "gone.toml")), "no such configuration file"),
        ({}, (*ours, "--env", "HF_TOKEN=x"), "looks like a secret"),
        ({}, (*ours, "--address", "http://127.0.0.1:9"), "no Ray job server answers there"),
        ({}, (*ours, "--address", "127.0.0.1:6379"), "is no job server's address"),
        ({}, ("--resume", "r", "--seed", "3"), "can't be combined with --resume"),
        ({}, ("--stop", "never"), "nothing was submitted as 'never'"),
        ({"RAY_AUTH_TOKEN_PATH": str(stranger)}, ours, "does not take this token"),
        ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")}, ours, "no such token file"),
    ]
    for extra, arguments, wanted in cases:
        done = subprocess.run(
            [sys.executable, "-m", "rl.submit", *command(tmp_path, *arguments)],
            cwd=ROOT,
            env=head.environment() | extra,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert wanted in done.stderr and "Traceback" not in done.stderr, (wanted, done.stderr)
        assert done.stderr.count("error:") == 1
    assert Ledger(tmp_path / "receipts").entries("wrong") == []
    assert jobs_of(head, "wrong") == []
