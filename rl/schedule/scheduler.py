"""The scheduler: which group runs when, and which groups make which batch.

A pure, deterministic state machine: events and a clock in, commands out, no I/O.
The clock only feeds the estimates of how long tasks take.

Invariants (S = max_staleness, B = groups per batch, v = current version):
- *Feasibility.*  Every group that is admitted can be placed into a batch that it
  is not too stale for (`rl.schedule.window`): nothing goes stale, and no finished
  episode is thrown away for its age.
- *Bound.*  Update t takes no group of a version u with (t-1) - u > S, counted
  from the dispatch of the group's first attempt.
- *Ahead.*  Never more than (S+1) * B groups are in flight, buffered or in the
  forming batch.
- *Exactly once.*  Every dispatched attempt is finished once; every group is
  streamed once or dropped once, and a dropped one is replaced by a fresh draw.
- *Streaming.*  A group is streamed to the trainer as soon as it is complete and
  its place can't be owed to an older one; a step follows the last of a batch.
  A group that is due in the forming batch is certain to be in it unless it is
  dropped, so its graded attempts are streamed before it is complete.
- *Leases.*  A group holds its version until it is complete; a version is retired
  once, when it is older than the current one and nobody holds it.
- *Versions.*  An attempt goes only to a replica that has proven its version.
- *Evaluations.*  Attempts of `rl.schedule.evals` go ahead of training's, into the same
  slots; they hold their version, and nothing of them reaches the trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rl.config import ScheduleConfig
from rl.errors import StalenessViolation
from rl.records import Outcome
from rl.schedule.backlog import Backlog
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
from rl.schedule.estimates import DurationEstimates
from rl.schedule.evals import NO_EVALS, EvalPlan, Evaluations
from rl.schedule.frontier import FRESH, Frontier
from rl.schedule.groups import PendingGroup
from rl.schedule.leases import LeaseTable
from rl.schedule.order import TaskOrder
from rl.schedule.replicas import ReplicaPool
from rl.schedule.window import DueWindow


@dataclass
class SchedulerCounts:
    """Totals since this scheduler was made."""

    dispatched: int = 0
    graded: int = 0
    masked: int = 0
    cancelled: int = 0
    dropped_groups: int = 0
    refilled_groups: int = 0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A running attempt."""

    group: PendingGroup
    replica: int
    started: float


