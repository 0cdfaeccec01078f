"""A scheduler whose events a test gives by hand, one after the other."""

from __future__ import annotations

from rl.records import Outcome
from rl.schedule.commands import Command, Dispatch, DispatchEval, StepUpdate
from rl.schedule.evals import NO_EVALS, EvalPlan
from rl.schedule.scheduler import FRESH, Frontier, Scheduler
from tests.support.schedule_model.setting import DrawOrder, shared_config


class Play:
    """Two replicas serve version 0 at the start; every event is followed by a poll.

    Attributes:
        running: attempts that were dispatched and have not ended.
        heard: the commands of the last poll.
        clock: given to the scheduler with each event, s.
    """

    def __init__(
        self,
        *,
        updates: int = 4,
        batch: int = 4,
        group: int = 2,
        staleness: int = 1,
        refill: int = 0,
        min_group: int = 2,
        retries: int = 1,
        slots: int = 8,
        replicas: int = 2,
        incarnation: int = 0,
        frontier: Frontier = FRESH,
        evals: EvalPlan = NO_EVALS,
        start: bool = True,
    ) -> None:
        config = shared_config(updates, batch, group, staleness, refill, min_group, retries)
        self.replicas = replicas
        self.scheduler = Scheduler(
            config,
            DrawOrder(),
            slots=slots,
            replicas=replicas,
            incarnation=incarnation,
            frontier=frontier,
            evals=evals,
        )
        self.running: dict[str, Dispatch] = {}
        self.evaluating: dict[str, DispatchEval] = {}
        self.heard: list[Command] = []
        self.clock = 0.0
        if start:
            self.publish(frontier["updates_done"])

    def poll(self) -> list[Command]:
        """Obey what the scheduler asks for now."""
        self.heard = self.scheduler.poll(self.clock)
        self.running |= {c.attempt_id: c for c in self.heard if isinstance(c, Dispatch)}
        self.evaluating |= {c.attempt_id: c for c in self.heard if isinstance(c, DispatchEval)}
        return self.heard

    def publish(self, version: int, replicas: dict[int, int] | None = None) -> list[Command]:
        """A version is current, on all replicas in their first lives unless it is said."""
        serving = dict.fromkeys(range(self.replicas), 0) if replicas is None else replicas
        self.scheduler.version_current(version, serving)
        return self.poll()

    def end(
        self, attempt_id: str, outcome: Outcome = "graded", reward: float = 1.0
    ) -> list[Command]:
        """An attempt ends."""
        del (self.running if attempt_id in self.running else self.evaluating)[attempt_id]
        graded = outcome == "graded"
        self.scheduler.attempt_finished(attempt_id, outcome, reward if graded else None, self.clock)
        return self.poll()

    def of(self, group_id: str) -> list[str]:
        """The running attempts of a group."""
        return [a for a, dispatch in self.running.items() if dispatch.group_id == group_id]

    def groups(self) -> list[str]:
        """The groups that have attempts running, in order of their first dispatch."""
        return list(dict.fromkeys(dispatch.group_id for dispatch in self.running.values()))

    def grade(self, group_id: str, *rewards: float) -> list[Command]:
        """All that runs of a group is graded: 0, 1, 0, ... unless rewards are given."""
        heard: list[Command] = []
        for index, attempt_id in enumerate(self.of(group_id)):
            heard += self.end(attempt_id, reward=rewards[index] if rewards else index % 2)
        return heard

    def train(self, update: int) -> list[Command]:
        """The trainer makes an update."""
        self.scheduler.update_finished(update)
        return self.poll()

    def until_step(self) -> StepUpdate:
        """Grade groups in order until a batch is whole."""
        while True:
            for command in self.grade(self.groups()[0]):
                if isinstance(command, StepUpdate):
                    return command
