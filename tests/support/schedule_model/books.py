"""The books of a modelled campaign, kept from commands and events alone.

They repeat what the scheduler should know without looking into it, and raise
`Violation` at the first command that breaks a rule of the design.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.records import Outcome
from rl.schedule.commands import (
    CancelAttempt,
    Dispatch,
    DispatchEval,
    DropGroup,
    RetireVersion,
    StepUpdate,
    StreamAttempt,
    StreamGroup,
)
from tests.support.schedule_model.eval_books import EvalBooks
from tests.support.schedule_model.setting import Setting, require


@dataclass(slots=True)
class GroupBook:
    """An admitted group.

    Attributes:
        owed: attempts that have not been dispatched and not been given up.
        early: attempts that were streamed before the group was.
        cancelled: running attempts that were given up.
        refilled: whether it came to nothing while a refill was left.
    """

    draw: int
    version: int
    owed: int
    retries: int
    running: set[str] = field(default_factory=set[str])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    early: set[str] = field(default_factory=set[str])
    cancelled: set[str] = field(default_factory=set[str])
    refilled: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing more comes of it."""
        return not self.running and not self.owed

    @property
    def chances(self) -> int:
        """Attempts that are graded or still may be."""
        return len(self.rewards) + len(self.running) + self.owed


@dataclass(frozen=True)
class Settled:
    """Draws that are owed no more."""

    trained: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()