class Scheduler:
    """See the module's invariants.

    Args:
        config: updates, batch, group, staleness and refill settings.
        order: the order of tasks.
        slots: episodes that may run at once.
        replicas: number of replicas.
        incarnation: how many drivers the campaign had before; part of group ids,
            so that a redrawn group never reuses an id.
        frontier: where a checkpoint left off.
        evals: which versions are evaluated on the way.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        order: TaskOrder,
        *,
        slots: int,
        replicas: int,
        incarnation: int = 0,
        frontier: Frontier = FRESH,
        evals: EvalPlan = NO_EVALS,
    ) -> None:
        self._config = config
        self._slots = slots
        self._incarnation = incarnation
        self._finished = frontier["updates_done"]
        self._window = DueWindow(
            config.groups_per_batch, config.max_staleness, config.updates, self._finished
        )
        self._estimates = DurationEstimates(frontier["durations"])
        self._backlog = Backlog(
            order,
            self._estimates,
            config.groups_per_batch,
            frontier["next_draw"],
            tuple(frontier["redraw"]),
        )
        self._version: int | None = None
        self._pool = ReplicaPool(replicas)
        self._leases = LeaseTable()
        self._groups: dict[str, PendingGroup] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._evals = Evaluations(evals, incarnation)
        self._eval_replicas: dict[str, int] = {}  # by running attempt of an evaluation
        self._waiting: dict[int, deque[PendingGroup]] = {}  # by version
        self._complete: dict[int, deque[PendingGroup]] = {}  # by due update
        self._placed: list[PendingGroup] = []
        self._stepping = False
        self._unserved = False  # whether a version may have lost its last replica
        self._early: list[StreamAttempt] = []
        self._given_up: list[CancelAttempt | DropGroup] = []
        self._evaluated: list[EvalOver] = []
        self._refills_left = config.refill_zero_variance
        self.counts = SchedulerCounts()

    # ---- events ---------------------------------------------------------

    def version_current(self, version: int, replicas: Mapping[int, int]) -> None:
        """`version` is current: these replicas have proven it, in these generations."""
        if version > self._finished:
            raise StalenessViolation(
                f"version {version} published before update {version} finished", "scheduler"
            )
        self._leases.offer(version)
        self._version = version
        for index, generation in replicas.items():
            self._pool.proven(index, version, generation)
        self._unserved = True
        if self._evals.begin(version):
            self._leases.acquire(version, _evaluation(version))

    def attempt_finished(
        self, attempt_id: str, outcome: Outcome, reward: float | None, now: float
    ) -> None:
        """A dispatched attempt reached its one terminal event."""
        if self._evals.owns(attempt_id):
            self._pool.gave(self._eval_replicas.pop(attempt_id))
            self._eval_over(self._evals.finished(attempt_id, outcome))
            self._unserved = True  # a relaunch may find nobody who serves its version
            return
        attempt = self._attempts[attempt_id]
        group = attempt.group
        queued = group.waiting > 0
        group.finish(attempt_id, outcome, reward)
        del self._attempts[attempt_id]
        self._pool.gave(attempt.replica)
        if outcome == "graded":
            self.counts.graded += 1
            self._estimates.observe(group.task, now - attempt.started)
            if group.due == self._window.forming and not group.complete:
                self._early.append(StreamAttempt(group.due, group.group_id, attempt_id))
        elif outcome == "masked":
            self.counts.masked += 1
        else:
            self.counts.cancelled += 1
        if not group.can_reach(self._config.min_group):
            self._give_up(group)
        if group.complete:
            self._judge(group)
        elif group.waiting and not queued:  # a relaunch goes ahead of younger groups
            self._waiting[group.version].appendleft(group)
            self._unserved = self._unserved or not self._pool.serves(group.version)

    def update_finished(self, update: int) -> None:
        """The trainer made version `update`."""
        if not self._stepping or update != self._window.forming:
            raise StalenessViolation(f"update {update} finished out of order", "scheduler")
        self._window.advance()
        self._finished = update
        self._placed = []
        self._stepping = False
        self._refills_left = self._config.refill_zero_variance
        for group in self._groups.values():
            if group.due == self._window.forming and not group.complete:
                self._early.extend(
                    StreamAttempt(group.due, group.group_id, attempt_id)
                    for attempt_id in group.rewards
                )

    def replica_lost(self, replica: int) -> int:
        """A replica left rotation; what ran on it ends by its own terminal events.

        Returns its new generation: nothing that was proven before counts for it.
        """
        self._unserved = True
        return self._pool.lost(replica)

    def replica_generation(self, replica: int) -> int:
        """How often the replica has been lost; news of an earlier one is old."""
        return self._pool.generation(replica)

    def suspend_replica(self, replica: int) -> None:
        """Send a replica nothing while it is found out whether it is alive."""
        self._pool.suspend(replica)

    def resume_replica(self, replica: int) -> None:
        """The suspended replica answers: send it work again."""
        self._pool.resume(replica)

    def replica_back(self, replica: int, version: int, generation: int) -> None:
        """A replica that was lost has proven `version` in this generation."""
        if self._version is None or version >= self._version or version in self._leases.offered:
            self._pool.proven(replica, version, generation)
            self._unserved = True

    # ---- commands -------------------------------------------------------

    def poll(self, now: float) -> list[Command]:
        """Everything that can be done now; calling it again yields nothing new.

        Args:
            now: of any steady clock, s.
        """
        self._strand()
        commands: list[Command] = [*self._early, *self._given_up]
        self._early.clear()
        self._given_up.clear()
        commands.extend(self._stream())
        commands.extend(self._dispatch_evals())
        commands.extend(self._dispatch(now))
        commands.extend(self._evaluated)
        self._evaluated.clear()
        for version in self._leases.retire():
            self._pool.retired(version)
            self._waiting.pop(version, None)
            commands.append(RetireVersion(version))
        return commands

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        return self._finished >= self._config.updates

    @property
    def idle(self) -> bool:
        """Whether every update has been made, and every evaluation is over and told of."""
        return self.done and not self._evals.active and not self._evaluated

    @property
    def in_flight(self) -> int:
        """Attempts that run now, those of evaluations included."""
        return len(self._attempts) + self._evals.running

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a batch."""
        return sum(len(groups) for groups in self._complete.values())

    @property
    def streamed_groups(self) -> int:
        """Groups in the batch that is being formed or trained."""
        return len(self._placed)

    @property
    def training(self) -> bool:
        """Whether a whole batch is with the trainer."""
        return self._stepping

    def frontier(self) -> Frontier:
        """What a checkpoint of the finished updates must know to continue.

        Draws in the batch that the trainer is working on count as not trained:
        the checkpoint belongs to the last finished update.
        """
        untrained = [*self._groups.values(), *self._placed]
        redraw = sorted({*self._backlog.owed, *(group.draw for group in untrained)})
        return {
            "updates_done": self._finished,
            "next_draw": self._backlog.next_draw,
            "redraw": redraw,
            "durations": self._estimates.snapshot(),
        }

    # ---- groups that end ------------------------------------------------

    def _judge(self, group: PendingGroup) -> None:
        """Keep a complete group for a batch, or drop it for want of signal."""
        self._leases.release(group.version, group.group_id)
        if len(group.rewards) < self._config.min_group:
            self._drop(group, f"only {len(group.rewards)} of its attempts were graded")
        elif group.zero_variance and self._refills_left > 0:
            self._refills_left -= 1
            self.counts.refilled_groups += 1
            self._drop(group, "all rewards are equal")
        else:
            self._complete.setdefault(group.due, deque()).append(group)

    def _drop(self, group: PendingGroup, reason: str) -> None:
        del self._groups[group.group_id]
        self._window.close(group.due)
        self.counts.dropped_groups += 1
        self._given_up.append(DropGroup(group.group_id, reason))

    def _give_up(self, group: PendingGroup) -> None:
        """Spend nothing more on a group that can't be trained on any more."""
        group.abandon_waiting()
        if not group.hopeless:
            group.hopeless = True
            self._given_up.extend(
                CancelAttempt(attempt_id, "too few of its group can still be graded")
                for attempt_id in sorted(group.running)
            )

    def _strand(self) -> None:
        """Give up waiting attempts whose version no replica serves any more.

        While no replica serves the current version, nothing is given up: one may
        come back.
        """
        if not self._unserved or self._version is None or not self._pool.serves(self._version):
            return
        self._unserved = False
        for version in self._leases.offered:
            if self._pool.serves(version):
                continue
            for group in list(self._waiting.get(version, ())):
                if group.waiting:
                    self._abandon(group)
            if version in self._evals.waiting():
                self._eval_over(self._evals.give_up(version))

    def _abandon(self, group: PendingGroup) -> None:
        group.abandon_waiting()
        if not group.can_reach(self._config.min_group):
            self._give_up(group)
        if group.complete:
            self._judge(group)

    # ---- batches --------------------------------------------------------

    def _stream(self) -> list[Command]:
        """Place complete groups, earliest due first; step when the batch is whole."""
        commands: list[Command] = []
        if self.done or self._stepping:
            return commands
        update = self._window.forming
        for due in sorted(self._complete):
            groups = self._complete[due]
            while groups and self._window.can_place(due):
                group = groups.popleft()
                self._window.place(group.version, due)
                del self._groups[group.group_id]
                self._placed.append(group)
                commands.append(StreamGroup(update, group.group_id))
            if not groups:
                del self._complete[due]
        if self._window.full:
            self._stepping = True
            commands.append(StepUpdate(update, tuple(group.group_id for group in self._placed)))
        return commands

    # ---- evaluations ----------------------------------------------------

    def _dispatch_evals(self) -> list[DispatchEval]:
        """Fill free slots with attempts of evaluations, oldest version first."""
        commands: list[DispatchEval] = []
        for version in self._evals.waiting():
            while self.in_flight < self._slots and version in self._evals.waiting():
                replica = self._pool.least_loaded(version)
                if replica is None:
                    break
                attempt_id, cell = self._evals.launch(version)
                self._eval_replicas[attempt_id] = replica
                self._pool.took(replica)
                commands.append(DispatchEval(attempt_id, version, cell, replica))
        return commands

    def _eval_over(self, end: EvalOver | None) -> None:
        """Give back the version of an evaluation that has ended."""
        if end is not None:
            self._leases.release(end.version, _evaluation(end.version))
            self._evaluated.append(end)

    # ---- attempts -------------------------------------------------------

    def _dispatch(self, now: float) -> list[Dispatch]:
        """Fill free slots: attempts of admitted groups first, oldest version first."""
        commands: list[Dispatch] = []
        while self.in_flight < self._slots:
            found = self._next_waiting() or self._admit()
            if found is None:
                break
            group, replica = found
            attempt_id = group.launch()
            self._attempts[attempt_id] = _Attempt(group, replica, now)
            self._pool.took(replica)
            self.counts.dispatched += 1
            commands.append(
                Dispatch(attempt_id, group.group_id, group.task, group.version, replica)
            )
        return commands

    def _next_waiting(self) -> tuple[PendingGroup, int] | None:
        """The next attempt of an admitted group, and the replica it goes to."""
        for version in sorted(self._waiting):
            groups = self._waiting[version]
            while groups and not groups[0].waiting:
                groups.popleft()
            if groups:
                replica = self._pool.least_loaded(version)
                if replica is not None:
                    return groups[0], replica
        return None

    def _admit(self) -> tuple[PendingGroup, int] | None:
        """Open a group under the current version, if it can be trained in time."""
        version = self._version
        if version is None or not self._window.can_admit(version):
            return None
        replica = self._pool.least_loaded(version)
        if replica is None:
            return None
        draw, task = self._backlog.take()
        group = PendingGroup(
            group_id=f"g{draw:05d}.{self._incarnation}",
            draw=draw,
            task=task,
            version=version,
            due=self._window.admit(version),
            waiting=self._config.group_size,
            retries=self._config.group_retries,
        )
        self._leases.acquire(version, group.group_id)
        self._groups[group.group_id] = group
        self._waiting.setdefault(version, deque()).append(group)
        return group, replica


def _evaluation(version: int) -> str:
    """Who holds a version under evaluation."""
    return f"eval of version {version}"
