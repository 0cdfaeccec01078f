"""What the scheduler asks of the outside world: plain, frozen commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Attempts of unfinished groups to one call of the trainer: more share a prompt, but a whole
# group that comes meanwhile must wait.
ATTEMPTS_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run one attempt now, on the named replica, under the named version."""

    attempt_id: str
    group_id: str
    task: int
    version: int
    replica: int


@dataclass(frozen=True, slots=True)
class DispatchEval:
    """Run one attempt of an evaluation now; `cell` says which task, and which attempt at it."""

    attempt_id: str
    version: int
    cell: int
    replica: int


@dataclass(frozen=True, slots=True)
class EvalOver:
    """The evaluation of a version has ended; `reason` says why it has fewer than `cells`."""

    version: int
    graded: int
    cells: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """A running attempt can't be trained on any more: end it; `reason` says why."""

    attempt_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StreamAttempt:
    """Work on this graded attempt now: its group is due in the batch of `update`.

    What is made of it counts only when the group's `StreamGroup` follows; a
    `DropGroup` may follow instead.
    """

    update: int
    group_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class StreamGroup:
    """Accumulate this finished group's gradient into the batch of `update` now."""

    update: int
    group_id: str


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """The batch of `update` is whole: step once these groups, in this order, are in."""

    update: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A finished group will never be trained on; `reason` says why."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetireVersion:
    """No lease is left on this version and none will be taken: unload it."""

    version: int


Command = (
    Dispatch
    | DispatchEval
    | EvalOver
    | CancelAttempt
    | StreamAttempt
    | StreamGroup
    | StepUpdate
    | DropGroup
    | RetireVersion
)
