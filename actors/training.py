"""The training loop: scheduler commands out, actor events in.

Invariants:
- All decisions are the scheduler's; this loop carries them out and feeds back
  what happened, in order, from one queue.
- An attempt's record is on disk before the scheduler hears of it; an update's
  rows are on disk before its checkpoint, so that a resume finds rows for every
  update that a checkpoint holds.
- When the loop ends, by whatever cause, every attempt it dispatched has its
  terminal record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.attempts import run_recorded
from actors.calls import call
from actors.cluster import START_GRACE_S, Cluster
from actors.episodes import attempt_seed
from rl.config import CampaignConfig
from rl.errors import DeadlineExceeded, EngineError, InfrastructureError
from rl.evidence.recorder import Recorder
from rl.progress import Progress
from rl.records import AttemptSpec, EpisodeRecord, Group, Publication, TaskRef, UpdateMetrics
from rl.schedule.commands import Command, Dispatch, DropGroup, RetireVersion, StartUpdate
from rl.schedule.scheduler import Frontier, Scheduler

HEALTH_INTERVAL_S = 5.0
DRAIN_S = 5.0  # beyond the time that sandboxes have to stop
# Failures of an attempt after which its replica is asked whether it is alive.
ENGINE_FAILURES = ("EngineError", "DeadlineExceeded")


@dataclass(frozen=True, slots=True)
class _AttemptEnded:
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class _UpdateEnded:
    metrics: UpdateMetrics
    groups: list[Group]
    adapter: str


@dataclass(frozen=True, slots=True)
class _Published:
    publication: Publication


@dataclass(frozen=True, slots=True)
class _ReplicaLost:
    replica: int
    why: str


@dataclass(frozen=True, slots=True)
class _ReplicaAlive:
    replica: int


@dataclass(frozen=True, slots=True)
class _ReplicaBack:
    replica: int
    version: int


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


_Event = (
    _AttemptEnded
    | _UpdateEnded
    | _Published
    | _ReplicaAlive
    | _ReplicaLost
    | _ReplicaBack
    | _Failed
)


@dataclass
class TrainingLoop:
    """Trains until the last update is made and checkpointed.

    Args:
        config: the campaign's configuration.
        cluster: running replicas, broadcaster, workers and trainer.
        scheduler: at the trainer's version.
        tasks: training tasks, by the scheduler's task index.
        recorder: where evidence goes.
        progress: what the person sees.
    """

    config: CampaignConfig
    cluster: Cluster
    scheduler: Scheduler
    tasks: Sequence[TaskRef]
    recorder: Recorder
    progress: Progress
    _events: asyncio.Queue[_Event] = field(default_factory=asyncio.Queue[_Event])
    _jobs: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _records: dict[str, list[EpisodeRecord]] = field(default_factory=dict[str, list[EpisodeRecord]])
    _down: set[int] = field(default_factory=set[int])
    _suspected: set[int] = field(default_factory=set[int])
    _given_up: set[int] = field(default_factory=set[int])
    _restarts: dict[int, int] = field(default_factory=dict[int, int])

    async def run(self) -> None:
        """Train.

        Raises:
            DeadlineExceeded: nothing moved for `limits.stall_s`.
            CampaignError: something failed that training can't go on without.
        """
        self._start(self._publish())
        monitor = asyncio.create_task(self._guard(self._watch_replicas()))
        try:
            while not self.scheduler.done:
                for command in self.scheduler.poll():
                    self._execute(command)
                self._handle(await self._next_event())
                self._show()
            await self._settle()
        finally:
            monitor.cancel()
            await self._abandon()

    async def _next_event(self) -> _Event:
        stall = self.config.limits.stall_s
        try:
            async with asyncio.timeout(stall):
                return await self._events.get()
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing moved for {stall:.0f} s: {self.scheduler.in_flight} attempts in flight, "
                f"trainer {'busy' if self.scheduler.training else 'waiting'}",
                "training",
                "see the logs/ directory of the campaign, then continue with --resume",
            ) from None

    # ---- commands -------------------------------------------------------

    def _execute(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._start(self._attempt(self._spec(command)))
            case StartUpdate():
                groups = [self._group(group_id) for group_id in command.group_ids]
                self._start(self._update(command.update, groups))
            case DropGroup():
                self._records.pop(command.group_id, None)
                self.recorder.events.append(
                    "drop_group", group_id=command.group_id, reason=command.reason
                )
            case RetireVersion():
                self._start(self._retire(command.version))

    def _spec(self, command: Dispatch) -> AttemptSpec:
        return AttemptSpec(
            attempt_id=command.attempt_id,
            group_id=command.group_id,
            task=self.tasks[command.task],
            version=command.version,
            served_model=f"policy-v{command.version}",
            replica=command.replica,
            base_url=self.cluster.base_urls[command.replica],
            seed=attempt_seed(self.config.seed, command.attempt_id),
        )

    def _group(self, group_id: str) -> Group:
        episodes = [r for r in self._records.pop(group_id) if r.outcome == "graded"]
        first = episodes[0]
        return Group(
            group_id=group_id,
            task_name=first.task_name,
            version=first.version,
            episodes=episodes,
        )

    async def _attempt(self, spec: AttemptSpec) -> None:
        record = await run_recorded(
            self.cluster, self.recorder, spec, self.config.episodes.deadline_s
        )
        self._put(_AttemptEnded(record))

    async def _update(self, update: int, groups: list[Group]) -> None:
        deadline = self.config.trainer.update_timeout_s
        metrics, adapter = await call(
            self.cluster.trainer.update.remote(update, groups), deadline, f"update {update}"
        )
        self._put(_UpdateEnded(metrics, groups, adapter))

    async def _publish(self) -> None:
        """Export the trainer's version and make it current on the live replicas.

        While all of them restart it waits: a restart is bounded, and so are restarts.
        """
        while len(self._down) == len(self.cluster.replicas):
            await asyncio.sleep(1.0)
        adapter = self.cluster.trainer.export.remote()
        publication = await call(
            self.cluster.broadcaster.publish.remote(adapter),
            self.config.trainer.update_timeout_s,
            "publish",
        )
        self._put(_Published(publication))

    async def _retire(self, version: int) -> None:
        failed = await call(
            self.cluster.broadcaster.retire.remote(version),
            self.config.engine.start_timeout_s,
            f"retire version {version}",
        )
        for replica, why in failed.items():
            self._put(_ReplicaLost(replica, why))

    async def _checkpoint(self, frontier: Frontier) -> None:
        path = await call(
            self.cluster.trainer.checkpoint.remote(frontier, self.config.digest()),
            self.config.trainer.update_timeout_s,
            "checkpoint",
        )
        self.recorder.events.append(
            "checkpoint", path=str(path), updates_done=frontier["updates_done"]
        )

    # ---- events ---------------------------------------------------------

    def _handle(self, event: _Event) -> None:
        match event:
            case _AttemptEnded(record):
                self._records.setdefault(record.group_id, []).append(record)
                self.scheduler.attempt_finished(record.attempt_id, record.outcome, record.reward)
                self.progress.episode(record)
                if record.failure is not None and record.failure.kind in ENGINE_FAILURES:
                    self._suspect(record.replica)
            case _UpdateEnded(metrics, groups, adapter):
                self.recorder.updated(metrics, groups, adapter)
                self.scheduler.update_finished(metrics.update)
                self.progress.update(metrics)
                if not self.scheduler.done:
                    self._start(self._publish())
                self._start(self._checkpoint(self.scheduler.frontier()))
            case _Published(publication):
                self._published(publication)
            case _ReplicaLost(replica, why):
                self._lose(replica, why)
            case _ReplicaAlive(replica):
                self._suspected.discard(replica)
                self.scheduler.resume_replica(replica)
            case _ReplicaBack(replica, version):
                self._down.discard(replica)
                self.scheduler.replica_back(replica, version)
                self.recorder.events.append("replica_back", replica=replica, version=version)
                self.progress.note(f"replica {replica} is back, serving version {version}")
            case _Failed(error):
                raise error

    def _published(self, publication: Publication) -> None:
        for replica, why in publication.failed.items():
            self._lose(replica, why)
        if not publication.replicas:
            self._start(self._publish())  # again, when a replica is back
            return
        self.recorder.published(publication)
        serving = [index for index in publication.replicas if index not in self._down]
        self.scheduler.version_current(publication.version, serving)
        self.progress.published(publication)

    def _suspect(self, replica: int) -> None:
        """Send a replica nothing until it has answered: a dead one eats every retry."""
        if replica in self._down or replica in self._suspected:
            return
        self._suspected.add(replica)
        self.scheduler.suspend_replica(replica)
        self._start(self._check(replica))

    async def _check(self, replica: int) -> None:
        """Find out whether a replica is alive."""
        try:
            await call(
                self.cluster.replicas[replica].health.remote(),
                self.config.engine.control_timeout_s,
                f"replica {replica} health",
            )
        except InfrastructureError as error:
            self._put(_ReplicaLost(replica, str(error)))
        else:
            if replica in self._suspected:  # good news is an event only if it was in doubt
                self._put(_ReplicaAlive(replica))

    def _lose(self, replica: int, why: str) -> None:
        """Take a replica out of rotation and restart it, within its budget."""
        self._suspected.discard(replica)
        if replica in self._down:
            return
        self._down.add(replica)
        self.scheduler.replica_lost(replica)
        self.recorder.events.append("replica_lost", replica=replica, why=why)
        self.progress.note(f"replica {replica} left rotation: {why}")
        used = self._restarts.get(replica, 0)
        self._restarts[replica] = used + 1
        if used < self.config.engine.max_restarts:
            self._start(self._restart(replica))
            return
        self._given_up.add(replica)
        if len(self._given_up) == len(self.cluster.replicas):
            raise EngineError(
                f"no replica is left; the last one failed: {why}",
                "replicas",
                "see the replicas' logs in the campaign's directory, then continue with --resume",
            )

    async def _restart(self, replica: int) -> None:
        """Restart a replica; it comes back only with the current version proven."""
        deadline = self.config.engine.start_timeout_s + START_GRACE_S
        try:
            await call(
                self.cluster.broadcaster.lost.remote(replica), HEALTH_INTERVAL_S * 4, "broadcaster"
            )
            self.cluster.base_urls[replica] = await call(
                self.cluster.replicas[replica].restart.remote(),
                deadline,
                f"replica {replica} restart",
            )
            version = await call(
                self.cluster.broadcaster.rejoin.remote(replica),
                deadline,
                f"replica {replica} rejoin",
            )
        except InfrastructureError as error:
            self._down.discard(replica)
            self._put(_ReplicaLost(replica, str(error)))
            return
        self._put(_ReplicaBack(replica, version))

    async def _watch_replicas(self) -> None:
        """Report every replica that stops answering."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            for index in range(len(self.cluster.replicas)):
                if index not in self._down and index not in self._suspected:
                    await self._check(index)

    # ---- jobs -----------------------------------------------------------

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        """A job's failure is an event: the loop ends on it."""
        try:
            await job
        except Exception as error:  # noqa: BLE001 - carried to the loop, which raises it
            self._put(_Failed(error))

    def _put(self, event: _Event) -> None:
        self._events.put_nowait(event)

    async def _settle(self) -> None:
        """Finish what the last update left behind: its checkpoint, retirements, restarts."""
        deadline = time.monotonic() + self.config.trainer.update_timeout_s
        while self._jobs or not self._events.empty():
            while not self._events.empty():
                self._handle(self._events.get_nowait())
            if not self._jobs:
                continue
            left = max(0.1, deadline - time.monotonic())
            done, _ = await asyncio.wait(
                self._jobs, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise DeadlineExceeded("the last checkpoint did not finish", "training")

    async def _abandon(self) -> None:
        """End what still runs; every attempt leaves its terminal record."""
        if not self._jobs:
            return
        grace = DRAIN_S + self.config.sandbox.stop_timeout_s
        drains = [worker.handle.drain.remote() for worker in self.cluster.workers]
        await asyncio.gather(
            *(call(ref, grace, "episode worker drain") for ref in drains), return_exceptions=True
        )
        jobs = set(self._jobs)
        if jobs:
            await asyncio.wait(jobs, timeout=1.0)  # records that the drain brought
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def _show(self) -> None:
        scheduler = self.scheduler
        self.progress.state(
            in_flight=scheduler.in_flight,
            ready_groups=scheduler.ready_groups,
            training=scheduler.training,
            dispatched=scheduler.counts.dispatched,
            masked=scheduler.counts.masked,
        )
