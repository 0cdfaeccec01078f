"""The gate of a task: its own solution scores 1, doing nothing scores 0.

Each is tried twice, under the package's own limits, and nothing may be left behind.

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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

from harbor.environments.base import BaseEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl.agent.shell import EXIT_TIMED_OUT, CommandResult, Shell
from rl.config import SandboxConfig
from rl.errors import (
    ConfigurationError,
    EvidenceError,
    InfrastructureError,
    SandboxError,
    TaskPackageError,
    VerifierError,
    first_problem,
)
from rl.files import disk_errors, write_json
from sandboxes.attempt import AttemptLimits, AttemptResult, Provider
from sandboxes.leftovers import look
from sandboxes.provider import SandboxProvider
from sandboxes.reference import run_nothing, run_oracle
from sandboxes.tasks import CONFIG_NAME, TaskPackage, verify_digest
from sandboxes.usage import Usage

ORACLE_REWARD = 1.0
NOTHING_REWARD = 0.0
REPEATS = 2  # what comes out once may come out by luck
TRIES = 2  # per attempt, when infrastructure masks it
SHOWN_OUTPUT = 400
SHOWN_PROBLEMS = 10
SCRATCH_NAME = "gate-"  # how the names of attempts begin, and so of their scratch paths
GATE_VERSION = 2  # part of the report: a changed gate makes old results void
_GATE_AGAIN = "delete it and gate again"
DEFAULT_LIMITS = AttemptLimits(deadline_s=600.0, create_s=120.0, verifier_s=120.0, stop_s=30.0)
DEFAULT_AGENT_S = 600.0  # for a solution whose package sets no limit

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
    repeats: int = Field(default=1, description="how often each attempt was made")
    memory_mb: float | None = Field(
        default=None, description="largest process of the solution, MiB; None: not measured"
    )
    disk_mb: float | None = Field(
        default=None, description="writable disk in use after the solution, MiB; None: as above"
    )
    agent_s: float = Field(default=0.0, description="slowest solution, s")
    verifier_s: float = Field(default=0.0, description="slowest verification, s")
    seconds: float = Field(default=0.0, description="the whole gate, s")


class GateReport(BaseModel):
    """All results so far, by digest."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    gate_version: int = GATE_VERSION
    results: dict[str, GateResult] = Field(default_factory=dict)


