"""The world around a policy under virtual time: carries out commands, reports events.

Invariants:
- The policy learns nothing but its own protocol's events; the trace, the ends of
  attempts and the failures to come are hidden from it.
- Everything that is reported about a policy is measured here, staleness from the
  dispatch of a group's first attempt included.  A policy that breaks the protocol
  or the bound ends the simulation with an error.
- Memory holds what is in flight or waits for a batch, and nothing else.
- Version 0 is published like any other: nothing is dispatched before T_sync.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rl.errors import StalenessViolation
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
from rl.simulation.bound import Recurrence
from rl.simulation.engine import Agenda, Engine, Run, SpeedCurve
from rl.simulation.policy import Policy
from rl.simulation.tally import Tally
from rl.simulation.trace import Trace
from rl.simulation.trainer import Trainer
from rl.simulation.workloads import Workload

# Rewards are not simulated: policies act on durations alone, and none drops a group
# for its rewards (`Workload` refuses refills).
REWARD = 1.0


class ProtocolViolation(Exception):
    """A policy did what the protocol forbids, or waits for what can't happen."""


@dataclass(slots=True)
class _Group:
    """A group that was dispatched and has not been trained on or dropped."""

    task: int
    occurrence: int
    version: int
    launched: int = 0
    running: int = 0
    graded: int = 0
    streamed: int = 0
    seconds: float = 0.0  # of graded attempts, by the trace
    longest: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Attempt:
    """What a run belongs to."""

    group: _Group
    seconds: float  # by the trace


