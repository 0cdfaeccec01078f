"""Verifiers that run in a sandbox of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.agent.shell import CommandResult, Shell
from rl.config import SandboxConfig
from rl.errors import TaskPackageError
from sandboxes.attempt import AttemptResult, run_attempt
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.gates import DEFAULT_LIMITS
from sandboxes.provider import SandboxProvider
from sandboxes.reference import run_nothing, run_oracle
from sandboxes.tasks import TaskPackage, load_package
from tests.support.sandbox import daemons

TASK_TOML = """\
schema_version = "1.4"
artifacts = [{artifacts}]
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
environment_mode = "separate"
[verifier.environment]
network_mode = "no-network"
[environment]
network_mode = "no-network"
"""
# The answer is in the verifier's image alone; of the agent's, only artifacts are there.
TEST_SH = """\
#!/bin/bash
reward=0
cmp -s /app/result.txt /srv/answer && [ ! -e /app/other ] && [ ! -e /srv/agent ] &&
  ! ls /logs/verifier/reward* && [ "$(cat /app/out/deep/a)" = a ] && [ ! -L /app/out/link ] &&
  [ "$(cat /logs/artifacts/note)" = note ] && reward=1
echo $reward > /logs/verifier/reward.txt
"""
SOLVE = """\
#!/bin/bash
echo 42 > /app/result.txt
mkdir -p /app/out/deep; echo a > /app/out/deep/a; ln -s / /app/out/link; mkfifo /app/out/pipe
echo note > /logs/artifacts/note; touch /app/other
"""
PROVIDER = SandboxProvider(SandboxConfig())


def write(root: Path, artifacts: str = '"/app/result.txt", "/app/out"') -> Path:
    for name, content in {
        "task.toml": TASK_TOML.format(artifacts=artifacts),
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nRUN touch /srv/agent\n",
        "tests/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY answer /srv/answer\n"
        "COPY . /tests/\nRUN true\n",
        "tests/answer": "42\n",
        "tests/test.sh": TEST_SH,
        "solution/solve.sh": SOLVE,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
        (root / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return root


@pytest.fixture
def package(tmp_path: Path) -> TaskPackage:
    return load_package(write(tmp_path / "separate"))


def attempt(package: TaskPackage, command: str) -> AttemptResult[CommandResult]:
    async def agent(shell: Shell, deadline: float) -> CommandResult:
        return await shell.run(command, 20, 1000)

    return asyncio.run(run_attempt(package, PROVIDER, agent, DEFAULT_LIMITS, "separate"))


def test_solution_scores_and_doing_nothing_does_not(package: TaskPackage) -> None:
    for _ in range(2):  # the second time from layers
        solved = asyncio.run(run_oracle(package, PROVIDER, DEFAULT_LIMITS, "oracle"))
        assert (solved.outcome, solved.reward) == ("graded", 1.0), solved
    idle = asyncio.run(run_nothing(package, PROVIDER, DEFAULT_LIMITS, "nothing"))
    assert (idle.outcome, idle.reward) == ("graded", 0.0), idle
    assert daemons(os.getpid()) == []


@pytest.mark.parametrize(
    "harm",
    [
        "mkdir /app/result.txt",
        "mkfifo /app/result.txt",
        "ln -s /dev/zero /app/result.txt",
        "ln -s result.txt /app/result.txt",
        "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/artifacts/reward.txt",
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) & echo 41 > /app/result.txt",
        "mkdir /app/out; cd /app/out; for i in {1..900}; do mkdir long && cd long || exit; done",
        "mkdir /app/out; head -c 30000000 /dev/zero > /app/out/big",
        "touch /app/out",
        "rm -rf /logs/artifacts /app",
    ],
)
def test_whatever_lies_in_place_of_an_artifact_is_the_agents_result(
    package: TaskPackage, harm: str
) -> None:
    result = attempt(package, harm)
    assert (result.outcome, result.reward) == ("graded", 0.0), result.failure


def test_dead_sandbox_is_the_infrastructures_fault(
    package: TaskPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = BubblewrapEnvironment.download_dir

    async def dies(self: BubblewrapEnvironment, *args: object, **kwargs: object) -> None:
        self._live().process.kill()
        await download(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(BubblewrapEnvironment, "download_dir", dies)
    result = attempt(package, SOLVE)
    assert result.outcome == "masked"
    assert result.failure is not None
    assert result.failure.kind == "SandboxError"


def test_harbor_agrees(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "separate")
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):  # the second with the first one's layer
        jobs = tmp_path / agent
        command = [str(Path(sys.executable).parent / "harbor"), "run", "-a", agent]
        command += ["-p", str(tmp_path / "tasks"), "-o", str(jobs)]
        command += ["-e", "sandboxes.bubblewrap:BubblewrapEnvironment"]
        environment = {**os.environ, "HARBOR_TELEMETRY": "0", "PYTHONPATH": os.getcwd()}
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
        rewards: list[float] = []
        for path in jobs.rglob("result.json"):
            with contextlib.suppress(KeyError, TypeError):
                rewards.append(json.loads(path.read_text())["verifier_result"]["rewards"]["reward"])
        assert rewards == [reward], agent


@pytest.mark.parametrize(
    "artifacts",
    [
        '"/tests"',
        '"/"',
        '"/logs"',
        '"/logs/verifier/x"',
        '"/app/../tests"',
        '{ source = "/app/x", service = "db" }',
    ],
)
def test_artifacts_that_would_decide_the_reward_are_refused(tmp_path: Path, artifacts: str) -> None:
    with pytest.raises(TaskPackageError, match=r"artifacts|task\.toml"):
        load_package(write(tmp_path / "unfit", artifacts))