class AsRequested:
    """Makes each sandbox as large as its package asks for.

    Args:
        config: of the sandboxes, and the sizes for packages that ask for none.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._inner = SandboxProvider(config)

    def preflight(self) -> None:
        """See `SandboxProvider`."""
        self._inner.preflight()

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """See `Provider`."""
        return self._as_asked(package).create(package, attempt_id, scratch)

    def create_grader(
        self, package: TaskPackage, attempt_id: str, scratch: Path
    ) -> BaseEnvironment:
        """See `Provider`."""
        return self._as_asked(package).create_grader(package, attempt_id, scratch)

    def shell(self, env: BaseEnvironment) -> Shell:
        """See `Provider`."""
        return self._inner.shell(env)

    def _as_asked(self, package: TaskPackage) -> SandboxProvider:
        asked = {
            "cpus": package.cpus,
            "memory_mb": package.memory_mb,
            "disk_mb": package.config.environment.storage_mb,
        }
        stated = {key: value for key, value in asked.items() if value is not None}
        return SandboxProvider(self._config.model_copy(update=stated))


class _Gate:
    """One package on its way through the gate: what is known of it so far."""

    def __init__(self, package: TaskPackage, provider: Provider, limits: AttemptLimits) -> None:
        self.package = package
        self._provider = provider
        self._limits = limits
        self.oracle: list[float] = []
        self.nothing: list[float] = []
        self.reasons: list[str] = []
        self.usage: list[Usage] = []
        self.slowest: dict[str, float] = {}

    async def run(self, repeats: int) -> None:
        """Make every attempt, and note what is wrong.

        Raises:
            TaskPackageError: the package can't be graded, or changes on disk.
            InfrastructureError: nothing could be found out.
        """
        verify_digest(self.package, self.package.digest)
        for at in range(repeats):
            await self._oracle(at)
            await self._nothing(at)
        verify_digest(self.package, self.package.digest)
        self._check_usage()

    async def _oracle(self, at: int) -> None:
        def heard(usage: Usage | None) -> None:
            self.usage += [usage] if usage is not None else []

        async def solve(attempt_id: str) -> AttemptResult[CommandResult]:
            return await run_oracle(
                self.package, self._provider, self._limits, attempt_id, on_usage=heard
            )

        result, reward = await self._graded("oracle", at, solve)
        self.oracle.append(reward)
        if result.agent is not None and result.agent.exit_code == EXIT_TIMED_OUT:
            seconds = result.timings["agent"]
            self._fail(
                f"its solution was still running after {seconds:.0f} s",
                "solution/solve.sh",
                "make it end by itself, or raise agent.timeout_sec",
            )
        if reward != ORACLE_REWARD:
            self._fail(
                f"its solution scores {reward:g}: {_said(result)}",
                "solution/solve.sh",
                "correct the solution, or what tests/test.sh asks for",
            )

    async def _nothing(self, at: int) -> None:
        async def idle(attempt_id: str) -> AttemptResult[CommandResult]:
            return await run_nothing(self.package, self._provider, self._limits, attempt_id)

        result, reward = await self._graded("nothing", at, idle)
        self.nothing.append(reward)
        if reward != NOTHING_REWARD:
            self._fail(
                f"doing nothing scores {reward:g}: {_said(result)}",
                "tests/test.sh",
                "make it check for something that is not so from the start",
            )

    async def _graded(
        self, kind: str, at: int, run: Callable[[str], Awaitable[AttemptResult[CommandResult]]]
    ) -> tuple[AttemptResult[CommandResult], float]:
        """The first of `TRIES` attempts that infrastructure did not mask."""
        result: AttemptResult[CommandResult] | None = None
        for again in range(TRIES):
            result = await run(f"{SCRATCH_NAME}{self.package.name}-{kind}-{at}-{again}")
            for stage, seconds in result.timings.items():
                self.slowest[stage] = max(seconds, self.slowest.get(stage, 0.0))
            if result.reward is not None:
                return result, result.reward
        failure = result.failure if result is not None else None
        text = f"{failure.kind}: {failure.message}" if failure else "no reward"
        if failure is not None and failure.kind == VerifierError.__name__:
            raise TaskPackageError(
                f"{kind}: {text}",
                str(self.package.path / "tests" / "test.sh"),
                "make it write one finite number to /logs/verifier/reward.txt within "
                f"verifier.timeout_sec = {self.package.verifier_timeout_s:g} s",
            )
        raise SandboxError(f"{kind}: {text}", self.package.name)

    def _check_usage(self) -> None:
        """Its solution must fit into the memory that the package asks for.

        The disk is as large as what was asked for, so a solution that needs more has
        failed already.
        """
        asked = self.package.memory_mb
        used = max((usage.memory_mb for usage in self.usage), default=0.0)
        if asked is not None and used > asked:
            self._fail(
                f"a process of its solution took {used:.0f} MiB of {asked} MiB asked for",
                CONFIG_NAME,
                "raise environment.memory_mb, or make the solution need less",
            )

    def _fail(self, what: str, file: str, remedy: str) -> None:
        reason = str(TaskPackageError(what, str(self.package.path / file), remedy))
        if reason not in self.reasons:
            self.reasons.append(reason)


def _said(result: AttemptResult[CommandResult]) -> str:
    """The ends of what an attempt's agent and verifier printed."""
    printed = result.agent.output.strip() if result.agent else ""
    log = result.verifier_log.strip()
    return f"{printed[-SHOWN_OUTPUT:]}\n{log[-SHOWN_OUTPUT:]}".strip()


