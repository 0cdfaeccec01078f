"""Attempts, grading and gates in real sandboxes, and plain Harbor over the same packages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harbor.environments.base import BaseEnvironment

from rl.agent.shell import CommandResult, Shell
from rl.config import SandboxConfig
from rl.errors import EngineError, PolicyError, SandboxError
from rl.gate import main as gate_main
from sandboxes.attempt import AttemptLimits, AttemptResult, run_attempt
from sandboxes.bank import FAMILIES, write_bank
from sandboxes.gates import DEFAULT_LIMITS, AsRequested, GateResult, gate_all, load_report
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import TaskPackage, load_folder, load_package

PROVIDER = SandboxProvider(SandboxConfig())
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bank")
    write_bank(root, FAMILIES, len(FAMILIES), seed=0)
    return root


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No sandbox and no scratch folder survives any of these tests."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert [path.name for path in scratch.glob("attempt-*")] == []
    listing = subprocess.check_output(["ps", "--ppid", str(os.getpid()), "-o", "cmd"], text=True)
    assert "bwrap" not in listing


def _package(bank: Path, family: str) -> TaskPackage:
    return next(package for package in load_folder(bank) if package.family == family)


def attempt(
    package: TaskPackage, command: str, limits: AttemptLimits = DEFAULT_LIMITS
) -> AttemptResult[CommandResult]:
    async def agent(shell: Shell, deadline: float) -> CommandResult:
        return await shell.run(command, 20, 10_000)

    return asyncio.run(run_attempt(package, PROVIDER, agent, limits, "test"))


def _solved(package: TaskPackage) -> str:
    assert package.solution_script is not None
    return package.solution_script.read_text()


def test_one_package_of_each_family_passes_its_gate_twice(bank: Path) -> None:
    results = asyncio.run(gate_all(load_folder(bank), PROVIDER, repeats=2))
    assert [result.reasons for result in results] == [[]] * len(FAMILIES)
    assert all(result.oracle == [1.0, 1.0] for result in results)
    assert all(result.nothing == [0.0, 0.0] for result in results)


@pytest.mark.parametrize("family", FAMILIES)
def test_harming_a_bystander_scores_nothing(bank: Path, family: str) -> None:
    package = _package(bank, family)
    solved = _solved(package)
    assert attempt(package, solved).reward == 1.0
    assert attempt(package, f"{solved}\ntouch /app/stray").reward == 0.0
    assert (
        attempt(package, f"{solved}\nfor f in $(ls -tp | grep -v /); do echo x >> $f; done").reward
        == 0.0
    )


CHEATS = {
    "reward file": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > "
    "/logs/verifier/reward.json; chmod 444 /logs/verifier/*",
    "reward link": "cd /tmp; echo 1 > r; ln -s /tmp/r /logs/verifier/reward.txt",
    "verifier folder is a link": "rm -rf /logs/verifier; mkdir /tmp/v; echo '{\"reward\": 1}' > "
    "/tmp/v/reward.json; ln -s /tmp/v /logs/verifier",
    "tests planted": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "tests folder is a link": "ln -s /tmp /tests/x; rm -rf /tests; ln -s /app /tests",
    "background writer": "setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; "
    'echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done\' &',
    "own tools first": "mkdir -p /root/bin; for t in cmp stat ls wc sh; do printf '#!/bin/sh\\n"
    "exit 0\\n' > /root/bin/$t; done; chmod +x /root/bin/*; echo 'PATH=/root/bin:$PATH' | tee "
    "/root/.profile /root/.bashrc /etc/environment /etc/profile.d/x.sh; cp /root/bin/* /usr/bin/",
    "preloaded library": "echo /tmp/evil.so > /etc/ld.so.preload; rm -rf /lib64",
    "dead tests folder": "rm -rf /logs; mv /logs /x; chmod 000 /logs /tests",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_scores_nothing(bank: Path, cheat: str) -> None:
    result = attempt(_package(bank, "mkdir"), CHEATS[cheat])
    assert (result.outcome, result.reward) == ("graded", 0.0), result.failure


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_does_not_spoil_a_solution(bank: Path, cheat: str) -> None:
    package = _package(bank, "chmod")
    result = attempt(package, f"{_solved(package)}\ncd /tmp\n{CHEATS[cheat]}")
    assert (result.outcome, result.reward) == ("graded", 1.0), result.failure


def test_full_disk_is_graded(bank: Path) -> None:
    package = _package(bank, "touch")
    result = attempt(package, "cat /dev/zero > /tmp/a; cat /dev/zero > /logs/b")
    assert (result.outcome, result.reward) == ("graded", 0.0), result.failure


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "left no reward file"),
        ("echo nan > /logs/verifier/reward.txt", "not finite"),
        ("echo 1 > /logs/verifier/reward.json", "must be an object"),
        ("mkdir /logs/verifier/reward.txt", "left no reward file"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "left no reward file"),
        ("head -c 99999 /dev/zero > /logs/verifier/reward.txt", "longer than"),
        ("sleep 60", "ran longer than"),
    ],
)
def test_verifier_without_a_valid_reward_masks(tmp_path: Path, script: str, words: str) -> None:
    path = write_bank(tmp_path / "bank", ["mkdir"], 1, seed=0)[0]
    (path / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    toml = path / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 60.0", "timeout_sec = 1.0"))
    result = attempt(load_package(path), "true")
    assert (result.outcome, result.reward) == ("masked", None)
    assert result.failure is not None
    assert words in result.failure.message


def test_json_reward_beats_text(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "bank", ["mkdir"], 1, seed=0)[0]
    both = (
        "echo 0 > /logs/verifier/reward.txt; echo '{\"score\": 0.5}' > /logs/verifier/reward.json"
    )
    (path / "tests" / "test.sh").write_text(f"#!/bin/sh\necho checked\n{both}\n")
    result = attempt(load_package(path), "true")
    assert result.reward == 0.5
    assert result.verifier_log == "checked\n[verifier exit 0, reward 0.5]"
    assert set(result.timings) == {"create", "agent", "verify", "stop", "total"}


def _limits(deadline_s: float) -> AttemptLimits:
    return AttemptLimits(deadline_s=deadline_s, create_s=10, verifier_s=2, stop_s=1)


def test_agent_that_overruns_is_masked(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.attempt.OVERRUN_GRACE_S", 0.2)

    async def stubborn(shell: Shell, deadline: float) -> None:
        await asyncio.sleep(60)

    began = time.monotonic()
    result = asyncio.run(
        run_attempt(_package(bank, "rm"), PROVIDER, stubborn, _limits(4), "stubborn")
    )
    assert time.monotonic() - began < 4
    assert result.failure is not None
    assert result.failure.kind == "DeadlineExceeded"


def test_agent_that_returns_at_its_deadline_is_graded(bank: Path) -> None:
    async def slow(shell: Shell, deadline: float) -> CommandResult:
        left = deadline - asyncio.get_running_loop().time()
        return await shell.run("sleep 60", left, 100)

    result = asyncio.run(run_attempt(_package(bank, "rm"), PROVIDER, slow, _limits(4), "slow"))
    assert (result.outcome, result.reward) == ("graded", 0.0)
    assert result.agent == CommandResult("", 124)


@pytest.mark.parametrize("error", [EngineError("x"), SandboxError("x")])
def test_infrastructure_failure_of_the_agent_masks(bank: Path, error: Exception) -> None:
    async def failing(shell: Shell, deadline: float) -> None:
        raise error

    result = asyncio.run(
        run_attempt(_package(bank, "rm"), PROVIDER, failing, DEFAULT_LIMITS, "failing")
    )
    assert result.outcome == "masked"
    assert result.failure is not None
    assert result.failure.kind == type(error).__name__


@pytest.mark.parametrize("error", [ValueError("bug"), PolicyError("x")])
def test_bug_of_the_agent_propagates_after_the_cleanup(bank: Path, error: Exception) -> None:
    async def broken(shell: Shell, deadline: float) -> None:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(run_attempt(_package(bank, "rm"), PROVIDER, broken, DEFAULT_LIMITS, "broken"))


def test_cancellation_propagates_after_the_cleanup(bank: Path) -> None:
    async def main() -> None:
        acting = asyncio.Event()

        async def waiting(shell: Shell, deadline: float) -> None:
            acting.set()
            await shell.run("setsid sleep 912 & sleep 913", 60, 100)

        package = _package(bank, "rm")
        task = asyncio.create_task(
            run_attempt(package, PROVIDER, waiting, DEFAULT_LIMITS, "cancelled")
        )
        await acting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert "sleep 91" not in subprocess.check_output(["ps", "ax", "-o", "cmd"], text=True)


def _changed(root: Path, changes: dict[str, tuple[str, str]]) -> TaskPackage:
    """A package of the bank with parts of its files replaced."""
    path = write_bank(root, ["mkdir"], 1, seed=0)[0]
    for name, (old, new) in changes.items():
        text = (path / name).read_text()
        assert old in text
        (path / name).write_text(text.replace(old, new))
    return load_package(path)


SOLVE = "solution/solve.sh"


@pytest.mark.parametrize(
    ("changes", "file", "words"),
    [
        (
            {
                SOLVE: ("set -e\n", "set -e\npython3 -c 'bytearray(90 << 20)'\n"),
                "task.toml": ("memory_mb = 128", "memory_mb = 64"),
            },
            "task.toml",
            "MiB of 64 MiB asked for",
        ),
        (
            {
                SOLVE: ("set -e\n", "set -e\n(sleep 0.2; exec sleep 60) & wait\n"),
                "task.toml": ("timeout_sec = 600.0", "timeout_sec = 1.0"),
            },
            SOLVE,
            "was still running after 1 s",
        ),
        ({"tests/test.sh": ("#!/", "#!/bin/false\n#!/")}, "tests/test.sh", "left no reward file"),
    ],
    ids=["memory", "time", "no reward"],
)
def test_gate_says_what_is_wrong_where_and_what_to_do(
    tmp_path: Path, changes: dict[str, tuple[str, str]], file: str, words: str
) -> None:
    package = _changed(tmp_path / "bank", changes)
    provider = AsRequested(SandboxConfig())
    (result,) = asyncio.run(gate_all([package], provider, repeats=1))
    assert result.verdict == "failed"
    reason = next(reason for reason in result.reasons if words in reason)
    assert reason.startswith(f"{package.path / file}: ") and "\n  -> " in reason


class Spoiler:
    """A provider that does something else on the side, once."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._acts = [act]

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        while self._acts:
            self._acts.pop()()
        return PROVIDER.create(package, attempt_id, scratch)

    def create_grader(
        self, package: TaskPackage, attempt_id: str, scratch: Path
    ) -> BaseEnvironment:
        return PROVIDER.create_grader(package, attempt_id, scratch)

    def shell(self, env: BaseEnvironment) -> Shell:
        return PROVIDER.shell(env)


