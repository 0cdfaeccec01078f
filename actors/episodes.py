"""The episode worker: an async actor whose slots each run one episode.

Invariants:
- `run` returns one terminal `EpisodeRecord` for every attempt it is given, or
  raises a bug; it never retries and never scores what infrastructure broke.
- An episode talks to one replica under one served version from start to end.
- The sandbox is stopped on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path

from rl.agent.chat import Chat
from rl.agent.client import EngineClient, SamplingParams
from rl.agent.harness import AgentResult, BashAgent, Generated
from rl.agent.shell import Shell
from rl.errors import EngineError
from rl.records import AttemptSpec, EpisodeRecord, TaskRef
from rl.serving_config import ServingConfig
from sandboxes.attempt import AttemptLimits, AttemptResult, run_attempt
from sandboxes.provider import SandboxProvider, lifetime
from sandboxes.tasks import TaskPackage, load_package, verify_digest

# The client's own limit lies this far behind the harness's deadline, so that a
# model out of time is told apart from an engine that does not answer.
CLIENT_GRACE_S = 5.0
VERIFIER_LOG_LIMIT = 4_000
PROOF_TASK = "Print the working directory."
PROOF_TOKENS = 8
# g00012.1-a3: draw 12 in the campaign's second driver, its fourth attempt (rl.schedule).
_INCARNATION = re.compile(r"^(g\d+)\.\d+")


class EpisodeWorker:
    """Runs attempts, many at once, each in a sandbox of its own.

    Args:
        index: which worker this is.
        config: the campaign's configuration.
        model_dir: the tokenizer is read from here.
        task_root: folder of the task packages.
        api_key: the replicas' key, if they have one.
        campaign: its run id, by which its sandboxes are found again.
    """

    def __init__(
        self,
        index: int,
        config: ServingConfig,
        model_dir: Path,
        task_root: Path,
        api_key: str | None = None,
        campaign: str | None = None,
    ) -> None:
        self._index = index
        self._config = config
        self._task_root = task_root
        self._client = EngineClient(api_key)
        self._chat = Chat(model_dir, config.model, config.agent)
        self._provider = SandboxProvider(
            config.sandbox,
            lifetime(config.episodes.deadline_s),
            campaign,
            creators=config.episodes.workers,
        )
        self._packages: dict[str, TaskPackage] = {}
        self._running: dict[str, asyncio.Task[EpisodeRecord]] = {}
        self._finished = 0

    def __repr__(self) -> str:
        return f"EpisodeWorker {self._index} running {len(self._running)} done {self._finished}"

    async def ready(self) -> int:
        """The worker's index, once it is constructed."""
        return self._index

    async def prove(self, base_urls: list[str], name: str) -> list[dict[str, str | int]]:
        """Prove that each replica wants a key, serves `name`, and samples from it.

        Returns:
            For each replica its address, its names, and the number of tokens it sampled.

        Raises:
            EngineError, DeadlineExceeded: one of them does not.
        """
        return list(await asyncio.gather(*(self._prove(url, name) for url in base_urls)))

    async def _prove(self, url: str, name: str) -> dict[str, str | int]:
        engine = self._config.engine
        await self._client.require_guarded(url, engine.control_timeout_s)
        names = await self._client.list_models(url, engine.control_timeout_s)
        if name not in names:
            raise EngineError(f"serves {', '.join(names) or 'nothing'}, and not '{name}'", url)
        prompt = self._chat.opening(PROOF_TASK)
        sampling = SamplingParams(max_tokens=PROOF_TOKENS, temperature=0.0)
        done = await self._client.generate(url, name, prompt, sampling, engine.request_timeout_s)
        if not done.token_ids:
            raise EngineError("sampled nothing", url, "see the engine's log")
        return {"url": url, "names": ", ".join(names), "sampled": len(done.token_ids)}

    async def run(self, spec: AttemptSpec) -> EpisodeRecord:
        """Run one attempt to its terminal record."""
        started = time.time()
        task = asyncio.ensure_future(self._run(spec, started))
        self._running[spec.attempt_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            return EpisodeRecord.cancelled(spec, started)
        finally:
            self._running.pop(spec.attempt_id, None)
            self._finished += 1

    async def cancel(self, attempt_id: str) -> bool:
        """End a running attempt; its `run` returns a `cancelled` record."""
        task = self._running.get(attempt_id)
        return task.cancel() if task is not None else False

    async def drain(self) -> int:
        """Cancel all attempts and wait until their sandboxes are gone; returns how many."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.sandbox.stop_timeout_s)
        await self._client.close()
        return len(tasks)

    async def _run(self, spec: AttemptSpec, started: float) -> EpisodeRecord:
        package = self._package(spec.task)

        async def agent(shell: Shell, deadline: float) -> AgentResult:
            return await self._agent(spec).run(spec.task.instruction, shell, deadline)

        result = await run_attempt(
            package, self._provider, agent, AttemptLimits.of(self._config), spec.attempt_id
        )
        return _record(spec, started, result)

    def _agent(self, spec: AttemptSpec) -> BashAgent:
        config = self._config

        async def generate(prompt: list[int], turn: int, most: int, left: float) -> Generated:
            sampling = SamplingParams(
                max_tokens=most,
                temperature=config.agent.temperature,
                seed=_turn_seed(spec.seed, turn),
                stop_token_ids=tuple(self._chat.stop_token_ids),
                stop=tuple(self._chat.stop_strings),
                priority=spec.version,  # what is due first is served first
            )
            timeout = min(config.engine.request_timeout_s, left + CLIENT_GRACE_S)
            done = await self._client.generate(
                spec.base_url, spec.served_model, prompt, sampling, timeout
            )
            return Generated(done.token_ids, done.logprobs, done.finish_reason)

        return BashAgent(self._chat, config.agent, generate, config.engine.max_model_len)

    def _package(self, task: TaskRef) -> TaskPackage:
        """The task's package, loaded and checked against its digest once."""
        package = self._packages.get(task.digest)
        if package is None:
            package = load_package(self._task_root / task.path, task.name)
            verify_digest(package, task.digest)
            self._packages[task.digest] = package
        return package


def _record(spec: AttemptSpec, started: float, result: AttemptResult[AgentResult]) -> EpisodeRecord:
    """The terminal record of an attempt that ran to its end."""
    graded = result.outcome == "graded"
    agent = result.agent
    return EpisodeRecord.of(
        spec,
        outcome=result.outcome,
        reward=result.reward,
        stop_reason=agent.stop_reason if graded and agent is not None else "infrastructure",
        samples=agent.samples if agent is not None else [],
        turns=agent.turns if agent is not None else [],
        timings=result.timings,
        verifier_log=result.verifier_log[-VERIFIER_LOG_LIMIT:],
        failure=result.failure,
        started_at=started,
    )


def attempt_seed(campaign_seed: int, attempt_id: str) -> int:
    """The sampling seed of an attempt: a function of campaign seed and id alone.

    The driver's number takes no part in it: what a continued campaign draws again, or
    for the first time, is sampled as the undisturbed one would have sampled it.
    """
    named = _INCARNATION.sub(r"\1", attempt_id)
    digest = hashlib.sha256(f"{campaign_seed}/{named}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # engines take a signed 32-bit seed


def _turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn, so that turns of an attempt draw different noise."""
    return (seed + 7919 * turn) & 0x7FFF_FFFF
