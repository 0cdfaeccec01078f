"""The gate of a task: its own solution scores 1, doing nothing scores 0.

Invariants:
- A result belongs to a content digest: it holds wherever that content lies, and
  a changed package has none.
- An attempt that infrastructure masked says nothing about the task: it is tried
  again, then reported as an error that the next run tries afresh.
- A report on disk is whole: written aside, synced, renamed.  One that contradicts
  itself is refused, never believed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from harbor.environments.base import BaseEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl.agent.shell import CommandResult, Shell
from rl.errors import (
    ConfigurationError,
    DeadlineExceeded,
    EvidenceError,
    InfrastructureError,
    SandboxError,
    TaskPackageError,
)
from rl.evidence.lines import first_problem
from rl.files import disk_errors, write_json
from sandboxes.attempt import AttemptLimits, AttemptResult, Provider, run_attempt
from sandboxes.tasks import TaskPackage, verify_digest

ORACLE_REWARD = 1.0
NOTHING_REWARD = 0.0
TRIES = 2  # per attempt, when infrastructure masks it
OUTPUT_LIMIT = 16_384
SHOWN_OUTPUT = 400
UPLOAD_TIMEOUT_S = 60.0
GATE_VERSION = 1  # part of the report: a changed gate makes old results void
_GATE_AGAIN = "delete it and gate again"
DEFAULT_LIMITS = AttemptLimits(deadline_s=600.0, create_s=120.0, verifier_s=120.0, stop_s=30.0)

Verdict = Literal["passed", "failed", "error"]
OnResult = Callable[["GateResult"], None]


class GateResult(BaseModel):
    """What the gate found out about one content digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    digest: str
    verdict: Verdict = Field(description="error: infrastructure failed, nothing was found out")
    reasons: list[str] = Field(default_factory=list, description="why it did not pass")
    oracle: list[float] = Field(default_factory=list, description="rewards of the solution")
    nothing: list[float] = Field(default_factory=list, description="rewards of doing nothing")
    repeats: int = 1
    seconds: float = 0.0


class GateReport(BaseModel):
    """All results so far, by digest."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    gate_version: int = GATE_VERSION
    results: dict[str, GateResult] = Field(default_factory=dict)


class _Recorder:
    """Lends an agent the environment that its attempt runs in."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.env: BaseEnvironment | None = None

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """See `Provider`."""
        self.env = self._provider.create(package, attempt_id, scratch)
        return self.env

    def shell(self, env: BaseEnvironment) -> Shell:
        """See `Provider`."""
        return self._provider.shell(env)


async def run_oracle(
    package: TaskPackage, provider: Provider, limits: AttemptLimits, attempt_id: str
) -> AttemptResult[CommandResult]:
    """One attempt by the package's own solution."""
    if package.solution_script is None:
        raise TaskPackageError(
            "has no solution/solve.sh", str(package.path), "add one, or leave the package out"
        )
    recorder = _Recorder(provider)

    async def solve(shell: Shell, deadline: float) -> CommandResult:
        if recorder.env is None:
            raise SandboxError("the solution has no sandbox", package.name)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                await recorder.env.upload_dir(package.path / "solution", "/solution")
        except TimeoutError:
            what = f"its solution was not uploaded within {UPLOAD_TIMEOUT_S:g} s"
            raise DeadlineExceeded(what, package.name) from None
        left = deadline - asyncio.get_running_loop().time()
        command = "chmod +x /solution/solve.sh; /solution/solve.sh"
        return await shell.run(command, max(left, 1.0), OUTPUT_LIMIT)

    return await run_attempt(package, recorder, solve, limits, attempt_id)


async def run_nothing(
    package: TaskPackage, provider: Provider, limits: AttemptLimits, attempt_id: str
) -> AttemptResult[CommandResult]:
    """One attempt by an agent that does nothing."""

    async def idle(_shell: Shell, _deadline: float) -> CommandResult:
        return CommandResult("", 0)

    return await run_attempt(package, provider, idle, limits, attempt_id)


