"""What the baselines share: groups, slots, replicas and versions, without a rule.

A subclass says when a group may be opened (`_may_open`), what becomes of a
complete one (`_keep`), and which batch goes to the trainer (`_batch`).

Invariants:
- Events and commands are the scheduler's own; the same lease table, replica pool
  and task order stand behind them.
- A group has one version: attempts that wait are launched under the version that
  the group was opened under.
- No baseline streams: a batch's `StreamGroup` commands come together with its
  `StepUpdate`, when the trainer is idle and the batch is whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence

from rl.config import ScheduleConfig
from rl.records import Outcome
from rl.schedule.commands import (
    CancelAttempt,
    Command,
    Dispatch,
    DropGroup,
    RetireVersion,
    StepUpdate,
    StreamGroup,
)
from rl.schedule.groups import PendingGroup
from rl.schedule.leases import LeaseTable
from rl.schedule.order import TaskOrder
from rl.schedule.replicas import ReplicaPool


class Baseline(ABC):
    """See the module's invariants.

    Args:
        config: updates, batch, group and staleness settings.
        order: the order of tasks.
        slots: attempts that may run at once.
        replicas: number of replicas.
    """

    def __init__(
        self, config: ScheduleConfig, order: TaskOrder, *, slots: int, replicas: int
    ) -> None:
        self._config = config
        self._order = order
        self._slots = slots
        self._pool = ReplicaPool(replicas)
        self._leases = LeaseTable()
        self._version: int | None = None
        self._draw = 0
        self._finished = 0
        self._stepping = False
        self._groups: dict[str, PendingGroup] = {}  # open: not complete yet
        self._attempts: dict[str, tuple[PendingGroup, int]] = {}  # with its replica
        self._waiting: deque[PendingGroup] = deque()
        self._given_up: list[CancelAttempt | DropGroup] = []

    # ---- the rule -------------------------------------------------------

    @abstractmethod
    def _may_open(self) -> bool:
        """Whether a group may be opened under the current version now."""

    @abstractmethod
    def _keep(self, group: PendingGroup) -> None:
        """A group is complete and can be trained on."""

    @abstractmethod
    def _batch(self) -> Sequence[PendingGroup] | None:
        """The batch of the next update, if it is whole; asked when the trainer is idle."""

    # ---- events ---------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        return self._finished >= self._config.updates

    @property
    def _next_update(self) -> int:
        """The update whose batch has not been handed over yet."""
        return self._finished + 1 + self._stepping

    def _due(self, version: int) -> int:
        """The last update that may train on a group of `version`."""
        return version + 1 + self._config.max_staleness

    def version_current(self, version: int, replicas: Mapping[int, int]) -> None:
        """`version` is served by these replicas, in these generations."""
        self._leases.offer(version)
        self._version = version
        for index, generation in replicas.items():
            self._pool.proven(index, version, generation)

    def attempt_finished(
        self, attempt_id: str, outcome: Outcome, reward: float | None, now: float
    ) -> None:
        """A dispatched attempt reached its one terminal event."""
        del now  # no baseline learns durations
        group, replica = self._attempts.pop(attempt_id)
        self._pool.gave(replica)
        queued = group.waiting > 0
        group.finish(attempt_id, outcome, reward)
        if not group.can_reach(self._config.min_group):
            self._give_up(group, "too few of its group can still be graded")
        elif group.complete:
            self._judge(group)
        elif group.waiting and not queued:  # a relaunch goes ahead of younger groups
            self._waiting.appendleft(group)

    def update_finished(self, update: int) -> None:
        """The trainer made version `update`."""
        self._finished = update
        self._stepping = False

    def replica_lost(self, replica: int) -> int:
        """A replica left rotation; returns its new generation."""
        return self._pool.lost(replica)

    def replica_back(self, replica: int, version: int, generation: int) -> None:
        """A lost replica serves `version` again."""
        if version in self._leases.offered:
            self._pool.proven(replica, version, generation)

    # ---- commands -------------------------------------------------------

    def poll(self, now: float) -> list[Command]:
        """Everything that can be done now."""
        del now
        commands: list[Command] = []
        batch = None if self._stepping or self.done else self._batch()
        if batch is not None:
            update = self._next_update
            commands.extend(StreamGroup(update, group.group_id) for group in batch)
            commands.append(StepUpdate(update, tuple(group.group_id for group in batch)))
            self._stepping = True
        commands.extend(self._dispatch())
        commands.extend(self._given_up)
        self._given_up.clear()
        for version in self._leases.retire():
            self._pool.retired(version)
            commands.append(RetireVersion(version))
        return commands

    def _dispatch(self) -> list[Dispatch]:
        """Fill free slots: attempts of open groups first, then new groups."""
        commands: list[Dispatch] = []
        while len(self._attempts) < self._slots:
            found = self._next_waiting() or self._open()
            if found is None:
                break
            group, replica = found
            attempt_id = group.launch()
            self._attempts[attempt_id] = (group, replica)
            self._pool.took(replica)
            commands.append(
                Dispatch(attempt_id, group.group_id, group.task, group.version, replica)
            )
        return commands

    def _next_waiting(self) -> tuple[PendingGroup, int] | None:
        while self._waiting:
            group = self._waiting[0]
            if group.waiting:
                replica = self._pool.least_loaded(group.version)
                if replica is not None:
                    return group, replica
                if self._version is None or not self._pool.serves(self._version):
                    return None  # nothing is served: a replica may come back
                self._strand(group)
            self._waiting.popleft()
        return None

    def _open(self) -> tuple[PendingGroup, int] | None:
        version = self._version
        if version is None or not self._may_open():
            return None
        replica = self._pool.least_loaded(version)
        if replica is None:
            return None
        group = PendingGroup(
            group_id=f"g{self._draw}",
            draw=self._draw,
            task=self._order.task(self._draw),
            version=version,
            due=self._due(version),
            waiting=self._config.group_size,
            retries=self._config.group_retries,
        )
        self._draw += 1
        self._leases.acquire(version, group.group_id)
        self._groups[group.group_id] = group
        self._waiting.append(group)
        return group, replica

    # ---- groups that end ------------------------------------------------

    def _strand(self, group: PendingGroup) -> None:
        """No replica serves the group's version any more: launch nothing more of it."""
        group.abandon_waiting()
        if not group.can_reach(self._config.min_group):
            self._give_up(group, "too few of its group can still be graded")
        elif group.complete:
            self._judge(group)

    def _give_up(self, group: PendingGroup, reason: str) -> None:
        """Spend nothing more on an open group; drop it once nothing of it runs."""
        group.abandon_waiting()
        if not group.hopeless:
            group.hopeless = True
            self._given_up.extend(
                CancelAttempt(attempt_id, reason) for attempt_id in sorted(group.running)
            )
        if group.complete:
            self._judge(group)

    def _judge(self, group: PendingGroup) -> None:
        """Keep a complete group, or drop it if it was given up."""
        self._leases.release(group.version, group.group_id)
        del self._groups[group.group_id]
        if group.hopeless:
            self._given_up.append(DropGroup(group.group_id, "it was given up"))
        else:
            self._keep(group)