def test_package_that_changes_while_it_is_gated_fails(tmp_path: Path) -> None:
    package = _changed(tmp_path / "bank", {})
    spoiler = Spoiler(lambda: (package.path / SOLVE).open("a").write("# more\n"))
    (result,) = asyncio.run(gate_all([package], spoiler, repeats=1))
    assert (result.verdict, result.oracle, result.nothing) == ("failed", [1.0], [0.0])
    assert "content has changed" in result.reasons[-1]


def test_process_that_outlives_the_gate_is_named(tmp_path: Path) -> None:
    package = _changed(tmp_path / "bank", {})
    left: list[subprocess.Popen[bytes]] = []
    spoiler = Spoiler(lambda: left.append(subprocess.Popen(["unshare", "-U", "sleep", "99"])))
    try:
        with pytest.raises(SandboxError, match=r"left something behind:\n  - process") as caught:
            asyncio.run(gate_all([package], spoiler, repeats=1))
        assert f"process {left[0].pid} (" in str(caught.value)
    finally:
        left[0].kill()
        left[0].wait()


def test_known_result_counts_only_where_its_disk_fits(bank: Path) -> None:
    package = _package(bank, "mkdir")
    (passed,) = asyncio.run(gate_all([package], PROVIDER, repeats=1))
    assert passed.disk_mb is not None and passed.memory_mb is not None
    fresh: list[GateResult] = []
    for disk_mb, tried in ((64.0, 0), (65.0, 1)):
        known = {package.digest: passed.model_copy(update={"disk_mb": disk_mb})}
        asyncio.run(gate_all([package], PROVIDER, done=known, on_result=fresh.append, repeats=1))
        assert len(fresh) == tried