def limits_asked(package: TaskPackage) -> AttemptLimits:
    """The limits that the package itself sets, and ours for the rest."""
    create_s = max(DEFAULT_LIMITS.create_s, package.config.environment.build_timeout_sec)
    agent_s = package.agent_timeout_s or DEFAULT_AGENT_S
    stop_s, verifier_s = DEFAULT_LIMITS.stop_s, package.verifier_timeout_s
    return AttemptLimits(create_s + agent_s + verifier_s + stop_s, create_s, verifier_s, stop_s)


async def gate_package(
    package: TaskPackage,
    provider: Provider,
    limits: AttemptLimits | None = None,
    repeats: int = REPEATS,
) -> GateResult:
    """Gate one package, under its own limits unless others are given."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    gate = _Gate(package, provider, limits or limits_asked(package))
    verdict: Verdict = "passed"
    try:
        await gate.run(repeats)
        verdict = "failed" if gate.reasons else "passed"
    except ConfigurationError as error:
        verdict = "failed"
        gate.reasons.append(str(error))
    except InfrastructureError as error:
        verdict = "error"
        gate.reasons.append(str(error))
    return GateResult(
        name=package.name,
        digest=package.digest,
        verdict=verdict,
        reasons=gate.reasons,
        oracle=gate.oracle,
        nothing=gate.nothing,
        repeats=repeats,
        memory_mb=max((usage.memory_mb for usage in gate.usage), default=None),
        disk_mb=max((usage.disk_mb for usage in gate.usage), default=None),
        agent_s=gate.slowest.get("agent", 0.0),
        verifier_s=gate.slowest.get("verify", 0.0),
        seconds=loop.time() - began,
    )


def unloadable(name: str, error: TaskPackageError) -> GateResult:
    """The result of a package that can't even be loaded; it has no digest."""
    return GateResult(name=name, digest="", verdict="failed", reasons=[str(error)], repeats=0)


async def gate_all(
    packages: Sequence[TaskPackage],
    provider: Provider,
    limits: AttemptLimits | None = None,
    concurrency: int = 4,
    done: dict[str, GateResult] | None = None,
    on_result: OnResult | None = None,
    repeats: int = REPEATS,
) -> list[GateResult]:
    """Gate all packages that `done` holds no final result for.

    Args:
        packages: what to gate.
        provider: makes the sandboxes.
        limits: of each attempt; None: what each package asks for.
        concurrency: packages gated at once.
        done: results by digest, from a report; those of errors are tried again.
        on_result: called with each fresh result as it comes.
        repeats: how often each attempt is made.

    Returns:
        One result per package, in order, under the package's present name.

    Raises:
        SandboxError: a process, a mount or a file is left of what ran here.
    """
    before = look(f"attempt-{SCRATCH_NAME}")
    results = {
        digest: result
        for digest, result in (done or {}).items()
        if _is_final(result, provider, repeats)
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
    left = look(f"attempt-{SCRATCH_NAME}").since(before) if todo else []
    if left:
        raise SandboxError(
            "gating left something behind:\n  - " + "\n  - ".join(left),
            remedy="end or remove it; a sandbox must not outlive its attempt",
        )
    return [
        results[package.digest].model_copy(update={"name": package.name}) for package in packages
    ]


def _is_final(result: GateResult, provider: Provider, repeats: int) -> bool:
    """Whether a result of before still says how the gate would end here."""
    if result.verdict == "error" or result.repeats < repeats:
        return False
    room_mb = provider.config.disk_mb if isinstance(provider, SandboxProvider) else None
    return room_mb is None or result.disk_mb is None or result.disk_mb <= room_mb


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


def require_gate(
    report: GateReport, packages: Sequence[TaskPackage], command: str = "python -m rl.gate FOLDER"
) -> None:
    """Refuse to go on unless every package has passed; `command` gates them.

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
        shown = problems[:SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise TaskPackageError(
            f"{len(problems)} of {len(packages)} task packages have not passed the gate:\n  - "
            + "\n  - ".join(shown),
            remedy=f"run `{command}` and correct or leave out what it names",
        )
