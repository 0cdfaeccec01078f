"""The scheduler: which group runs when, and which groups make which batch.

A pure, deterministic state machine: events in, commands out, no clock, no I/O.

Invariants (S = max_staleness, B = groups per batch, `taken` = batches handed to
the trainer so far, v = current version):
- *Feasibility.*  A group of version u is due at update u+1+S.  For every update
  d, the groups that are admitted but not taken and due by d number at most
  B * (d - taken).  Admission keeps this for the newest version and `_select`
  keeps it for all others, so a group can always be trained in time: nothing
  goes stale, and no finished episode is thrown away for its age.
- *Bound.*  Update t takes no group that was due before t, so (t-1) - u <= S.
- *Ahead.*  Hence never more than (S+1) * B groups are in flight or buffered.
- *Exactly once.*  Every dispatched attempt is finished once; every group is
  taken once or dropped once, and a dropped one is replaced by a fresh draw.
- *Leases.*  A version is retired once, when it is older than the current one
  and no incomplete group has it.
- *Versions.*  An attempt goes only to a replica that serves its group's version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rl.config import ScheduleConfig
from rl.errors import StalenessViolation
from rl.records import Outcome
from rl.schedule.commands import Command, Dispatch, DropGroup, RetireVersion, StartUpdate
from rl.schedule.groups import PendingGroup
from rl.schedule.order import TaskOrder


class Frontier(TypedDict):
    """What a checkpoint keeps of a scheduler: ready for JSON.

    Keys:
        updates_done: updates that are finished.
        next_draw: first draw that has never been admitted.
        redraw: draws that were admitted and not trained on.
    """

    updates_done: int
    next_draw: int
    redraw: list[int]


@dataclass
class SchedulerCounts:
    """Totals since this scheduler was made."""

    dispatched: int = 0
    graded: int = 0
    masked: int = 0
    cancelled: int = 0
    dropped_groups: int = 0
    refilled_groups: int = 0


@dataclass
class _Replica:
    """A replica as the scheduler sees it."""

    versions: set[int] = field(default_factory=set[int])
    suspended: bool = False
    running: set[str] = field(default_factory=set[str])


class Scheduler:
    """See the module's invariants.

    Args:
        config: updates, batch, group, staleness and refill settings.
        order: the order of tasks.
        slots: episodes that may run at once.
        replicas: number of replicas.
        incarnation: how many drivers the campaign had before; part of group ids,
            so that a redrawn group never reuses an id.
        updates_done: updates that a checkpoint has already made.
        next_draw: first draw that has never been admitted.
        redraw: draws that were admitted before and not trained on.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        order: TaskOrder,
        *,
        slots: int,
        replicas: int,
        incarnation: int = 0,
        updates_done: int = 0,
        next_draw: int = 0,
        redraw: tuple[int, ...] = (),
    ) -> None:
        self._config = config
        self._order = order
        self._slots = slots
        self._incarnation = incarnation
        self._taken = updates_done
        self._finished = updates_done
        self._version: int | None = None
        self._next_draw = next_draw
        self._redraw = list(redraw)
        self._groups: dict[str, PendingGroup] = {}
        self._in_training: list[PendingGroup] = []
        self._replicas = [_Replica() for _ in range(replicas)]
        self._attempts: dict[str, tuple[PendingGroup, int]] = {}
        self._served: set[int] = set()
        self._drops: list[DropGroup] = []
        self._refills_left = config.refill_zero_variance
        self.counts = SchedulerCounts()

    @classmethod
    def resumed(
        cls,
        config: ScheduleConfig,
        order: TaskOrder,
        frontier: Frontier,
        *,
        slots: int,
        replicas: int,
        incarnation: int,
    ) -> Scheduler:
        """A scheduler that goes on where a checkpoint's `frontier` left off."""
        return cls(
            config,
            order,
            slots=slots,
            replicas=replicas,
            incarnation=incarnation,
            updates_done=frontier["updates_done"],
            next_draw=frontier["next_draw"],
            redraw=tuple(frontier["redraw"]),
        )

    # ---- events ---------------------------------------------------------

    def version_current(self, version: int, replicas: Sequence[int]) -> None:
        """`version` is current: these replicas serve it and have proven it."""
        if self._version is not None and version <= self._version:
            raise StalenessViolation(f"version {version} after {self._version}", "scheduler")
        if version > self._finished:
            raise StalenessViolation(
                f"version {version} published before update {version} finished", "scheduler"
            )
        self._version = version
        self._served.add(version)
        for index in replicas:
            self._replicas[index].versions.add(version)

    def attempt_finished(self, attempt_id: str, outcome: Outcome, reward: float | None) -> None:
        """A dispatched attempt reached its one terminal event."""
        group, replica = self._attempts.pop(attempt_id)
        self._replicas[replica].running.discard(attempt_id)
        group.finish(attempt_id, outcome, reward)
        setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
        if group.complete:
            self._judge(group)

    def update_finished(self, update: int) -> None:
        """The trainer made version `update`."""
        if update != self._finished + 1 or update != self._taken:
            raise StalenessViolation(f"update {update} finished out of order", "scheduler")
        self._finished = update
        self._in_training = []

    def replica_lost(self, replica: int) -> None:
        """A replica left rotation; what ran on it ends by its own terminal events."""
        self._replicas[replica].versions.clear()
        self._replicas[replica].suspended = False

    def suspend_replica(self, replica: int) -> None:
        """Send a replica nothing while it is found out whether it is alive."""
        self._replicas[replica].suspended = True

    def resume_replica(self, replica: int) -> None:
        """The suspended replica answers: send it work again."""
        self._replicas[replica].suspended = False

    def replica_back(self, replica: int, version: int) -> None:
        """A replica that was lost came back and has proven `version`."""
        self._replicas[replica].versions.add(version)

    # ---- commands -------------------------------------------------------

    def poll(self) -> list[Command]:
        """Everything that can be done now; calling it again yields nothing new."""
        commands: list[Command] = []
        self._strand()
        commands.extend(self._take_drops())
        update = self._select()
        if update is not None:
            commands.append(update)
        commands.extend(self._dispatch())
        commands.extend(self._retire())
        return commands

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        return self._finished >= self._config.updates

    @property
    def in_flight(self) -> int:
        """Attempts that run now."""
        return len(self._attempts)

    @property
    def running_attempts(self) -> tuple[str, ...]:
        """Ids of the attempts that run now."""
        return tuple(self._attempts)

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a batch."""
        return sum(group.complete for group in self._groups.values())

    @property
    def training(self) -> bool:
        """Whether a batch is with the trainer."""
        return self._taken > self._finished

    def frontier(self) -> Frontier:
        """What a checkpoint of the finished updates must know to continue.

        Draws in the batch that the trainer is working on count as not trained:
        the checkpoint belongs to the last finished update.
        """
        untrained = [*self._groups.values(), *self._in_training]
        redraw = sorted({*self._redraw, *(group.draw for group in untrained)})
        return {
            "updates_done": self._finished,
            "next_draw": self._next_draw,
            "redraw": redraw,
        }

    # ---- inside ---------------------------------------------------------

    def _judge(self, group: PendingGroup) -> None:
        """Drop a complete group that can't be trained on, or has no signal."""
        if len(group.rewards) < self._config.min_group:
            reason = f"only {len(group.rewards)} of its attempts were graded"
        elif group.zero_variance and self._refills_left > 0:
            self._refills_left -= 1
            self.counts.refilled_groups += 1
            reason = "all rewards are equal"
        else:
            return
        del self._groups[group.group_id]
        self.counts.dropped_groups += 1
        self._drops.append(DropGroup(group.group_id, reason))

    def _take_drops(self) -> list[DropGroup]:
        drops, self._drops = self._drops, []
        return drops

    def _select(self) -> StartUpdate | None:
        """The next batch, if the trainer is free and a feasible one is complete."""
        if self.training or self.done:
            return None
        update = self._taken + 1
        size = self._config.groups_per_batch
        by_due = sorted(self._groups.values(), key=lambda group: (group.due, group.draw))
        chosen = [group for group in by_due if group.complete][:size]
        if len(chosen) < size:
            return None
        ids = {group.group_id for group in chosen}
        for position, group in enumerate((g for g in by_due if g.group_id not in ids), start=1):
            if position > size * (group.due - update):
                return None  # taking these now would leave more than can be trained in time
        if any(update - 1 - group.version > self._config.max_staleness for group in chosen):
            raise StalenessViolation(f"update {update} would take a stale group", "scheduler")
        for group in chosen:
            del self._groups[group.group_id]
        self._in_training = chosen
        self._taken = update
        self._refills_left = self._config.refill_zero_variance
        return StartUpdate(update, tuple(group.group_id for group in chosen))

    def _dispatch(self) -> list[Dispatch]:
        """Fill free slots: attempts of admitted groups first, oldest version first."""
        commands: list[Dispatch] = []
        ready = {v for r in self._replicas if not r.suspended for v in r.versions}
        if self._version not in ready:
            return commands
        queue = deque(
            sorted(
                (g for g in self._groups.values() if g.waiting and g.version in ready),
                key=lambda group: (group.version, group.draw),
            )
        )
        while len(self._attempts) < self._slots:
            while queue and not queue[0].waiting:
                queue.popleft()
            if not queue:
                group = self._admit()
                if group is None:
                    break
                queue.append(group)
            commands.append(self._launch(queue[0]))
        return commands

    def _strand(self) -> None:
        """Give up waiting attempts whose version no replica serves any more.

        While no replica serves anything, nothing is given up: one may come back.
        """
        served = {version for replica in self._replicas for version in replica.versions}
        if self._version not in served:
            return
        for group in list(self._groups.values()):
            if group.waiting and group.version not in served:
                group.abandon_waiting()
                if group.complete:
                    self._judge(group)

    def _launch(self, group: PendingGroup) -> Dispatch:
        """Send one attempt to the least loaded replica that serves its version."""
        replica = min(
            (
                index
                for index, state in enumerate(self._replicas)
                if group.version in state.versions and not state.suspended
            ),
            key=lambda index: (len(self._replicas[index].running), index),
        )
        attempt_id = group.launch()
        self._replicas[replica].running.add(attempt_id)
        self._attempts[attempt_id] = (group, replica)
        self.counts.dispatched += 1
        return Dispatch(attempt_id, group.group_id, group.task, group.version, replica)

    def _admit(self) -> PendingGroup | None:
        """Open a group under the current version, if it can be trained in time."""
        config = self._config
        if self._version is None:
            return None
        size = config.groups_per_batch
        due = self._version + 1 + config.max_staleness
        room = size * (min(due, config.updates) - self._taken)
        if len(self._groups) >= room:
            return None
        draw = self._redraw.pop(0) if self._redraw else self._next_draw
        if draw == self._next_draw:
            self._next_draw += 1
        group = PendingGroup(
            group_id=f"g{draw:05d}.{self._incarnation}",
            draw=draw,
            task=self._order.task(draw),
            version=self._version,
            due=due,
            waiting=config.group_size,
            retries=config.attempt_retries,
        )
        self._groups[group.group_id] = group
        return group

    def _retire(self) -> list[RetireVersion]:
        """Versions behind the current one that no incomplete group holds."""
        if self._version is None:
            return []
        leased = {group.version for group in self._groups.values() if not group.complete}
        free = sorted(v for v in self._served if v < self._version and v not in leased)
        self._served.difference_update(free)
        return [RetireVersion(version) for version in free]