class World:
    """See the module's invariants.

    Args:
        workload: what is simulated.
        policy: new, for that workload.
        on_update: told of every update when it ends.
    """

    def __init__(
        self, workload: Workload, policy: Policy, on_update: Callable[[int], None]
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._on_update = on_update
        self._trace = Trace(workload)
        self._agenda = Agenda()
        self._engine = Engine(
            workload.engine.replicas,
            SpeedCurve(workload.engine.speed),
            workload.durations.deadline_s,
            self._agenda,
            self._ended,
        )
        self._trainer = Trainer(
            workload.trainer.update_s,
            workload.schedule.batch_size,
            workload.trainer.ahead_cost,
            self._agenda,
            self._updated,
        )
        self._own = Recurrence.of(workload)
        self._occurrences = [0] * workload.durations.task_count
        self._groups: dict[str, _Group] = {}
        self._runs: dict[str, Run] = {}
        self._published = -1
        self._to_publish: int | None = None
        self._publishing = False
        self._generations = dict.fromkeys(range(workload.engine.replicas), 0)  # live ones
        self._step: int | None = None
        self.tally = Tally()
        self.end_s = 0.0

    # ---- what came of it ------------------------------------------------

    @property
    def trainer_utilisation(self) -> float:
        """Share of the time that the trainer worked."""
        return self._trainer.busy_s / self.end_s

    @property
    def replica_utilisation(self) -> float:
        """Share of slots that an attempt held, over time."""
        running = sum(self.end_s - run.started for run in self._runs.values())
        return (self.tally.busy_s + running) / (self._workload.slots * self.end_s)

    @property
    def own_recurrence_s(self) -> float:
        """The recurrence over the batches as the policy formed them: end of the last, s."""
        return self._own.end

    # ---- the loop -------------------------------------------------------

    def run(self) -> None:
        """Until the last update has ended.

        Raises:
            ProtocolViolation: the policy broke the protocol.
            StalenessViolation: it trained on something too stale.
        """
        self._publish(0)
        if self._workload.failures.mtbf_s is not None:
            for replica in self._generations:
                self._await_failure(replica)
        while not self._policy.done:
            self._obey()
            try:
                self._agenda.step()
            except IndexError:
                raise ProtocolViolation(
                    f"the policy waits for nothing at {self._agenda.now:.0f} s"
                ) from None
        self.end_s = self._agenda.now

    def _obey(self) -> None:
        """Carry out commands until there are none: a cancellation makes room at once."""
        while commands := self._policy.poll(self._agenda.now):
            cancelled = False
            for command in commands:
                cancelled |= self._execute(command)
            if not cancelled:
                return

    def _execute(self, command: Command) -> bool:
        """Carry out one command; True if it was an event of its own."""
        match command:
            case Dispatch():
                self._dispatch(command)
            case DispatchEval() | EvalOver():
                raise ProtocolViolation("an evaluation that no workload asks for")
            case StreamAttempt(_, group_id, _):
                self._trainer.ahead(group_id)
            case StreamGroup(_, group_id):
                group = self._groups[group_id]
                group.streamed = group.graded
                self._trainer.group(group_id, group.graded)
            case StepUpdate():
                self._take_batch(command)
            case CancelAttempt(attempt_id, _):
                return self._cancel(attempt_id)
            case DropGroup(group_id, _):
                self._trainer.drop(group_id)
                group = self._groups.pop(group_id)
                self.tally.wasted += group.graded
                self.tally.wasted_s += group.busy_s
            case RetireVersion():
                pass
        return False

    # ---- attempts -------------------------------------------------------

    def _dispatch(self, command: Dispatch) -> None:
        group = self._groups.get(command.group_id) or self._open(command)
        if command.version != group.version:
            raise ProtocolViolation(f"{command.group_id} mixes versions")
        if command.replica not in self._generations:
            raise ProtocolViolation(f"{command.attempt_id} was sent to a dead replica")
        if self._engine.running >= self._workload.slots:
            raise ProtocolViolation(f"{command.attempt_id} has no slot")
        fate = self._trace.fate(group.task, group.occurrence, group.launched)
        group.launched += 1
        group.running += 1
        self.tally.dispatched += 1
        self.tally.dispatched_s += fate.seconds
        masked = fate.masked_after is not None
        run = Run(
            attempt_id=command.attempt_id,
            owner=_Attempt(group, fate.seconds),
            replica=command.replica,
            work=fate.seconds if fate.masked_after is None else fate.masked_after,
            masked=masked,
        )
        self._runs[run.attempt_id] = run
        self._engine.start(run)

    def _open(self, command: Dispatch) -> _Group:
        if not 0 <= command.version <= self._published:
            raise ProtocolViolation(f"version {command.version} is not published")
        occurrence = self._occurrences[command.task]
        self._occurrences[command.task] += 1
        group = _Group(command.task, occurrence, command.version)
        self._groups[command.group_id] = group
        return group

    def _ended(self, run: Run) -> None:
        """An attempt ended by itself, by its deadline, or by a fault of its own."""
        if run.masked:
            self._masked(run)
            return
        attempt = self._close(run)
        group = attempt.group
        group.graded += 1
        group.seconds += attempt.seconds
        group.longest = max(group.longest, attempt.seconds)
        group.busy_s += self._agenda.now - run.started
        self.tally.graded += 1
        self._policy.attempt_finished(run.attempt_id, "graded", REWARD, self._agenda.now)

    def _masked(self, run: Run) -> None:
        self._close(run)
        self.tally.masked += 1
        self._policy.attempt_finished(run.attempt_id, "masked", None, self._agenda.now)

    def _cancel(self, attempt_id: str) -> bool:
        run = self._runs.get(attempt_id)
        if run is None:
            return False  # it ended before the command was given
        self._engine.cancel(run)
        self._close(run)
        self.tally.cancelled += 1
        self.tally.wasted += 1
        self.tally.wasted_s += self._agenda.now - run.started
        self._policy.attempt_finished(attempt_id, "cancelled", None, self._agenda.now)
        return True

    def _close(self, run: Run) -> _Attempt:
        del self._runs[run.attempt_id]
        attempt: _Attempt = run.owner
        attempt.group.running -= 1
        self.tally.busy_s += self._agenda.now - run.started
        return attempt

    # ---- the trainer and its versions -----------------------------------

    def _take_batch(self, command: StepUpdate) -> None:
        wanted = self._workload.schedule.groups_per_batch
        if self._step is not None or len(set(command.group_ids)) != wanted:
            raise ProtocolViolation(f"update {command.update} has no whole batch of its own")
        groups = [self._groups.pop(group_id) for group_id in command.group_ids]
        for group in groups:
            staleness = command.update - 1 - group.version
            if not 0 <= staleness <= self._workload.schedule.max_staleness:
                raise StalenessViolation(
                    f"update {command.update} takes a group of version {group.version}"
                )
            if group.running or group.streamed != group.graded:
                raise ProtocolViolation(f"update {command.update} takes a group that is not whole")
            self.tally.trained += group.graded
            self.tally.trained_s += group.seconds
            self.tally.staleness[staleness] += group.graded
        self._own.advance(max(group.longest for group in groups))
        self._step = command.update
        self._trainer.step(command.update)

    def _updated(self, update: int) -> None:
        self._step = None
        self._policy.update_finished(update)
        self._publish(update)
        self._on_update(update)

    def _publish(self, version: int) -> None:
        """Publish the newest version; one publication at a time."""
        self._to_publish = version
        if not self._publishing:
            self._publishing = True
            later = self._agenda.now + self._workload.trainer.sync_s
            self._agenda.at(later, self._publication_ended, version)

    def _publication_ended(self, version: int) -> None:
        self._publishing = False
        if not self._generations:
            return  # every replica is down: the first one back asks for it again
        self._published = version
        self._policy.version_current(version, dict(self._generations))
        if self._to_publish == version:
            self._to_publish = None
        elif self._to_publish is not None:
            self._publish(self._to_publish)

    # ---- replicas that fail ---------------------------------------------

    def _await_failure(self, replica: int) -> None:
        mtbf_s = self._workload.failures.mtbf_s
        assert mtbf_s is not None
        generation = self._generations[replica]
        rng = random.Random(f"failures/{self._workload.seed}/{replica}/{generation}")
        self._agenda.at(self._agenda.now + rng.expovariate(1 / mtbf_s), self._lost, replica)

    def _lost(self, replica: int) -> None:
        """A replica dies, and the policy learns of it before its attempts' ends."""
        del self._generations[replica]
        generation = self._policy.replica_lost(replica)
        for run in self._engine.lose(replica):
            self._masked(run)
        back_at = self._agenda.now + self._workload.failures.restart_s
        self._agenda.at(back_at, self._back, replica, generation)

    def _back(self, replica: int, generation: int) -> None:
        self._generations[replica] = generation
        if self._published >= 0:
            self._policy.replica_back(replica, self._published, generation)
        if self._to_publish is not None:
            self._publish(self._to_publish)
        self._await_failure(replica)
