"""The campaign's actors: started together, stopped in order.

Invariants:
- Whatever was started is stopped, also when a start fails half-way or the
  person at the terminal interrupts it; engines first lose their work, then
  their processes, then their actors.
- No actor restarts by itself: a restart is a decision of the campaign.
- Every actor has a name and lives in the campaign's own Ray namespace.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.calls import call, together
from rl.config import CampaignConfig, ServingConfig
from rl.errors import ActorLostError, InfrastructureError

WORKER_START_S = 180.0
MAX_WORKER_LOSSES = 3  # of one worker and campaign: more is a fault that repeats
TRAINER_START_S = 900.0
RAYLET_START_S = 180
START_GRACE_S = 60.0  # ending a former engine, and carrying the answer
WHEREABOUTS_S = 5.0  # no more of the time for stopping than this
STOP_GRACE_S = 15.0  # beyond the time that sandboxes have
# Beside its slots a worker answers control calls.
CONTROL_CALLS = 8
# Threads that share cores must sleep, not spin, while they wait.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "HARBOR_TELEMETRY": "0"}


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
    """

    config: ServingConfig
    replicas: list[Any] = field(default_factory=list[Any])
    base_urls: list[str] = field(default_factory=list[str])
    workers: list[WorkerSlots] = field(default_factory=list[WorkerSlots])
    placed: dict[str, WorkerSlots] = field(default_factory=dict[str, WorkerSlots])
    broadcaster: Any = None
    trainer: Any = None

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
        return problems


def still_running(processes: dict[str, int]) -> list[str]:
    """Which of the processes that were stopped are there all the same."""
    return [who for who, pid in processes.items() if Path(f"/proc/{pid}").exists()]


def connect(address: str | None, namespace: str, dashboard: bool = True) -> str:
    """Connect to a Ray cluster, or start one here; returns where the dashboard is.

    Args:
        address: of an existing cluster; None takes RAY_ADDRESS, or starts one.
        namespace: the campaign's run id.
        dashboard: whether a cluster that is started here has a dashboard.

    Raises:
        InfrastructureError: the cluster can't be reached or started.
    """
    import logging

    # A busy machine takes longer than Ray's own 30 s to start its daemon.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(RAYLET_START_S))
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = (
        {"address": address}
        if address
        else {
            "address": "local",
            "include_dashboard": dashboard,
        }
    )
    try:
        context = ray.init(
            **options,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InfrastructureError(
            f"Ray could not be reached or started: {str(error).splitlines()[0]}",
            address or "local",
            "check the address with `ray status`, or unset RAY_ADDRESS to run on this machine",
        ) from error
    return context.dashboard_url or ""


async def start_serving(
    cluster: Cluster,
    model_dir: Path,
    run_dir: Path,
    task_root: Path,
    run_id: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    *,
    publishing: bool = True,
) -> None:
    """Start replicas, broadcaster and episode workers; all are ready on return.

    Args:
        cluster: gets the handles.
        model_dir: base weights and tokenizer.
        run_dir: replicas keep their logs and adapters below it.
        task_root: folder of the task packages.
        run_id: the campaign's, by which its remote sandboxes are found again.
        note: told of each replica that serves.
        publishing: whether versions will be published, so that there is a broadcaster.

    Raises:
        CampaignError: something did not start; the caller stops the cluster.
    """
    from actors.broadcaster import WeightBroadcaster
    from actors.episodes import EpisodeWorker
    from actors.replica import Replica

    config = cluster.config
    api_key = secrets.token_urlsafe(24)
    need = config.resources
    for index in range(config.engine.replicas):
        actor = _remote(
            Replica, f"replica-{index}", need.replica_cpus, need.replica_gpus, CONTROL_CALLS
        )
        cluster.replicas.append(actor.remote(index, config, model_dir, run_dir, api_key))
    for index, slots in enumerate(_split(config.episodes.concurrency, config.episodes.workers)):

        def start(losses: int, index: int = index, slots: int = slots) -> Any:
            actor = _remote(
                EpisodeWorker,
                f"episodes-{index}.{losses}",
                need.worker_cpus,
                max_concurrency=slots + CONTROL_CALLS,
            )
            return actor.remote(index, config, model_dir, task_root, api_key, run_id)

        cluster.workers.append(WorkerSlots(start, start(0), slots))
    if publishing:
        broadcaster = _remote(WeightBroadcaster, "broadcaster", 0.0, max_concurrency=CONTROL_CALLS)
        cluster.broadcaster = broadcaster.remote(config, cluster.replicas)

    async def start_replica(index: int, replica: Any) -> str:
        # Longer than the replica's own limit, whose message names the engine's log.
        deadline = config.engine.start_timeout_s + START_GRACE_S
        url: str = await call(replica.start.remote(), deadline, f"replica {index} start")
        note(f"replica {index} serves at {url}")
        return url

    workers = [
        call(worker.handle.ready.remote(), WORKER_START_S, f"episode worker {index} start")
        for index, worker in enumerate(cluster.workers)
    ]
    replicas = [start_replica(index, replica) for index, replica in enumerate(cluster.replicas)]
    started = await together(*replicas, *workers)
    cluster.base_urls = started[: len(replicas)]


async def start_trainer(
    cluster: Cluster,
    config: CampaignConfig,
    model_dir: Path,
    checkpoints: Path,
    resume: Path | None,
) -> int:
    """Start the trainer; returns the version it stands at.

    Raises:
        CampaignError: the model does not load, or there is too little memory.
    """
    from actors.prime_trainer import PrimeTrainer
    from actors.trainer import Trainer

    need, prime = config.resources, config.trainer.prime
    backend = Trainer if prime is None else PrimeTrainer
    deadline = TRAINER_START_S + (0.0 if prime is None else prime.start_timeout_s)
    actor = _remote(backend, "trainer", need.trainer_cpus, need.trainer_gpus)
    cluster.trainer = actor.remote(config, model_dir, checkpoints, resume)
    version: int = await call(cluster.trainer.ready.remote(), deadline, "trainer start")
    return version


def _remote(
    cls: type, name: str, cpus: float, gpus: float = 0.0, max_concurrency: int | None = None
) -> Any:
    """The actor class with its name, resources and concurrent calls."""
    import ray

    actor: Any = ray.remote(cls)
    concurrency = {} if max_concurrency is None else {"max_concurrency": max_concurrency}
    return actor.options(
        **concurrency,
        name=name,
        num_cpus=cpus,
        num_gpus=gpus,
        max_restarts=0,
        runtime_env={"env_vars": SHARED_CORES},
    )


def _split(slots: int, workers: int) -> list[int]:
    """Slots spread over workers as evenly as can be."""
    base, extra = divmod(slots, workers)
    return [base + (index < extra) for index in range(workers)]


def _kill(handle: Any) -> None:
    """End an actor's process; one that is gone already is no problem."""
    import ray

    ray.kill(handle)
