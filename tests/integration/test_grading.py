"""The verifier's run against what agents and packages do to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rl.errors import TaskPackageError, VerifierError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.grading import LOG_LIMIT, REWARD_LIMIT, Grade, grade
from sandboxes.tasks import TaskPackage, load_package
from tests.support.sandbox import output, started

TASK_TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[verifier.env]
GIVEN = "${HOST_GIVES}"
ASSUMED = "${HOST_GIVES_NOT:-by default}"
[environment]
network_mode = "no-network"
"""
REWARD = "/logs/verifier/reward.txt"

type Make = Callable[[str], TaskPackage]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A package whose verifier is the given script."""
    monkeypatch.setenv("HOST_GIVES", "a value")
    monkeypatch.setenv("HOST_SECRET", "nobody's business")

    def write(test_sh: str) -> TaskPackage:
        root = tmp_path / "package"
        for name, content in {
            "task.toml": TASK_TOML,
            "instruction.md": "Do it.\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "tests/test.sh": f"#!/bin/bash\n{test_sh}\n",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        return load_package(root)

    return write


def graded(
    package: TaskPackage,
    tmp_path: Path,
    agent: str = "true",
    after: Callable[[BubblewrapEnvironment], Awaitable[None]] | None = None,
) -> Grade:
    """How the sandbox is graded that `agent` has run in."""

    async def main() -> Grade:
        async with started(package, tmp_path / "scratch") as env:
            await output(env, agent)
            result = await grade(env, package, 60)
            if after is not None:
                await after(env)
            return result

    return asyncio.run(main())


IN_ITS_PLACE = f'[ "$PWD" = /app ] && [ -z "$(ls -A)" ]; echo $((1 - $?)) > {REWARD}'


@pytest.mark.parametrize(
    "harm",
    [
        "cd /; rm -rf /app",
        "cd /; rm -rf /app; echo > /app",
        "cd /; rm -rf /app; ln -s /nowhere /app",
        "rm -rf /logs/*; mkdir -p /logs/verifier; chmod 000 /logs/verifier /logs /tests",
        "mkfifo /logs/verifier/reward.txt /logs/verifier/reward.json /tests/test.sh",
        "ln -s / /logs/verifier/up; ln -s / /tests/up; ln -s /usr /logs/usr; rm -rf /logs/agent",
        "cd /logs/verifier; for i in {1..2000}; do > $i; done; mkdir -p d/e; chmod 000 d",
    ],
)
def test_agent_cannot_keep_the_verifier_from_running(make: Make, tmp_path: Path, harm: str) -> None:
    package = make(f'[ -z "$(ls -A /logs/verifier)" ] && {IN_ITS_PLACE}')
    assert graded(package, tmp_path, harm).reward == 1.0


def test_tests_arrive_after_the_agent(make: Make, tmp_path: Path) -> None:
    package = make(f'[ "$(cat /app/seen)" = "" ]; echo $((1 - $?)) > {REWARD}')
    assert graded(package, tmp_path, "ls -A /tests /solution | grep -v : > seen").reward == 1.0


def test_verifier_sees_its_own_variables_and_no_others(make: Make, tmp_path: Path) -> None:
    shown = graded(make(f"env; echo 1 > {REWARD}"), tmp_path, "export AGENT=1").log.splitlines()
    assert "GIVEN=a value" in shown and "ASSUMED=by default" in shown
    names = {line.partition("=")[0] for line in shown[:-1]}
    assert names - {"_", "SHLVL", "PWD", "OLDPWD", "HOSTNAME", "LC_ALL"} == {
        *("GIVEN", "ASSUMED", "PATH", "HOME", "LANG", "PYTHONNOUSERSITE"),
    }


def test_variable_that_the_host_lacks_is_the_packages_fault(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make(f"echo 1 > {REWARD}")
    monkeypatch.delenv("HOST_GIVES")
    with pytest.raises(TaskPackageError, match="HOST_GIVES") as caught:
        graded(package, tmp_path)
    assert caught.value.where.endswith("task.toml") and caught.value.remedy


def test_verifier_that_prints_without_end_is_cut(make: Make, tmp_path: Path) -> None:
    package = make(f"echo first; head -c 200000000 /dev/zero; echo last; echo 1 > {REWARD}")
    result = graded(package, tmp_path)
    assert result.reward == 1.0
    assert len(result.log.encode()) < LOG_LIMIT + 200
    assert result.log.startswith("first") and "bytes cut" in result.log and "last" in result.log


def test_reward_is_that_of_the_verifier_and_not_of_what_it_left_running(
    make: Make, tmp_path: Path
) -> None:
    async def nothing_runs(env: BubblewrapEnvironment) -> None:
        await asyncio.sleep(0.3)
        listed = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        assert "sleep 77" not in await output(env, listed)
        assert await output(env, f"cat {REWARD}") == "1\n"

    later = f"setsid bash -c 'sleep 0.2; echo 0 > {REWARD}; sleep 77' > /dev/null 2>&1 &"
    result = graded(make(f"echo 1 > {REWARD}; {later}"), tmp_path, after=nothing_runs)
    assert result.reward == 1.0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"(sleep 0.5; echo 1 > {REWARD}) &", "left no reward file"),
        (f"mkfifo {REWARD}", "left no reward file"),
        ("rm -rf /logs/verifier", "left no reward file"),
        (f"rm -rf /logs/verifier; ln -s /tmp /logs/verifier; ln -s /etc/hostname {REWARD}", "left"),
        (f"truncate -s 15M {REWARD}", "longer than"),
        (f"head -c {REWARD_LIMIT + 1} /dev/zero | tr '\\0' ' ' > {REWARD}", "longer than"),
        (f"printf '1\\0' > {REWARD}", "could not convert"),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json; echo 1 > " + REWARD, "not finite"),
        ("kill -9 $$", "left no reward file"),
    ],
)
def test_reward_that_is_none_is_the_verifiers_fault(
    make: Make, tmp_path: Path, script: str, words: str
) -> None:
    with pytest.raises(VerifierError, match=words):
        graded(make(script), tmp_path)


def test_reward_file_may_be_as_long_as_the_limit(make: Make, tmp_path: Path) -> None:
    script = f"printf %{REWARD_LIMIT}s 1 > {REWARD}"
    assert graded(make(script), tmp_path).reward == 1.0
