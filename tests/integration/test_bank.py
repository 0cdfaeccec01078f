"""The cohort screen116 in real sandboxes: its own solutions, doing nothing, and cheating."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from rl.agent.shell import CommandResult, Shell
from rl.config import SandboxConfig
from sandboxes.attempt import run_attempt
from sandboxes.bank.cohorts import COHORTS
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.gates import DEFAULT_LIMITS
from sandboxes.grading import VERIFIER_ENV, grade
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import TaskPackage, load_package
from tests.support.packages import expectations
from tests.support.sandbox import output, started

COHORT = COHORTS["screen116"]
CONCURRENCY = 8
# The first of every family.
SAMPLE = [task.name for task in COHORT.tasks() if "-000-" in task.name]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskPackage]:
    root = tmp_path_factory.mktemp("screen116")
    return {path.name: load_package(path) for path in COHORT.write(root)}


async def _all[T](make: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Await all, so many at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(start: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await start()

    return await asyncio.gather(*(one(start) for start in make))


async def _reward(env: BubblewrapEnvironment, package: TaskPackage) -> float:
    return (await grade(env, package, 60)).reward


async def _solve(env: BubblewrapEnvironment, package: TaskPackage) -> str:
    """Run the package's own solution; what it printed."""
    await env.upload_dir(package.path / "solution", "/solution")
    return await output(env, "PYTHONNOUSERSITE=1 bash /solution/solve.sh; rm -r /solution/*")


async def _before_and_after(package: TaskPackage, scratch: Path) -> tuple[str, list[float], str]:
    """Rewards for doing nothing and then for the solution, and what that printed."""
    async with started(package, scratch / package.name, package.name) as env:
        nothing = await _reward(env, package)
        printed = await _solve(env, package)
        return package.name, [nothing, await _reward(env, package)], printed


def test_package_scores_its_solution_and_nothing_else(
    packages: dict[str, TaskPackage], tmp_path: Path
) -> None:
    """Every third package, which is some of every family; `rl.gate` does all of them."""
    chosen = list(packages.values())[::3]
    done = asyncio.run(
        _all(lambda package=package: _before_and_after(package, tmp_path) for package in chosen)
    )
    assert {package.family for package in chosen} == {item.family for item in packages.values()}
    assert [item for item in done if item[1] != [0.0, 1.0]] == []


OWN_MODULES = "json os sqlite3 shutil tarfile verifier sitecustomize usercustomize"
CHEATS = {
    "reward files": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > "
    "/logs/verifier/reward.json; chmod 444 /logs/verifier/*",
    "reward folders": "rm -rf /logs/verifier/*; mkdir /logs/verifier/reward.txt "
    "/logs/verifier/reward.json; touch /logs/verifier/reward.txt/x",
    "reward links": "rm -rf /logs/verifier/*; echo 1 > /tmp/r; ln -s /tmp/r "
    "/logs/verifier/reward.txt; ln -s /tmp/r /logs/verifier/reward.json",
    "verifier folder elsewhere": "rm -rf /logs/verifier; mkdir -p /tmp/v; echo 1 > "
    "/tmp/v/reward.txt; ln -s /tmp/v /logs/verifier",
    "tests planted": "mkdir -p /tests/verifier; echo 'EXPECTED=[]' > /tests/expected.py; "
    "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; "
    "echo 'def main(): pass' > /tests/verifier/check.py",
    "own tools": "mkdir -p /root/bin /app/.b; for t in cmp stat ls wc sh env git python3 tar; do "
    "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /root/bin/$t; done; "
    "chmod +x /root/bin/*; cp /root/bin/* /usr/bin/ /usr/local/bin/ 2> /dev/null; cp /root/bin/* "
    "/app/.b; for f in /root/.profile /root/.bashrc /root/.bash_env /etc/environment; do "
    "echo 'export PATH=/root/bin:/app/.b:$PATH BASH_ENV=/root/.bash_env; alias cmp=true' > $f; "
    "done; rm -r /app/.b",
    "own modules": "for d in /app /tmp /root $(python3 -m site --user-site); do mkdir -p $d; "
    f"for m in {OWN_MODULES}; do "
    'echo \'open("/logs/verifier/reward.txt", "w").write("1"); import os; os._exit(0)\' > '
    "$d/$m.py; done; done; echo PYTHONPATH=/root > /etc/environment",
    "own home": "mkdir -p /srv/home; cp /root/.bashrc /srv/home; printf '[core]\\nfsmonitor = "
    "/root/bin/git\\n[alias]\\nlog = !true\\n' | tee /srv/home/.gitconfig > /root/.gitconfig; "
    "sed -i 's,/root,/srv/home,' /etc/passwd; echo /srv/evil.so > /etc/ld.so.preload",
    "background writer": 'for i in 1 2; do setsid bash -c \'trap "" TERM HUP INT; while :; do '
    "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json; "
    'echo "EXPECTED=[]" > /tests/expected.py; done\' & done',
}


WAYS = 4  # a family meets every fourth cheat, and so every cheat meets a fourth of them


def _expected(package: TaskPackage) -> list[dict[str, str]]:
    return expectations(package.path)


