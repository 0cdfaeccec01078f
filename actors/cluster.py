"""The run's actors in one pair of hands, stopped in order (`actors.starting` starts them).

Invariants:
- Whatever was started is stopped, also when a start fails half-way or the
  person at the terminal interrupts it; engines first lose their work, then
  their processes, then their actors.
- What was reserved is given back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.calls import call
from actors.nodes import Nodes
from actors.placement import Placement
from rl.config import ServingConfig
from rl.errors import ActorLostError, InfrastructureError

MAX_WORKER_LOSSES = 3  # of one worker and campaign: more is a fault that repeats
WHEREABOUTS_S = 5.0  # no more of the time for stopping than this
STOP_GRACE_S = 15.0  # beyond the time that sandboxes have


@dataclass
class WorkerSlots:
    """One episode worker and how many of its slots are taken.

    Attributes:
        start: makes the actor; called again when its process is gone.
        handle: the actor.
        slots: episodes that it runs at once.
        busy: slots that are taken.
        losses: how often its process was lost.
    """

    start: Callable[[int], Any]
    handle: Any
    slots: int
    busy: int = 0
    losses: int = 0

    def replace(self, lost: Any) -> None:
        """Start the worker afresh, once for each actor that was lost.

        Raises:
            ActorLostError: it was lost too often.
        """
        if lost is not self.handle:
            return  # another of its attempts has replaced it already
        self.losses += 1
        if self.losses > MAX_WORKER_LOSSES:
            raise ActorLostError(
                f"an episode worker's process was lost {self.losses} times",
                "episode workers",
                "see the Ray logs for why (memory, most often), then continue with --resume",
            )
        self.handle = self.start(self.losses)


@dataclass
class Cluster:
    """Handles of all actors of one campaign.

    Attributes:
        placed: the worker of each attempt that runs.
        placement: what is reserved for the run.
        nodes: where its actors lie, and what they left there.
    """

    config: ServingConfig
    replicas: list[Any] = field(default_factory=list[Any])
    base_urls: list[str] = field(default_factory=list[str])
    workers: list[WorkerSlots] = field(default_factory=list[WorkerSlots])
    placed: dict[str, WorkerSlots] = field(default_factory=dict[str, WorkerSlots])
    broadcaster: Any = None
    trainer: Any = None
    placement: Placement | None = None
    nodes: Nodes | None = None

    @property
    def placed_at(self) -> Placement:
        """What was reserved."""
        assert self.placement is not None, "reserve comes first"
        return self.placement

    @property
    def sites(self) -> Nodes:
        """The nodes that the actors lie on."""
        assert self.nodes is not None, "reserve comes first"
        return self.nodes

    def free_worker(self) -> WorkerSlots:
        """The worker with the most free slots; takes one of them."""
        worker = max(self.workers, key=lambda w: w.slots - w.busy)
        if worker.busy >= worker.slots:
            raise InfrastructureError("no free slot", "episode workers")
        worker.busy += 1
        return worker

    async def stop_trainer(self) -> None:
        """Stop the trainer; the replicas go on serving."""
        if self.trainer is not None:
            _kill(self.trainer)
            self.trainer = None

    async def processes(self) -> dict[str, int]:
        """Ids of the engines' processes on this machine, by a name for messages."""
        calls = [
            call(replica.whereabouts.remote(), WHEREABOUTS_S, f"replica {index}")
            for index, replica in enumerate(self.replicas)
        ]
        # One that fails, or is gone, must not keep the others from being stopped.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            f"process {pid} of replica {index}": pid
            for index, answer in enumerate(answers)
            if not isinstance(answer, BaseException) and answer[0] == socket.gethostname()
            for pid in answer[1]
        }

    async def stop(self) -> list[str]:
        """Stop everything in order; returns what did not stop by itself."""
        problems: list[str] = []
        calls = [
            *((f"worker {i}", w.handle.drain.remote()) for i, w in enumerate(self.workers)),
            *((f"replica {i}", r.stop.remote()) for i, r in enumerate(self.replicas)),
        ]
        grace = STOP_GRACE_S + self.config.sandbox.stop_timeout_s
        results = await asyncio.gather(
            *(call(ref, grace, who) for who, ref in calls), return_exceptions=True
        )
        for (who, _), result in zip(calls, results, strict=True):
            if isinstance(result, BaseException):
                problems.append(f"{who}: {result}")
        handles = [w.handle for w in self.workers] + self.replicas
        for handle in [*handles, self.broadcaster, self.trainer]:
            if handle is not None:
                _kill(handle)
        self.workers, self.replicas, self.broadcaster, self.trainer = [], [], None, None
        return problems + await self._leave()

    async def _leave(self) -> list[str]:
        """Bring the logs home and give the nodes back; returns what could not be had."""
        try:
            return [] if self.nodes is None else await self.nodes.fetch_logs()
        finally:
            if self.nodes is not None:
                self.nodes.close()
            if self.placement is not None:
                self.placement.release()
            self.nodes, self.placement = None, None


def still_running(processes: dict[str, int]) -> list[str]:
    """Which of the processes that were stopped are there all the same."""
    return [who for who, pid in processes.items() if Path(f"/proc/{pid}").exists()]


def _kill(handle: Any) -> None:
    """End an actor's process; one that is gone already is no problem."""
    import ray

    ray.kill(handle)