async def gate_package(
    package: TaskPackage, provider: Provider, limits: AttemptLimits, repeats: int = 1
) -> GateResult:
    """Gate one package."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    rewards: dict[str, list[float]] = {"oracle": [], "nothing": []}
    reasons: list[str] = []
    verdict: Verdict = "passed"
    try:
        verify_digest(package, package.digest)
        for at in range(repeats):
            for kind in rewards:
                reward, reason = await _attempt(package, provider, limits, kind, at)
                rewards[kind].append(reward)
                reasons += [reason] if reason else []
        verdict = "failed" if reasons else "passed"
    except ConfigurationError as error:
        verdict, reasons = "failed", [*reasons, str(error)]
    except InfrastructureError as error:
        verdict, reasons = "error", [*reasons, str(error)]
    return GateResult(
        name=package.name,
        digest=package.digest,
        verdict=verdict,
        reasons=reasons,
        oracle=rewards["oracle"],
        nothing=rewards["nothing"],
        repeats=repeats,
        seconds=loop.time() - began,
    )


async def _attempt(
    package: TaskPackage, provider: Provider, limits: AttemptLimits, kind: str, at: int
) -> tuple[float, str]:
    """One attempt's reward, and why it is wrong, if it is."""
    run = run_oracle if kind == "oracle" else run_nothing
    wanted = ORACLE_REWARD if kind == "oracle" else NOTHING_REWARD
    result: AttemptResult[CommandResult] | None = None
    for again in range(TRIES):
        result = await run(package, provider, limits, f"gate-{package.name}-{kind}-{at}-{again}")
        if result.outcome == "graded":
            break
    assert result is not None
    if result.reward is None:
        failure = result.failure
        text = f"{failure.kind}: {failure.message}" if failure else "no reward"
        if failure is not None and failure.kind == "VerifierError":
            raise TaskPackageError(f"{kind}: {text}", str(package.path))
        raise SandboxError(f"{kind}: {text}", package.name)
    if result.reward == wanted:
        return result.reward, ""
    printed = result.agent.output.strip() if result.agent else ""
    who = "its solution" if kind == "oracle" else "doing nothing"
    said = f"{printed[-SHOWN_OUTPUT:]}\n{result.verifier_log.strip()[-SHOWN_OUTPUT:]}".strip()
    return result.reward, f"{who} scores {result.reward:g}: {said}"


async def gate_all(
    packages: Sequence[TaskPackage],
    provider: Provider,
    limits: AttemptLimits = DEFAULT_LIMITS,
    concurrency: int = 4,
    done: dict[str, GateResult] | None = None,
    on_result: OnResult | None = None,
    repeats: int = 1,
) -> list[GateResult]:
    """Gate all packages that `done` holds no final result for.

    Args:
        packages: what to gate.
        provider: makes the sandboxes.
        limits: of each attempt.
        concurrency: packages gated at once.
        done: results by digest, from a report; those of errors are tried again.
        on_result: called with each fresh result as it comes.
        repeats: how often each attempt is made.

    Returns:
        One result per package, in order, under the package's present name.
    """
    results = {
        digest: result
        for digest, result in (done or {}).items()
        if result.verdict != "error" and result.repeats >= repeats
    }
    todo = {item.digest: item for item in packages if item.digest not in results}
    waiting = list(todo.values())[::-1]

    async def work() -> None:
        while waiting:
            package = waiting.pop()
            result = await gate_package(package, provider, limits, repeats)
            results[result.digest] = result
            if on_result is not None:
                on_result(result)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(work())
    except BaseExceptionGroup as group:  # the others were cancelled because of the first
        raise group.exceptions[0] from group
    return [
        results[package.digest].model_copy(update={"name": package.name}) for package in packages
    ]


def load_report(path: Path) -> GateReport:
    """Read a report; an absent one, or one of an older gate, is empty.

    Raises:
        EvidenceError: it is there and cannot be read, or contradicts itself.
    """
    try:
        report = GateReport.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return GateReport()
    except OSError as error:
        raise EvidenceError(
            f"the gate report cannot be read: {(error.strerror or str(error)).lower()}",
            str(path),
            "the report must be a file, in a folder, that this user may read and write",
        ) from None
    except ValidationError as error:
        what = f"the gate report cannot be read: {first_problem(error)}"
        raise EvidenceError(what, str(path), _GATE_AGAIN) from None
    if report.gate_version != GATE_VERSION:
        return GateReport()
    for digest, result in report.results.items():
        problem = _contradiction(digest, result)
        if problem:
            raise EvidenceError(f"the gate report's entry {problem}", str(path), _GATE_AGAIN)
    return report


def _contradiction(digest: str, result: GateResult) -> str:
    """Why an entry can't be what a gate wrote; empty if it can."""
    if digest != result.digest:
        return f"{digest[:16]} holds the result of {result.digest[:16]}"
    if result.verdict != "passed":
        return ""
    for kind, rewards, wanted in (
        ("oracle", result.oracle, ORACLE_REWARD),
        ("nothing", result.nothing, NOTHING_REWARD),
    ):
        if not rewards or any(reward != wanted for reward in rewards):
            return f"{digest[:16]} passed with {kind} = {rewards}, not {wanted:g}"
    return ""


def require_writable(path: Path) -> None:
    """Refuse a report that could not be written, before hours are spent on it.

    Raises:
        InfrastructureError: nothing can be written there.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def save_report(report: GateReport, path: Path) -> None:
    """Write a report so that it is whole even if this machine stops now."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def require_gate(report: GateReport, packages: Sequence[TaskPackage]) -> None:
    """Refuse to go on unless every package has passed.

    Raises:
        TaskPackageError: naming those that have not, and why.
    """
    problems: list[str] = []
    for package in packages:
        result = report.results.get(package.digest)
        if result is None:
            problems.append(f"{package.name}: not gated")
        elif result.verdict != "passed":
            problems.append(f"{package.name}: {'; '.join(result.reasons)}")
    if problems:
        raise TaskPackageError(
            f"{len(problems)} of {len(packages)} task packages have not passed the gate:\n  - "
            + "\n  - ".join(problems),
            remedy="run `python -m rl.gate FOLDER` and correct or leave out what it names",
        )
