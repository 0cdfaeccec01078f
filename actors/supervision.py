"""Supervises the replicas of a training: notices failures, restarts within a budget.

Invariants:
- A replica whose engine failed an attempt gets no work until it has answered.
- A lost replica is restarted at most `engine.max_restarts` times, and serves
  nothing before the broadcaster says that it has proven the current version.
- News of a replica's earlier life changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from actors.calls import call
from actors.cluster import Cluster
from actors.starting import START_GRACE_S
from rl.config import CampaignConfig
from rl.errors import EngineError, InfrastructureError
from rl.evidence.recorder import Recorder
from rl.progress import Progress
from rl.schedule.scheduler import Scheduler

HEALTH_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica failed in this generation."""

    replica: int
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class ReplicaAlive:
    """A replica that was in doubt has answered."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaBack:
    """A restarted replica has proven `version`; None: there is none to prove yet."""

    replica: int
    version: int | None
    generation: int


ReplicaEvent = ReplicaLost | ReplicaAlive | ReplicaBack


class ReplicaSupervisor:
    """See the module's invariants.

    Args:
        config: the campaign's configuration.
        cluster: the replicas and their broadcaster.
        scheduler: told which replicas get work.
        recorder: where evidence goes.
        progress: what the person sees.
        start: starts a job of the caller's, who watches over its failure.
        put: queues an event, which comes back through `handle` in its turn.
    """

    def __init__(
        self,
        config: CampaignConfig,
        cluster: Cluster,
        scheduler: Scheduler,
        recorder: Recorder,
        progress: Progress,
        *,
        start: Callable[[Coroutine[Any, Any, None]], None],
        put: Callable[[ReplicaEvent], None],
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._scheduler = scheduler
        self._recorder = recorder
        self._progress = progress
        self._start_job = start
        self._put = put
        self._down: set[int] = set()
        self._suspected: set[int] = set()
        self._given_up: set[int] = set()
        self._restarts: dict[int, int] = {}

    @property
    def all_down(self) -> bool:
        """Whether no replica is in rotation."""
        return len(self._down) == len(self._cluster.replicas)

    def handle(self, event: ReplicaEvent) -> None:
        """Act on what happened to a replica.

        Raises:
            EngineError: no replica is left, and none may be restarted.
        """
        match event:
            case ReplicaLost(replica, generation, why):
                self._lose(replica, generation, why)
            case ReplicaAlive(replica):
                self._suspected.discard(replica)
                self._scheduler.resume_replica(replica)
            case ReplicaBack():
                self._back(event)

    def suspect(self, replica: int) -> None:
        """Send a replica nothing until it has answered: a dead one eats every retry."""
        if replica in self._down or replica in self._suspected:
            return
        self._suspected.add(replica)
        self._scheduler.suspend_replica(replica)
        self._start_job(self._check(replica))

    async def _check(self, replica: int) -> None:
        """Find out whether a replica is alive."""
        generation = self._scheduler.replica_generation(replica)
        try:
            await call(
                self._cluster.replicas[replica].health.remote(),
                self._config.engine.control_timeout_s,
                f"replica {replica} health",
            )
        except InfrastructureError as error:
            self._put(ReplicaLost(replica, generation, str(error)))
        else:
            if replica in self._suspected:  # good news is an event only if it was in doubt
                self._put(ReplicaAlive(replica))

    def _back(self, event: ReplicaBack) -> None:
        """A replica serves again, unless it was lost once more since it said so."""
        if event.generation != self._scheduler.replica_generation(event.replica):
            return
        self._down.discard(event.replica)
        self._recorder.events.append("replica_back", replica=event.replica, version=event.version)
        if event.version is None:  # a publication finds it
            self._progress.note(f"replica {event.replica} is back")
            return
        self._scheduler.replica_back(event.replica, event.version, event.generation)
        self._progress.note(f"replica {event.replica} is back, serving version {event.version}")

    def _lose(self, replica: int, failed_in: int, why: str) -> None:
        """Take a replica out of rotation and restart it, within its budget.

        News of a generation that is past is no news: it was lost and restarted since.
        """
        if failed_in != self._scheduler.replica_generation(replica):
            return
        self._suspected.discard(replica)
        self._down.add(replica)
        generation = self._scheduler.replica_lost(replica)
        self._recorder.events.append("replica_lost", replica=replica, why=why)
        self._progress.note(f"replica {replica} left rotation: {why}")
        used = self._restarts.get(replica, 0)
        self._restarts[replica] = used + 1
        if used < self._config.engine.max_restarts:
            self._start_job(self._restart(replica, generation))
            return
        self._given_up.add(replica)
        self._start_job(self._tell_lost(replica, generation))
        if len(self._given_up) == len(self._cluster.replicas):
            raise EngineError(
                f"no replica is left; the last one failed: {why}",
                "replicas",
                "see the replicas' logs in the campaign's directory, then continue with --resume",
            )

    async def _tell_lost(self, replica: int, generation: int) -> None:
        """Tell the broadcaster, which would otherwise wait for the replica."""
        await call(
            self._cluster.broadcaster.lost.remote(replica, generation),
            HEALTH_INTERVAL_S * 4,
            "broadcaster",
        )

    async def _restart(self, replica: int, generation: int) -> None:
        """Restart a replica; it comes back only with the current version proven."""
        deadline = self._config.engine.start_timeout_s + START_GRACE_S
        try:
            await self._tell_lost(replica, generation)
            self._cluster.base_urls[replica] = await call(
                self._cluster.replicas[replica].restart.remote(),
                deadline,
                f"replica {replica} restart",
            )
            version, proven_in = await call(
                self._cluster.broadcaster.rejoin.remote(replica),
                deadline,
                f"replica {replica} rejoin",
            )
        except InfrastructureError as error:
            self._put(ReplicaLost(replica, generation, str(error)))
            return
        self._put(ReplicaBack(replica, version, proven_in))

    async def watch(self) -> None:
        """Report every replica that stops answering."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            for index in range(len(self._cluster.replicas)):
                if index not in self._down and index not in self._suspected:
                    await self._check(index)
