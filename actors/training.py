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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.adapter_ref import AdapterRef
from actors.attempts import run_recorded
from actors.calls import call
from actors.cluster import Cluster
from actors.episodes import attempt_seed
from actors.feed import TrainerFeed
from actors.supervision import (
    ReplicaAlive,
    ReplicaBack,
    ReplicaEvent,
    ReplicaLost,
    ReplicaSupervisor,
)
from rl.config import CampaignConfig
from rl.errors import DeadlineExceeded, InfrastructureError
from rl.evidence.events import EVAL_OVER
from rl.evidence.recorder import Recorder
from rl.evidence.rows import eval_arm
from rl.progress import Progress
from rl.records import AttemptSpec, EpisodeRecord, Group, Publication, TaskRef, UpdateMetrics
from rl.schedule.commands import (
    CancelAttempt,
    Command,
    Dispatch,
    DispatchEval,
    DropGroup,
    EvalOver,
    RetireVersion,
    StepUpdate,
    StreamAttempt,
    StreamGroup,
)
from rl.schedule.scheduler import Frontier, Scheduler

DRAIN_S = 5.0  # beyond the time that sandboxes have to stop
CANCEL_S = 30.0
# A publication may wait for a rejoin and a retirement that began before it.
PUBLISH_TURNS = 3.0
# Failures of an attempt after which its replica is asked whether it is alive.
ENGINE_FAILURES = ("EngineError", "DeadlineExceeded")


@dataclass(frozen=True, slots=True)
class _AttemptEnded:
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class _UpdateEnded:
    metrics: UpdateMetrics
    groups: list[Group]
    adapter: AdapterRef


@dataclass(frozen=True, slots=True)
class _Published:
    publication: Publication


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


_Event = _AttemptEnded | _UpdateEnded | _Published | ReplicaEvent | _Failed


async def _where_it_is(cluster: Cluster, path: Path) -> Path:
    del cluster
    return path


