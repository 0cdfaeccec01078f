"""Starting a run's actors where they have been placed.

Invariants:
- What is started is in the cluster's hands at once, so that it is stopped whatever happens.
- No actor restarts by itself: a restart is a decision of the campaign.
- Every actor has a name and lives in the campaign's own Ray namespace.
- An engine listens on the loopback address where everybody who asks it is on its node, else
  on its node's address in the cluster, and on no other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.calls import call, together
from actors.cluster import Cluster, WorkerSlots
from actors.engine_command import HOST
from actors.nodes import Nodes, Site
from actors.placement import (
    TRAINER,
    Placement,
    acquire,
    bundles,
    cluster_nodes,
    replica_role,
    worker_role,
)
from rl.config import CampaignConfig, ServingConfig
from rl.errors import ConfigurationError

WORKER_START_S = 180.0
TRAINER_START_S = 900.0
START_GRACE_S = 60.0  # ending a former engine, and carrying the answer
# Beside its slots a worker answers control calls.
CONTROL_CALLS = 8
LOGS = "logs"  # of a run's folder, on every node
CHECKPOINTS = "checkpoints"
# Threads that share cores must sleep, not spin, while they wait.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "HARBOR_TELEMETRY": "0"}


async def reserve(
    cluster: Cluster,
    run_id: str,
    home: Site,
    note: Callable[[str], None] = lambda _: None,
    *,
    trainer: bool = False,
) -> None:
    """Reserve what the run's actors need, and bring their nodes what they read.

    Args:
        cluster: gets placement and nodes.
        run_id: names the placement group, and the run's folder on other nodes.
        home: where model, task packages and the run lie on the driver's node.
        note: told of what is sent.
        trainer: whether there is a trainer.

    Raises:
        InfrastructureError: the cluster can't hold the run, is full, or a node fails.
    """
    config = cluster.config
    limit = config.limits.placement_s
    placed = cluster.placement = await acquire(bundles(config, trainer=trainer), run_id, limit)
    nodes = cluster.nodes = Nodes(run_id, home, note)
    loading = [replica_role(index) for index in range(config.engine.replicas)]
    loading += [TRAINER] * trainer
    workers = [worker_role(index) for index in range(config.episodes.workers)]
    await nodes.settle(placed.driver, map(placed.node_of, loading), map(placed.node_of, workers))


async def start_serving(
    cluster: Cluster,
    run_id: str,
    note: Callable[[str], None] = lambda _: None,
    *,
    publishing: bool = True,
) -> None:
    """Start replicas, broadcaster and episode workers; all are ready on return.

    Args:
        cluster: what was reserved; gets the handles.
        run_id: the run's, by which its remote sandboxes are found again.
        note: told of each replica that serves.
        publishing: whether versions will be published, so that there is a broadcaster.

    Raises:
        CampaignError: something did not start; the caller stops the cluster.
    """
    from actors.broadcaster import WeightBroadcaster
    from actors.episodes import EpisodeWorker
    from actors.replica import Replica

    config, placed, nodes = cluster.config, cluster.placed_at, cluster.sites
    api_key = secrets.token_urlsafe(24)
    need = config.resources
    hosts = engine_hosts(config, placed)
    for index in range(config.engine.replicas):
        role = replica_role(index)
        site = nodes.sites[placed.node_of(role)]
        actor = _remote(
            Replica, f"replica-{index}", placed, role, need.replica_cpus, need.replica_gpus
        )
        cluster.replicas.append(
            actor.remote(index, config, site.model, site.run / LOGS, api_key, hosts[index])
        )
    for index, slots in enumerate(_split(config.episodes.concurrency, config.episodes.workers)):

        def start(losses: int, index: int = index, slots: int = slots) -> Any:
            role = worker_role(index)
            site = nodes.sites[placed.node_of(role)]
            actor = _remote(
                EpisodeWorker,
                f"episodes-{index}.{losses}",
                placed,
                role,
                need.worker_cpus,
                max_concurrency=slots + CONTROL_CALLS,
            )
            return actor.remote(index, config, site.model, site.tasks, api_key, run_id)

        cluster.workers.append(WorkerSlots(start, start(0), slots))
    if publishing:
        broadcaster = _remote(WeightBroadcaster, "broadcaster", placed, "broadcaster")
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


async def start_trainer(cluster: Cluster, config: CampaignConfig, resume: Path | None) -> int:
    """Start the trainer; returns the version it stands at.

    Args:
        cluster: what was reserved; gets the handle.
        config: the campaign's.
        resume: the driver's folder of the checkpoint to continue from.

    Raises:
        CampaignError: the model does not load, or there is too little memory.
        ConfigurationError: prime-rl would run where its own checkpoints can't be kept.
    """
    from actors.prime_trainer import PrimeTrainer
    from actors.trainer import Trainer

    need, prime = config.resources, config.trainer.prime
    placed, nodes = cluster.placed_at, cluster.sites
    node = placed.node_of(TRAINER)
    site = nodes.sites[node]
    if prime is not None and not site.shared:
        raise ConfigurationError(
            "prime-rl keeps checkpoints of its own, of the size of the model, beside the run; "
            "its node does not share the driver's file system",
            'trainer.backend = "prime-rl"',
            "run the driver on the trainer's node (resources.trainer_labels), or take a "
            "--state that both share",
        )
    checkpoints = site.run / CHECKPOINTS
    if not site.shared:
        await call(site.keeper.remove.remote(checkpoints), WORKER_START_S, "clearing checkpoints")
    if resume is not None:
        resume = await nodes.send_run_folder(node, resume)
    backend = Trainer if prime is None else PrimeTrainer
    deadline = TRAINER_START_S + (0.0 if prime is None else prime.start_timeout_s)
    actor = _remote(backend, "trainer", placed, TRAINER, need.trainer_cpus, need.trainer_gpus, None)
    cluster.trainer = actor.remote(config, site.model, checkpoints, resume)
    version: int = await call(cluster.trainer.ready.remote(), deadline, "trainer start")
    return version


def engine_hosts(config: ServingConfig, placed: Placement) -> list[str]:
    """The address that each replica's engine listens on."""
    replicas = [placed.node_of(replica_role(index)) for index in range(config.engine.replicas)]
    workers = {placed.node_of(worker_role(index)) for index in range(config.episodes.workers)}
    if len({*replicas, *workers}) == 1:
        return [HOST] * len(replicas)
    address = {node.id: node.address for node in cluster_nodes()}
    return [address[node] for node in replicas]


def _remote(
    cls: type,
    name: str,
    placed: Placement,
    role: str,
    cpus: float = 0.0,
    gpus: float = 0.0,
    max_concurrency: int | None = CONTROL_CALLS,
) -> Any:
    """The actor class with its name, place, resources and concurrent calls."""
    import ray

    actor: Any = ray.remote(cls)
    concurrency = {} if max_concurrency is None else {"max_concurrency": max_concurrency}
    return actor.options(
        **concurrency,
        name=name,
        num_cpus=cpus,
        num_gpus=gpus,
        max_restarts=0,
        scheduling_strategy=placed.strategy(role),
        runtime_env={"env_vars": SHARED_CORES},
    )


def _split(slots: int, workers: int) -> list[int]:
    """Slots spread over workers as evenly as can be."""
    base, extra = divmod(slots, workers)
    return [base + (index < extra) for index in range(workers)]
