"""One group of attempts, from its dispatch to its place in a batch.

Invariants:
- A group has one task and one policy version, fixed when its first attempt is
  dispatched; its staleness is counted from then.
- Every attempt that was dispatched is running or has exactly one outcome.
- A group is complete when nothing of it is waiting or running; after that it
  never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.records import Outcome


@dataclass(slots=True)
class PendingGroup:
    """A group that has been admitted and not yet been put into a batch.

    Attributes:
        draw: its number in the task order.
        due: the last update that may train on it, see `rl.schedule.window`.
        waiting: attempts that still have to be dispatched.
        retries: relaunches of masked attempts that are left.
        rewards: reward by graded attempt, in order of completion.
        lost: attempts that ended without a grade and are not relaunched.
        hopeless: whether it was given up: too few attempts can still be graded.
    """

    group_id: str
    draw: int
    task: int
    version: int
    due: int
    waiting: int
    retries: int
    launched: int = 0
    running: set[str] = field(default_factory=set[str])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    lost: int = 0
    hopeless: bool = False

    def launch(self) -> str:
        """Take one waiting attempt; returns its new, never reused id."""
        if self.waiting < 1:
            raise ValueError(f"{self.group_id} has no attempt waiting")
        attempt_id = f"{self.group_id}-a{self.launched}"
        self.waiting -= 1
        self.launched += 1
        self.running.add(attempt_id)
        return attempt_id

    def finish(self, attempt_id: str, outcome: Outcome, reward: float | None) -> None:
        """Record the one outcome of a running attempt.

        A masked attempt waits to be relaunched while retries are left; a
        cancelled one was given up on purpose and is not.
        """
        if attempt_id not in self.running:
            raise ValueError(f"{attempt_id} is not running")
        if outcome == "graded" and reward is None:
            raise ValueError(f"{attempt_id} was graded without a reward")
        self.running.remove(attempt_id)
        if reward is not None and outcome == "graded":
            self.rewards[attempt_id] = reward
        elif outcome == "masked" and self.retries > 0:
            self.retries -= 1
            self.waiting += 1
        else:
            self.lost += 1

    def abandon_waiting(self) -> None:
        """Give up the attempts that wait, and every relaunch."""
        self.lost += self.waiting
        self.waiting = 0
        self.retries = 0

    def can_reach(self, graded: int) -> bool:
        """Whether so many attempts have been graded or still can be."""
        return len(self.rewards) + len(self.running) + self.waiting >= graded

    @property
    def complete(self) -> bool:
        """Whether nothing of it is waiting or running."""
        return self.waiting == 0 and not self.running

    @property
    def zero_variance(self) -> bool:
        """Whether its rewards hold no signal."""
        return len(set(self.rewards.values())) < 2
