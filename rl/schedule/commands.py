"""What the scheduler asks of the outside world: plain, frozen commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run one attempt now, on the named replica, under the named version."""

    attempt_id: str
    group_id: str
    task: int
    version: int
    replica: int


@dataclass(frozen=True, slots=True)
class StartUpdate:
    """Train update `update` on these groups, in this order."""

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


Command = Dispatch | StartUpdate | DropGroup | RetireVersion