class Books:
    """One driver's books; `resumed` makes the next driver's."""

    def __init__(
        self, setting: Setting, finished: int, settled: Settled, used_ids: set[str]
    ) -> None:
        config = setting.config
        self._setting = setting
        self._size = config.group_size
        self._batch = config.groups_per_batch
        self.finished = finished
        self.trained_draws = set(settled.trained)
        self.dropped_draws = set(settled.dropped)
        self.used_ids = used_ids
        self.evals = EvalBooks(setting.evals, {}, used_ids)
        self.groups: dict[str, GroupBook] = {}
        self.placed: dict[str, int] = {}  # draws of the forming batch, in order
        self.buffered = 0  # its episodes
        self.stepping = False
        self.current: int | None = None
        self.offered: set[int] = set()
        self.refills = 0

    def resumed(self, finished: int, settled: Settled) -> Books:
        """The books of a driver that starts from a checkpoint."""
        books = Books(self._setting, finished, settled, self.used_ids)
        books.evals = self.evals.resumed(finished)
        return books

    @property
    def forming(self) -> int:
        """The update whose batch is being formed or trained."""
        return self.finished + 1

    @property
    def running(self) -> int:
        """Attempts that run, those of evaluations included."""
        return self.training_attempts + self.evals.running

    @property
    def training_attempts(self) -> int:
        """Attempts of groups that run."""
        return sum(len(group.running) for group in self.groups.values())

    def due(self, version: int) -> int:
        """The last update that a group of `version` may be trained in."""
        config = self._setting.config
        return min(version + 1 + config.max_staleness, config.updates)

    def room(self, update: int) -> int:
        """Places up to `update` that no admitted group needs."""
        places = self._batch * (update - self.finished) - len(self.placed)
        return places - sum(self.due(group.version) <= update for group in self.groups.values())

    # ---- events ---------------------------------------------------------

    def version_current(self, version: int) -> None:
        """The scheduler was told of a version."""
        self.current = version
        self.offered.add(version)
        self.evals.version_current(version)

    def ended(self, group_id: str, attempt_id: str, outcome: Outcome, reward: float) -> None:
        """The terminal event of a running attempt."""
        group = self.groups[group_id]
        group.running.remove(attempt_id)
        group.cancelled.discard(attempt_id)
        if outcome == "graded":
            group.rewards[attempt_id] = reward
        elif outcome == "masked" and group.retries:
            group.retries -= 1
            group.owed += 1
        if group.chances < self._setting.config.min_group:
            group.owed = group.retries = 0
        if self._flat(group) and self.refills < self._setting.config.refill_zero_variance:
            self.refills += 1
            group.refilled = True

    def _flat(self, group: GroupBook) -> bool:
        """Whether the group is complete, and could be trained on but for its equal rewards."""
        enough = len(group.rewards) >= self._setting.config.min_group
        return group.complete and enough and len(set(group.rewards.values())) == 1

    def stranded(self, version: int) -> None:
        """No replica serves `version` any more, while one serves the current version."""
        for group in self.groups.values():
            if group.version == version and group.owed:
                group.owed = group.retries = 0
        self.evals.stranded(version)

    def update_finished(self) -> None:
        """The trainer has made the update whose batch was whole."""
        draws = set(self.placed.values())
        require(not draws & self.trained_draws, "a draw is trained once")
        self.trained_draws |= draws
        for group_id, group in self.groups.items():
            require(
                not group.early, f"{group_id} is in the batch that its attempts were streamed for"
            )
        self.finished += 1
        self.placed = {}
        self.buffered = 0
        self.stepping = False
        self.refills = 0

    # ---- commands -------------------------------------------------------

    def dispatch(self, command: Dispatch) -> None:
        """An attempt starts."""
        group_id, attempt_id = command.group_id, command.attempt_id
        require(attempt_id not in self.used_ids, f"{attempt_id} is a new id")
        self.used_ids.add(attempt_id)
        group = self.groups.get(group_id)
        if group is None:
            group = self._admit(command)
        require(command.version == group.version, f"{group_id} has one version")
        require(command.task == group.draw, f"{group_id} has one task")
        require(group.owed > 0, f"{group_id} is owed another attempt")
        require(command.version in self.offered, f"version {command.version} is not retired")
        group.owed -= 1
        group.running.add(attempt_id)
        require(self.running <= self._setting.slots, "no more attempts than slots")

    def _admit(self, command: Dispatch) -> GroupBook:
        require(command.group_id not in self.used_ids, f"{command.group_id} is a new id")
        self.used_ids.add(command.group_id)
        draw = command.task
        taken = {group.draw for group in self.groups.values()} | set(self.placed.values())
        taken |= self.trained_draws | self.dropped_draws
        require(draw not in taken, f"draw {draw} is handed out once")
        require(command.version == self.current, "a group opens under the current version")
        retries = self._size * self._setting.config.attempt_retries
        group = GroupBook(draw, command.version, self._size, retries)
        self.groups[command.group_id] = group
        return group

    def dispatch_eval(self, command: DispatchEval) -> None:
        """An attempt of an evaluation starts."""
        self.evals.dispatch(command)
        require(command.version in self.offered, f"version {command.version} is not retired")
        require(self.running <= self._setting.slots, "no more attempts than slots")

    def cancel(self, command: CancelAttempt) -> None:
        """An attempt is given up."""
        group = self._of(command.attempt_id)
        require(command.attempt_id not in group.cancelled, "an attempt is cancelled once")
        require(
            group.chances < self._setting.config.min_group,
            f"{command.attempt_id} is cancelled only if its group is hopeless",
        )
        group.cancelled.add(command.attempt_id)

    def _of(self, attempt_id: str) -> GroupBook:
        found = [group for group in self.groups.values() if attempt_id in group.running]
        require(len(found) == 1, f"{attempt_id} runs")
        return found[0]

    def stream_attempt(self, command: StreamAttempt) -> None:
        """A graded attempt is worked on before its group is complete."""
        group = self.groups.get(command.group_id)
        require(group is not None, f"{command.group_id} is open when its attempt is streamed")
        assert group is not None
        self._fresh(command.update, group)
        require(command.attempt_id in group.rewards, f"{command.attempt_id} was graded")
        require(command.attempt_id not in group.early, f"{command.attempt_id} is streamed once")
        require(
            self.due(group.version) == self.forming,
            f"{command.attempt_id} is streamed early only if its group is due",
        )
        group.early.add(command.attempt_id)

    def stream_group(self, command: StreamGroup) -> None:
        """A group takes its place in the forming batch."""
        group = self.groups.pop(command.group_id, None)
        require(group is not None, f"{command.group_id} is streamed once, and not after a drop")
        assert group is not None
        self._fresh(command.update, group)
        self._complete(command.group_id, group)
        require(
            len(group.rewards) >= self._setting.config.min_group,
            f"{command.group_id} has enough graded attempts",
        )
        require(not group.refilled, f"{command.group_id} has no signal, so it is refilled")
        self.placed[command.group_id] = group.draw
        self.buffered += len(group.rewards)
        require(len(self.placed) <= self._batch, "no batch is overfull")

    def _fresh(self, update: int, group: GroupBook) -> None:
        require(update == self.forming and not self.stepping, f"update {update} is being formed")
        staleness = (update - 1) - group.version
        require(
            0 <= staleness <= self._setting.config.max_staleness,
            f"staleness {staleness} of a group of version {group.version} is within the bound",
        )

    def _complete(self, group_id: str, group: GroupBook) -> None:
        require(not group.running, f"nothing of {group_id} runs when it is settled")
        require(not group.owed, f"{group_id} gets the attempts it is owed")

    def step(self, command: StepUpdate) -> None:
        """A whole batch goes to the trainer."""
        require(not self.stepping, "one update at a time")
        require(command.update == self.forming, "updates are made in order")
        require(command.group_ids == tuple(self.placed), "a step is what was streamed")
        require(len(command.group_ids) == self._batch, "a batch is whole")
        self.stepping = True

    def drop(self, command: DropGroup) -> None:
        """A group will never be trained on."""
        group = self.groups.pop(command.group_id, None)
        require(group is not None, f"{command.group_id} is dropped once, and not once streamed")
        assert group is not None
        self._complete(command.group_id, group)
        if len(group.rewards) >= self._setting.config.min_group and not group.refilled:
            require(self._flat(group), f"{command.group_id} can't be trained on")
            self.refills += 1  # it was complete without an attempt's end
            require(
                self.refills <= self._setting.config.refill_zero_variance,
                "no more refills in an update than are allowed",
            )
        self.dropped_draws.add(group.draw)

    def retire(self, command: RetireVersion) -> None:
        """A version is unloaded everywhere."""
        version = command.version
        require(version in self.offered, f"version {version} is retired once")
        require(version != self.current, "the current version is not retired")
        require(version not in self._held(), f"nobody holds version {version}")
        self.offered.remove(version)

    def _held(self) -> set[int]:
        groups = {group.version for group in self.groups.values() if not group.complete}
        return groups | self.evals.open.keys()

    # ---- after every poll -----------------------------------------------

    def check(self) -> None:
        """What holds between any two events."""
        config = self._setting.config
        self.evals.check()
        graded = sum(len(group.rewards) for group in self.groups.values())
        require(
            self.training_attempts + graded + self.buffered
            <= (config.max_staleness + 1) * config.batch_size,
            "no more episodes ahead of the trainer than the bound",
        )
        for update in range(self.forming, config.updates + 1):
            require(self.room(update) >= 0, f"what is due by update {update} can be placed")
        for group_id, group in self.groups.items():
            hopeless = group.chances < config.min_group
            require(
                not hopeless or group.cancelled == group.running,
                f"what runs of {group_id} is cancelled, as it is hopeless",
            )
            if self.due(group.version) == self.forming and not group.complete:
                require(
                    set(group.rewards) == group.early, f"{group_id} is due and streamed at once"
                )
        done = self.finished == config.updates
        require(not (done and self.groups), "nothing is left over at the end")
        require(
            len(self.trained_draws) == self.finished * self._batch,
            "every update has trained on a whole batch of draws",
        )
        for version in self.offered - self._held() - {self.current}:
            require(False, f"version {version} is retired when nobody holds it any more")