def test_killed_gate_goes_on_where_it_was(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "gates.json"
    args = ["--report", str(report), "--repeats", "1"]
    command = [sys.executable, "-m", "rl.gate", str(bank), "--concurrency", "1", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        assert running.stderr is not None and b"passed" in running.stderr.readline()
        running.kill()
    kept = load_report(report).results
    assert 1 <= len(kept) < len(FAMILIES)
    assert gate_main([str(bank), *args]) == 0
    assert len(capsys.readouterr().err.splitlines()) == len(FAMILIES) - len(kept)
    assert kept.items() <= load_report(report).results.items()


def test_package_that_cannot_be_loaded_fails_by_itself(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good").symlink_to(_package(bank, "mkdir").path)
    (folder / "bad").mkdir()
    (folder / "bad" / "task.toml").write_text("[agent]\ntimeout = 5\n")
    assert gate_main([str(folder), "--report", str(tmp_path / "r.json"), "--json"]) == 2
    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["name"], bad["verdict"], good["verdict"]) == ("bad", "failed", "passed")
    assert "has no instruction.md" in bad["reasons"][0] and "\n  -> " in bad["reasons"][0]


def test_command_reports_resumes_and_refuses(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "state" / "gates.json"
    args = ["--report", str(report), "--concurrency", "4"]
    assert gate_main([str(bank), *args]) == 0
    first = capsys.readouterr()
    assert f"{len(FAMILIES)} of {len(FAMILIES)} passed" in first.out
    assert len(first.err.splitlines()) == len(FAMILIES)
    assert gate_main([str(bank), *args]) == 0
    assert capsys.readouterr().err == ""
    broken = write_bank(tmp_path / "broken", ["rm"], 1, seed=5)[0]
    (broken / "solution" / "solve.sh").write_text("#!/bin/sh\nexit 0\n")
    config = broken / "task.toml"
    config.write_text(f'artifacts = ["/app/x"]\n{config.read_text()}')
    assert gate_main([str(broken), *args, "--json"]) == 2
    last = capsys.readouterr()
    assert f"warning: {config}: line 1: 'artifacts' is not acted on here" in last.err
    printed = json.loads(last.out)
    assert printed[0]["verdict"] == "failed"
    assert "its solution scores 0" in printed[0]["reasons"][0]
    assert len(load_report(report).results) == len(FAMILIES) + 1


def test_command_says_what_is_wrong_with_its_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rl.gate", str(tmp_path / "absent")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "no such folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_plain_harbor_agrees(bank: Path, tmp_path: Path, agent: str, reward: float) -> None:
    package = _package(bank, "movein")
    subprocess.run(
        [
            *(Path(sys.executable).parent / "harbor", "run", "-p", package.path, "-a", agent),
            *("-e", "sandboxes.bubblewrap:BubblewrapEnvironment", "-o", tmp_path / "jobs"),
        ],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "HARBOR_TELEMETRY": "0", "PYTHONPATH": str(ROOT)},
    )
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs").rglob("result.json")]
    rewards = [item["verifier_result"]["rewards"] for item in results if "verifier_result" in item]
    assert rewards == [{"reward": reward}]
