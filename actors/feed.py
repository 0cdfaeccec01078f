"""Feeds the trainer: its work in order, one call at a time.

Invariants:
- The trainer gets work in the order in which it was given here, but for early
  attempts: they wait while there is anything else to do, since working ahead is
  dearer than a whole group's call; the group with the fewest graded ones, which
  is likely to end last, comes first, a few to a call; and those that still wait
  when their group is complete are left to the group's own call.  So none is
  overtaken by the step of its update.
- While there is work a job runs; when there is none, no job does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from actors.adapter_ref import AdapterRef
from actors.calls import call
from rl.records import EpisodeRecord, Group, UpdateMetrics
from rl.schedule.commands import ATTEMPTS_AHEAD
from rl.schedule.scheduler import Frontier


@dataclass
class _Early:
    update: int
    group_id: str
    episodes: list[EpisodeRecord]


@dataclass(frozen=True)
class _Whole:
    update: int
    group: Group


@dataclass(frozen=True)
class _Drop:
    group_id: str


@dataclass(frozen=True)
class _Step:
    update: int
    groups: list[Group]


@dataclass(frozen=True)
class _Checkpoint:
    frontier: Frontier


@dataclass
class TrainerFeed:
    """See the module's invariants.

    Args:
        trainer: the actor.
        deadline_s: limit of one call, s.
        start: starts a job of the caller's, who watches over its failure.
        on_step: told of a finished update, its groups and its adapter.
        write_checkpoint: writes one; nothing is given to the trainer meanwhile.
        streaming: False keeps a batch's groups back until it is whole and gives them
            in the order of their ids, so that what is computed, to the last bit, is a
            function of the episodes and not of when they ended.
    """

    trainer: Any
    deadline_s: float
    start: Callable[[Coroutine[Any, Any, None]], None]
    on_step: Callable[[UpdateMetrics, list[Group], AdapterRef], None]
    write_checkpoint: Callable[[Frontier], Coroutine[Any, Any, None]]
    streaming: bool = True
    _work: list[_Early | _Whole | _Drop | _Step | _Checkpoint] = field(default_factory=list[Any])
    _sent_early: dict[str, int] = field(default_factory=dict[str, int])  # attempts, by group
    _busy: bool = False

    def attempt(self, update: int, episode: EpisodeRecord) -> None:
        """A graded attempt of a group that is not complete yet."""
        if not self.streaming:
            return
        waiting = self._waiting_early(episode.group_id)
        if waiting is not None:
            waiting.episodes.append(episode)
            return
        self._add(_Early(update, episode.group_id, [episode]))

    def group(self, update: int, group: Group) -> None:
        """A complete group."""
        if not self.streaming:
            return
        self._forget_early(group.group_id)
        self._add(_Whole(update, group))

    def drop(self, group_id: str) -> None:
        """A group that will not be trained on; early work on it is forgotten."""
        self._forget_early(group_id)
        if group_id in self._sent_early:
            self._add(_Drop(group_id))

    def step(self, update: int, groups: list[Group]) -> None:
        """All groups of the batch were given."""
        if not self.streaming:
            for group in sorted(groups, key=lambda group: group.group_id):
                self._add(_Whole(update, group))
        self._add(_Step(update, groups))

    def checkpoint(self, frontier: Frontier) -> None:
        """Write a checkpoint before anything that is given later."""
        self._add(_Checkpoint(frontier))

    def _waiting_early(self, group_id: str) -> _Early | None:
        for work in self._work:
            if isinstance(work, _Early) and work.group_id == group_id:
                return work
        return None

    def _forget_early(self, group_id: str) -> None:
        waiting = self._waiting_early(group_id)
        if waiting is not None:
            self._work.remove(waiting)

    def _add(self, work: _Early | _Whole | _Drop | _Step | _Checkpoint) -> None:
        self._work.append(work)
        if not self._busy:
            self._busy = True
            self.start(self._drain())

    async def _drain(self) -> None:
        while self._work:
            await self._do(self._next())
        self._busy = False  # not after a failure: nothing may follow it

    def _next(self) -> _Early | _Whole | _Drop | _Step | _Checkpoint:
        for index, work in enumerate(self._work):
            if not isinstance(work, _Early):
                return self._work.pop(index)
        waiting = [work for work in self._work if isinstance(work, _Early)]
        first = min(
            waiting,
            key=lambda work: len(work.episodes) + self._sent_early.get(work.group_id, 0),
        )
        episodes = first.episodes[:ATTEMPTS_AHEAD]
        del first.episodes[:ATTEMPTS_AHEAD]
        if not first.episodes:
            self._work.remove(first)
        return _Early(first.update, first.group_id, episodes)

    async def _do(self, work: _Early | _Whole | _Drop | _Step | _Checkpoint) -> None:
        match work:
            case _Early(update, group_id, episodes):
                self._sent_early[group_id] = self._sent_early.get(group_id, 0) + len(episodes)
                await self._call("accumulate_attempts", update, group_id, episodes)
            case _Whole(update, group):
                await self._call("accumulate", update, group)
            case _Drop(group_id):
                await self._call("drop", group_id)
            case _Step(update, groups):
                ids = [group.group_id for group in groups]
                metrics, adapter = await self._call("step", update, ids)
                self._sent_early.clear()
                self.on_step(metrics, groups, adapter)
            case _Checkpoint(frontier):
                await self.write_checkpoint(frontier)

    async def _call(self, method: str, *arguments: Any) -> Any:
        handle = getattr(self.trainer, method)
        return await call(handle.remote(*arguments), self.deadline_s, f"trainer {method}")
