"""What a scheduling policy is to the simulator: the scheduler's own protocol.

`rl.schedule.scheduler.Scheduler` satisfies it as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rl.records import Outcome
from rl.schedule.commands import Command


class Policy(Protocol):
    """Events and a clock in, commands out; see `Scheduler` for each method."""

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        ...

    def version_current(self, version: int, replicas: Mapping[int, int]) -> None:
        """`version` is served by these replicas, in these generations."""
        ...

    def attempt_finished(
        self, attempt_id: str, outcome: Outcome, reward: float | None, now: float
    ) -> None:
        """A dispatched attempt reached its one terminal event."""
        ...

    def update_finished(self, update: int) -> None:
        """The trainer made version `update`."""
        ...

    def replica_lost(self, replica: int) -> int:
        """A replica left rotation; returns its new generation."""
        ...

    def replica_back(self, replica: int, version: int, generation: int) -> None:
        """A lost replica serves `version` again."""
        ...

    def poll(self, now: float) -> list[Command]:
        """Everything that can be done now."""
        ...
