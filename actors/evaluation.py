"""Evaluation of fixed weights: disjoint shards, one replica each, arm after arm.

A campaign's held-out stage, `rl.heldout`, `rl.screen` and `rl.probe` all run it.

Invariants:
- Every shard runs the arms in the given order, and all attempts of one arm
  before the next: an attempt sees one arm's weights from start to end.
- Each cell (arm, task) gets exactly the configured number of graded attempts,
  unless infrastructure failed more often than the retries allow: then the cell
  is short, which the audit reports, and never filled with zeros.
- Graded attempts of an earlier, interrupted evaluation are kept, not repeated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.attempts import run_recorded
from actors.calls import call, together
from actors.cluster import Cluster
from actors.episodes import attempt_seed
from rl.errors import EngineError
from rl.evidence.events import PROVEN
from rl.evidence.frozen import EvaluationPlan
from rl.evidence.recorder import Recorder
from rl.evidence.shards import shard_slots, shard_tasks
from rl.progress import Progress
from rl.records import AdapterBytes, AttemptSpec, EpisodeRecord, TaskRef
from rl.serving_config import ServingConfig

BASE_SERVED_AS = "base"


@dataclass(frozen=True, slots=True)
class Arm:
    """One set of weights under evaluation; no adapter means the base model."""

    name: str
    version: int
    adapter: AdapterBytes | None

    @property
    def served_as(self) -> str:
        """The name under which a replica serves it."""
        return BASE_SERVED_AS if self.adapter is None else f"arm-{self.name}"


def shards(tasks: Sequence[TaskRef], count: int) -> list[list[TaskRef]]:
    """Disjoint shards whose sizes differ by one at most (23 tasks: 12 and 11)."""
    return [shard_tasks(tasks, shard, count) for shard in range(1, count + 1)]


@dataclass
class EvaluationLoop:
    """Runs the evaluation.

    Args:
        config: what is served, and by how many.
        plan: attempts, shards, retries.
        cluster: running replicas and workers.
        tasks: the tasks of all shards.
        arms: in the order in which each shard runs them.
        recorder: where evidence goes; also says what an earlier run has done.
        progress: what the person sees.
    """

    config: ServingConfig
    plan: EvaluationPlan
    cluster: Cluster
    tasks: Sequence[TaskRef]
    arms: Sequence[Arm]
    recorder: Recorder
    progress: Progress
    _graded: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _launched: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    async def run(self) -> None:
        """Run every missing attempt.

        Raises:
            CampaignError: a replica failed, or an arm could not be proven.
        """
        for record in self.recorder.directory.episodes("heldout"):
            self._count(record)
        await self._prove()
        parts = shards(self.tasks, self.plan.shards)
        await together(*(self._shard(replica, part) for replica, part in enumerate(parts)))

    async def _prove(self) -> None:
        """Every worker proves its way to every replica before its first attempt.

        Raises:
            CampaignError: a replica takes no key or any key, does not serve the base
                model under its name, or generates nothing.
        """
        limit = self.config.engine.request_timeout_s + self.config.engine.control_timeout_s
        proofs = await together(
            *(
                call(
                    worker.handle.prove.remote(self.cluster.base_urls, BASE_SERVED_AS),
                    limit * len(self.cluster.base_urls),
                    f"episode worker {index} proof",
                )
                for index, worker in enumerate(self.cluster.workers)
            )
        )
        for index, proof in enumerate(proofs):
            self.recorder.events.append(PROVEN, worker=index, replicas=proof)

    async def _shard(self, replica: int, tasks: Sequence[TaskRef]) -> None:
        slots = self._slots(replica)
        for arm in self.arms:
            if arm.adapter is not None:
                await call(
                    self.cluster.replicas[replica].load_named.remote(arm.served_as, arm.adapter),
                    self.config.engine.start_timeout_s,
                    f"replica {replica} load {arm.name}",
                )
            gate = asyncio.Semaphore(slots)
            await together(
                *(
                    self._cell(replica, arm, task, gate)
                    for _ in range(self.plan.attempts)
                    for task in tasks
                )
            )

    def _slots(self, replica: int) -> int:
        """This shard's part of the episode slots, at least one."""
        return shard_slots(self.config.episodes.concurrency, replica + 1, self.plan.shards)

    async def _cell(self, replica: int, arm: Arm, task: TaskRef, gate: asyncio.Semaphore) -> None:
        """One more graded attempt in this cell, if it still needs one."""
        cell = (arm.name, task.digest)
        async with gate:
            for _ in range(1 + self.plan.retries):
                if self._graded[cell] >= self.plan.attempts:
                    return
                spec = self._spec(replica, arm, task, self._launched[cell])
                self._launched[cell] += 1
                self._graded[cell] += 1  # claimed; given back below if it was not graded
                record = await run_recorded(
                    self.cluster, self.recorder, spec, self.config.episodes.deadline_s
                )
                self.progress.heldout(record)
                if record.outcome == "graded":
                    return
                self._graded[cell] -= 1
                await self._require_alive(replica)

    def _spec(self, replica: int, arm: Arm, task: TaskRef, number: int) -> AttemptSpec:
        cell = f"heldout-{arm.name}-{task.name}"
        attempt_id = f"{cell}-k{number}"
        return AttemptSpec(
            attempt_id=attempt_id,
            group_id=cell,
            task=task,
            version=arm.version,
            stage="heldout",
            arm=arm.name,
            adapter_sha256=None if arm.adapter is None else arm.adapter.sha256,
            served_model=arm.served_as,
            replica=replica,
            base_url=self.cluster.base_urls[replica],
            seed=attempt_seed(self.config.seed, attempt_id),
        )

    def _count(self, record: EpisodeRecord) -> None:
        cell = (str(record.arm), record.task_digest)
        self._launched[cell] += 1
        if record.outcome == "graded":
            self._graded[cell] += 1

    async def _require_alive(self, replica: int) -> None:
        """An outage must end the evaluation, not eat every attempt's retries.

        Raises:
            EngineError: the replica is gone.
        """
        try:
            await call(
                self.cluster.replicas[replica].health.remote(),
                self.config.engine.control_timeout_s,
                f"replica {replica} health",
            )
        except Exception as error:
            raise EngineError(
                f"the replica of this shard failed: {error}",
                f"replica {replica}",
                "see its log in the run's directory, then continue with --resume",
            ) from error
