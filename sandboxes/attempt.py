"""One attempt at one task: create, agent, verify, stop, under one deadline.

Invariants:
- An attempt ends `graded` with a reward or `masked` with a failure; cancellation
  and bugs propagate; in every case the sandbox has been stopped exactly once and
  nothing is left at the scratch path, which is made by whoever writes there.
- The agent's deadline leaves room for verifier and stop.  An agent that returns
  by itself is graded, however it did; one that overruns is infrastructure's fault.
- A verifier's own sandbox, where the package has one, is stopped as surely.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from harbor.environments.base import BaseEnvironment

from rl.agent.shell import Shell
from rl.errors import DeadlineExceeded, InfrastructureError, SandboxError
from rl.records import Failure
from rl.serving_config import ServingConfig
from sandboxes.grading import Grade, grade
from sandboxes.separate import grade_separately
from sandboxes.tasks import TaskPackage

OVERRUN_GRACE_S = 5.0  # an agent returns at its deadline, then its event loop is busy


class Provider(Protocol):
    """What an attempt needs of a `SandboxProvider`."""

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """An environment, not yet started."""
        ...

    def create_grader(
        self, package: TaskPackage, attempt_id: str, scratch: Path
    ) -> BaseEnvironment:
        """The separate environment of a package's verifier, not yet started."""
        ...

    def shell(self, env: BaseEnvironment) -> Shell:
        """The harness's view of a started environment."""
        ...


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Seconds: `deadline_s` is over all; the others bound its stages."""

    deadline_s: float
    create_s: float
    verifier_s: float
    stop_s: float

    @classmethod
    def of(cls, config: ServingConfig) -> AttemptLimits:
        """Those of a run's configuration."""
        return cls(
            deadline_s=config.episodes.deadline_s,
            create_s=config.sandbox.create_timeout_s,
            verifier_s=config.episodes.verifier_timeout_s,
            stop_s=config.sandbox.stop_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class AttemptResult[T]:
    """How an attempt ended; `agent` is what the agent returned, if it did."""

    outcome: Literal["graded", "masked"]
    reward: float | None = None
    agent: T | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    verifier_log: str = ""
    failure: Failure | None = None


type Agent[T] = Callable[[Shell, float], Awaitable[T]]
"""Acts in a sandbox until its absolute deadline on the running loop's clock."""


class _Run[T]:
    """What is known of an attempt so far."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.agent: T | None = None
        self.grade: Grade | None = None

    @contextlib.contextmanager
    def timed(self, stage: str):
        """Record how long a stage took, however it ends."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.timings[stage] = loop.time() - began


async def run_attempt[T](
    package: TaskPackage,
    provider: Provider,
    agent: Agent[T],
    limits: AttemptLimits,
    attempt_id: str,
) -> AttemptResult[T]:
    """Run one attempt to its terminal outcome.

    Args:
        package: the task.
        provider: makes the sandbox.
        agent: acts in it; is expected to return before its deadline.
        limits: of the stages and of the whole.
        attempt_id: names the sandbox.
    """
    run = _Run[T]()
    failure: Failure | None = None
    with run.timed("total"):
        try:
            with _scratch(attempt_id) as scratch:
                env = provider.create(package, attempt_id, scratch)
                grading = _Grading(package, provider, limits, attempt_id, scratch)
                await _in_sandbox(run, env, grading, agent)
        except InfrastructureError as error:
            failure = Failure(kind=type(error).__name__, message=str(error))
    if failure is not None or run.grade is None:
        failure = failure or Failure(kind="SandboxError", message="ended without a grade")
        return AttemptResult("masked", agent=run.agent, timings=run.timings, failure=failure)
    return AttemptResult(
        "graded", run.grade.reward, run.agent, run.timings, run.grade.log, failure=None
    )


@dataclass(frozen=True, slots=True)
class _Grading:
    """How one attempt is graded: in its own sandbox, or in one of the verifier's."""

    package: TaskPackage
    provider: Provider
    limits: AttemptLimits
    attempt_id: str
    scratch: Path

    async def grade(self, env: BaseEnvironment, left_s: float) -> Grade:
        """Grade what the agent left in `env` in at most `left_s` seconds."""
        limits, package = self.limits, self.package
        until = asyncio.get_running_loop().time() + min(limits.verifier_s, left_s)
        if not package.separate_verifier:
            return await grade(env, package, _left_s(until, package))
        scratch = self.scratch / "grader"
        grader = self.provider.create_grader(package, self.attempt_id, scratch)
        try:
            await _create(grader, min(limits.create_s, _left_s(until, package)))
            left_s = _left_s(until, package)
            return await grade_separately(env, grader, package, scratch, left_s)
        finally:
            await _stop(grader, limits.stop_s)


def _left_s(until: float, package: TaskPackage) -> float:
    left = until - asyncio.get_running_loop().time()
    if left <= 0:
        raise DeadlineExceeded("no time was left for the verifier", package.name)
    return left


async def _in_sandbox[T](
    run: _Run[T], env: BaseEnvironment, grading: _Grading, agent: Agent[T]
) -> None:
    """Create, act, verify; stop exactly once whatever happens."""
    package, limits = grading.package, grading.limits
    until = asyncio.get_running_loop().time() + limits.deadline_s
    stops = 2 if package.separate_verifier else 1
    try:
        with run.timed("create"):
            await _create(env, min(limits.create_s, limits.deadline_s))
        with run.timed("agent"):
            acting_until = _agent_deadline(package, limits, until)
            run.agent = await _act(agent, grading.provider.shell(env), acting_until)
        with run.timed("verify"):
            run.grade = await grading.grade(env, _left_s(until - stops * limits.stop_s, package))
    finally:
        with run.timed("stop"):
            await _stop(env, limits.stop_s)


async def _create(env: BaseEnvironment, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await env.start(False)
    except TimeoutError:
        raise DeadlineExceeded(f"no sandbox within {limit_s:.0f} s", env.session_id) from None
    except (OSError, RuntimeError) as error:
        what = f"the sandbox could not be created: {error!r}"
        raise SandboxError(what, env.session_id) from error


def _agent_deadline(package: TaskPackage, limits: AttemptLimits, until: float) -> float:
    now = asyncio.get_running_loop().time()
    deadline = until - limits.verifier_s - limits.stop_s
    if package.agent_timeout_s is not None:
        deadline = min(deadline, now + package.agent_timeout_s)
    if deadline <= now:
        raise DeadlineExceeded("creating the sandbox left no time for the agent", package.name)
    return deadline


async def _act[T](agent: Agent[T], shell: Shell, deadline: float) -> T:
    """Let the agent act; give it up when it does not return by itself."""
    grace = asyncio.timeout_at(deadline + OVERRUN_GRACE_S)
    try:
        async with grace:
            return await agent(shell, deadline)
    except TimeoutError:
        if not grace.expired():
            raise  # the agent's own, a bug there
        raise DeadlineExceeded(
            f"the agent did not return within {OVERRUN_GRACE_S:.0f} s of its deadline"
        ) from None


async def _stop(env: BaseEnvironment, limit_s: float) -> None:
    """Stop the sandbox even while this task is being cancelled."""
    stopping = asyncio.ensure_future(env.stop(delete=True))
    cancelled: asyncio.CancelledError | None = None
    until = asyncio.get_running_loop().time() + limit_s
    while not stopping.done():
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            stopping.cancel()
            raise DeadlineExceeded(f"not stopped within {limit_s:.0f} s", env.session_id)
        try:
            await asyncio.wait({stopping}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        stopping.result()
    except (OSError, RuntimeError) as error:
        what = f"the sandbox could not be stopped: {error!r}"
        raise SandboxError(what, env.session_id) from error
    if cancelled is not None:
        raise cancelled


@contextlib.contextmanager
def _scratch(attempt_id: str) -> Generator[Path]:
    """A path of the attempt's own, with nothing there before or after.

    A folder that is made only when it is needed can't be left behind by a worker
    that is killed, and costs nothing where no provider needs one.
    """
    name = f"attempt-{_safe(attempt_id)}-{secrets.token_hex(8)}"
    path = Path(tempfile.gettempdir(), name)
    try:
        yield path
    finally:
        if path.exists():
            shutil.rmtree(path)


def _safe(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:48]
