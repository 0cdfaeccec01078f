"""Hands one attempt to a worker and brings back its terminal record.

Invariant: whatever dies on the way, the caller gets exactly one record for the
attempt; a worker that is gone masks it, since infrastructure failed and not the
model, and is replaced.
"""

from __future__ import annotations

import time

from actors.calls import call
from actors.cluster import Cluster
from rl.errors import ActorLostError, InfrastructureError
from rl.evidence.recorder import Recorder
from rl.records import AttemptSpec, EpisodeRecord, Failure

# Beyond the episode's own deadline: stopping a sandbox and carrying the record.
RETURN_GRACE_S = 60.0


async def run_recorded(
    cluster: Cluster, recorder: Recorder, spec: AttemptSpec, deadline_s: float
) -> EpisodeRecord:
    """Run `spec` on the freest worker; its terminal record is on disk on every way out.

    Raises:
        ActorLostError: the worker's process is lost again and again.
    """
    started = time.time()
    recorder.dispatched(spec)
    try:
        record = await run_on_worker(cluster, spec, deadline_s)
    except BaseException:
        recorder.finished(EpisodeRecord.cancelled(spec, started))
        raise
    recorder.finished(record)
    return record


async def run_on_worker(cluster: Cluster, spec: AttemptSpec, deadline_s: float) -> EpisodeRecord:
    """Run `spec` on the freest worker.

    Args:
        cluster: has a free slot.
        spec: the attempt.
        deadline_s: the episode's own deadline, s.

    Raises:
        ActorLostError: the worker's process is lost again and again.
    """
    started = time.time()
    worker = cluster.free_worker()
    handle = worker.handle
    cluster.placed[spec.attempt_id] = worker
    try:
        return await call(
            handle.run.remote(spec),
            deadline_s + RETURN_GRACE_S,
            f"attempt {spec.attempt_id}",
        )
    except ActorLostError as error:
        worker.replace(handle)
        return masked(spec, error, started)
    except InfrastructureError as error:
        return masked(spec, error, started)
    finally:
        worker.busy -= 1
        del cluster.placed[spec.attempt_id]


def masked(spec: AttemptSpec, error: InfrastructureError, started: float) -> EpisodeRecord:
    """The record of an attempt whose worker failed."""
    return EpisodeRecord.of(
        spec,
        outcome="masked",
        stop_reason="infrastructure",
        failure=Failure(kind=type(error).__name__, message=str(error)),
        started_at=started,
    )