@dataclass
class TrainingLoop:
    """Trains until the last update is made and checkpointed.

    Args:
        config: the campaign's configuration.
        cluster: running replicas, broadcaster, workers and trainer.
        scheduler: at the trainer's version.
        tasks: training tasks, by the scheduler's task index.
        eval_tasks: held-out tasks of evaluations on the way, by cell.
        bring_home: brings a checkpoint from the trainer's node to the driver.
        recorder: where evidence goes.
        progress: what the person sees.
    """

    config: CampaignConfig
    cluster: Cluster
    scheduler: Scheduler
    tasks: Sequence[TaskRef]
    recorder: Recorder
    progress: Progress
    eval_tasks: Sequence[TaskRef] = ()
    bring_home: Callable[[Cluster, Path], Awaitable[Path]] = _where_it_is
    _events: asyncio.Queue[_Event] = field(default_factory=asyncio.Queue[_Event])
    _jobs: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _records: dict[str, list[EpisodeRecord]] = field(default_factory=dict[str, list[EpisodeRecord]])
    _batch: list[Group] = field(default_factory=list[Group])
    _adapter: AdapterRef | None = None
    _adapters: dict[int, str] = field(default_factory=dict[int, str])  # digest by version
    _publishing: bool = False
    _feed: TrainerFeed = field(init=False)
    _supervisor: ReplicaSupervisor = field(init=False)

    def __post_init__(self) -> None:
        self._feed = TrainerFeed(
            self.cluster.trainer,
            self.config.trainer.update_timeout_s,
            start=self._start,
            on_step=self._stepped,
            write_checkpoint=self._checkpoint,
            streaming=self.config.trainer.streaming,
        )
        self._supervisor = ReplicaSupervisor(
            self.config,
            self.cluster,
            self.scheduler,
            self.recorder,
            self.progress,
            start=self._start,
            put=self._put,
        )

    async def run(self) -> None:
        """Train.

        Raises:
            DeadlineExceeded: nothing moved for `limits.stall_s`.
            CampaignError: something failed that training can't go on without.
        """
        self._publish_newest()
        monitor = asyncio.create_task(self._guard(self._supervisor.watch()))
        try:
            self._obey()
            while not self._over:
                self._handle(await self._next_event())
                self._obey()
                self._show()
            await self._settle()
        finally:
            monitor.cancel()
            in_flight = f"{self.scheduler.in_flight} attempts in flight"
            limit = self.config.limits.drain_s
            async with self.recorder.lifecycle.step("drain", limit, in_flight):
                await self._abandon()

    @property
    def _over(self) -> bool:
        """Whether nothing is left: the last publication may begin another evaluation."""
        return self.scheduler.idle and not (self._publishing and self.config.eval)

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

    def _obey(self) -> None:
        for command in self.scheduler.poll(time.monotonic()):
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._start(self._attempt(self._spec(command)))
            case DispatchEval():
                self._start(self._attempt(self._eval_spec(command)))
            case EvalOver():
                self._evaluated(command)
            case CancelAttempt():
                self._start(self._cancel(command))
            case StreamAttempt():
                self._feed.attempt(command.update, self._record(command))
            case StreamGroup():
                group = self._group(command.group_id)
                self._batch.append(group)
                self._feed.group(command.update, group)
            case StepUpdate():
                self._feed.step(command.update, self._batch)
                self._batch = []
            case DropGroup():
                self._records.pop(command.group_id, None)
                self._feed.drop(command.group_id)
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

    def _eval_spec(self, command: DispatchEval) -> AttemptSpec:
        version = command.version
        task = self.eval_tasks[command.cell % len(self.eval_tasks)]
        arm = eval_arm(version)
        number = command.cell // len(self.eval_tasks)
        return AttemptSpec(
            attempt_id=command.attempt_id,
            group_id=f"{arm}-{task.name}",
            task=task,
            version=version,
            stage="eval",
            arm=arm,
            adapter_sha256=self._adapters[version],
            served_model=f"policy-v{version}",
            replica=command.replica,
            base_url=self.cluster.base_urls[command.replica],
            # The same noise for every version: what differs then is the policy.
            seed=attempt_seed(self.config.seed, f"eval-{task.name}-k{number}"),
        )

    def _evaluated(self, end: EvalOver) -> None:
        self.recorder.events.append(
            EVAL_OVER, version=end.version, graded=end.graded, cells=end.cells, reason=end.reason
        )
        self.progress.evaluated(end.version, end.graded, end.cells, end.reason)

    def _record(self, command: StreamAttempt) -> EpisodeRecord:
        records = self._records[command.group_id]
        return next(record for record in records if record.attempt_id == command.attempt_id)

    def _group(self, group_id: str) -> Group:
        episodes = [r for r in self._records.pop(group_id) if r.outcome == "graded"]
        # In the order of launch, not of ending: sums of floats depend on it.
        episodes.sort(key=lambda episode: (len(episode.attempt_id), episode.attempt_id))
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

    async def _cancel(self, command: CancelAttempt) -> None:
        """Ask for the attempt's end; its terminal record comes the usual way."""
        self.recorder.events.append(
            "cancel_attempt", attempt_id=command.attempt_id, reason=command.reason
        )
        worker = self.cluster.placed.get(command.attempt_id)
        if worker is None:
            return
        try:
            await call(
                worker.handle.cancel.remote(command.attempt_id), CANCEL_S, "episode worker cancel"
            )
        except InfrastructureError as error:  # the episode's own deadline ends it
            self.progress.note(f"attempt {command.attempt_id} could not be cancelled: {error}")

    def _publish_newest(self) -> None:
        """Publish the newest adapter, now or right after the publication under way."""
        if not self._publishing:
            self._publishing = True
            self._start(self._publish())

    async def _publish(self) -> None:
        """Make the newest adapter current on the live replicas.

        While all of them restart it waits: a restart is bounded, and so are restarts.
        """
        while self._supervisor.all_down:
            await asyncio.sleep(1.0)
        adapter = await self._newest_adapter()
        self._adapters[adapter.version] = adapter.sha256
        publication = await call(
            self.cluster.broadcaster.publish.remote(adapter),
            PUBLISH_TURNS * self.config.engine.publish_timeout_s,
            "publish",
        )
        self._put(_Published(publication))

    async def _newest_adapter(self) -> AdapterRef:
        """The adapter of the newest update; at the start, of the trainer as it stands."""
        if self._adapter is not None:
            return self._adapter
        adapter: AdapterRef = await call(
            self.cluster.trainer.export.remote(),
            self.config.trainer.update_timeout_s,
            "trainer export",
        )
        self._adapter = adapter
        return adapter

    async def _retire(self, version: int) -> None:
        failed = await call(
            self.cluster.broadcaster.retire.remote(version),
            self.config.engine.start_timeout_s,
            f"retire version {version}",
        )
        for replica, failure in failed.items():
            self._put(ReplicaLost(replica, failure.generation, failure.why))

    def _stepped(self, metrics: UpdateMetrics, groups: list[Group], adapter: AdapterRef) -> None:
        self._put(_UpdateEnded(metrics, groups, adapter))

    async def _checkpoint(self, frontier: Frontier) -> None:
        """Have the trainer write a checkpoint; intent and receipt lie around it."""
        done, limit = frontier["updates_done"], self.config.limits.checkpoint_s
        async with self.recorder.lifecycle.step("checkpoint", limit, f"update {done}"):
            ref = self.cluster.trainer.checkpoint.remote(frontier, self.config.digest())
            written = await call(ref, limit, "trainer checkpoint")
            path = str(await self.bring_home(self.cluster, Path(written)))
        self.recorder.events.append("checkpoint", path=path, updates_done=done)

    # ---- events ---------------------------------------------------------

    def _handle(self, event: _Event) -> None:
        match event:
            case _AttemptEnded(record):
                if record.stage == "train":
                    self._records.setdefault(record.group_id, []).append(record)
                self.scheduler.attempt_finished(
                    record.attempt_id, record.outcome, record.reward, time.monotonic()
                )
                self.progress.episode(record)
                if record.failure is not None and record.failure.kind in ENGINE_FAILURES:
                    self._supervisor.suspect(record.replica)
            case _UpdateEnded(metrics, groups, adapter):
                self.recorder.updated(metrics, groups, adapter.sha256)
                self.scheduler.update_finished(metrics.update)
                self.progress.update(metrics)
                self._adapter = adapter
                if not self.scheduler.done:
                    self._publish_newest()
                self._feed.checkpoint(self.scheduler.frontier())  # ahead of the next batch
            case _Published(publication):
                self._published(publication)
            case ReplicaLost() | ReplicaAlive() | ReplicaBack():
                self._supervisor.handle(event)
            case _Failed(error):
                raise error

    def _published(self, publication: Publication) -> None:
        self._publishing = False
        for replica, failure in publication.failed.items():
            self._supervisor.handle(ReplicaLost(replica, failure.generation, failure.why))
        newest = self._adapter
        if publication.replicas:
            self.recorder.published(publication)
            self.scheduler.version_current(publication.version, publication.replicas)
            self.progress.published(publication)
            if newest is None or newest.version <= publication.version:
                return
        if not self.scheduler.done:
            self._publish_newest()  # a newer one; or this again, when a replica is back

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