def _odd_results(package: TaskPackage) -> str:
    """A pipe that nobody writes to, at the place of each result that is not there yet."""
    paths = [shlex.quote(item["path"]) for item in _expected(package) if "path" in item]
    return "; ".join(f"[ -e {path} ] || mkfifo {path}" for path in paths) or "true"


def _harm(package: TaskPackage) -> str:
    """Change one file that the task leaves alone, or everything if there is none."""
    files = package.environment_dir / "files"
    kept = [
        item["path"]
        for item in _expected(package)
        if item["kind"] == "files.unchanged" and (files / item["path"]).exists()
    ]
    if kept:
        return f"echo x >> {shlex.quote(kept[0])}"
    return "for f in *; do if [ -f $f ]; then : > $f; else rm -rf $f; fi; done"


async def _cheated(
    package: TaskPackage, cheats: list[str], scratch: Path
) -> tuple[str, dict[str, float]]:
    """The reward after each cheat, then after the solution, then after some harm."""
    rewards: dict[str, float] = {}
    async with started(package, scratch / package.name, package.name) as env:
        seen = await output(env, "ls -A /solution /tests /tmp")
        rewards["secrets"] = float(seen.split() != ["/solution:", "/tests:", "/tmp:"])
        for name in cheats:
            await output(env, CHEATS[name])
            rewards[name] = await _reward(env, package)
        await output(env, _odd_results(package))
        rewards["pipes for results"] = await _reward(env, package)
        await output(env, f"find . -type p -delete; for m in {OWN_MODULES}; do rm -f $m.py; done")
        await _solve(env, package)
        rewards["solution"] = await _reward(env, package)
        await output(env, _harm(package))
        rewards["harm"] = await _reward(env, package)
    return package.name, {name: value for name, value in rewards.items() if value}


def test_cheats_score_nothing_and_spoil_no_solution(
    packages: dict[str, TaskPackage], tmp_path: Path
) -> None:
    """In the first package of each family; each cheat by itself, over those before it."""
    done = asyncio.run(
        _all(
            lambda at=at, name=name: _cheated(
                packages[name], list(CHEATS)[at % WAYS :: WAYS], tmp_path
            )
            for at, name in enumerate(SAMPLE)
        )
    )
    assert len(done) == 23
    assert [item for item in done if item[1] != {"solution": 1.0}] == []


WRITER = (
    'setsid bash -c \'trap "" TERM HUP INT; echo $$ > /tmp/writer; while :; do '
    "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json; "
    'echo "EXPECTED=[]" > /tests/expected.py; done\' > /dev/null 2>&1 & '
    "while [ ! -s /tmp/writer ]; do sleep 0.01; done"
)


@pytest.mark.parametrize("family", ["tally", "history", "repair"])
def test_verifier_ends_what_still_runs_where_the_runner_does_not(
    packages: dict[str, TaskPackage], tmp_path: Path, family: str
) -> None:
    package = packages[_first(family)]

    async def reward() -> tuple[bytes | None, str]:
        async with started(package, tmp_path) as env:
            await env.upload_dir(package.path / "tests", "/tests")
            await output(env, WRITER.replace('echo "EXPECTED=[]" > /tests/expected.py', ":"))
            await env.run("/tests/test.sh", env=VERIFIER_ENV, clean_env=True)
            alive = await output(env, "kill -0 $(cat /tmp/writer) && echo alive")
            return await env.read_file("/logs/verifier/reward.txt", 100), alive

    content, alive = asyncio.run(reward())
    assert content == b"0\n"
    assert "alive" not in alive


# Put in the place of a script that the verifier runs.
ATTACKS = {
    "writes the reward": "echo 1 > /logs/verifier/reward.txt",
    "leaves a writer": WRITER,
    "kills the verifier": "kill -9 -1",
    "changes the verifier": "echo 'EXPECTED=[]' | tee /tests/expected.py "
    "$(find /tests -name '*.py')",
    "reads what is expected": 'python3 -c \'import sys; sys.path.insert(0, "/tests")\n'
    "import expected\n"
    "for item in expected.EXPECTED:\n"
    '    if sys.argv[1] in item.get("argv", []): print(item["prints"])\' $1',
    "floods": "yes",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_program_that_attacks_the_verifier_scores_nothing(
    packages: dict[str, TaskPackage], attack: str
) -> None:
    package = packages[_first("repair")]
    script = next(item["argv"][0] for item in _expected(package) if "argv" in item)

    async def agent(shell: Shell, deadline: float) -> CommandResult:
        text = shlex.quote(f"#!/bin/bash\n{ATTACKS[attack]}\n")
        return await shell.run(f"printf %s {text} > {script}; chmod 755 {script}", 20, 1000)

    provider = SandboxProvider(SandboxConfig())
    result = asyncio.run(run_attempt(package, provider, agent, DEFAULT_LIMITS, "attack"))
    assert (result.outcome, result.reward) == ("graded", 0.0), result.failure


def _first(family: str) -> str:
    return next(name for name in SAMPLE if name.startswith(f"{family}-"))
