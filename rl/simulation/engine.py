"""The replicas under virtual time: attempts that share an engine slow each other down.

Each replica is a processor-sharing queue.  With n attempts on it, every one of
them progresses at `curve(n)` seconds of work per second.  A replica keeps one
clock of the work that an attempt present throughout would have done, so an
attempt's end is fixed in that clock when it starts, and a change of n moves one
event, not n.

Invariants:
- Every attempt that was started ends once: by its work, at the episode deadline,
  by `cancel`, or by `lose`.
- The attempts on a replica differ only in their place on its work clock; one
  event per replica is pending, for whichever of them ends first.
- Starting, ending and cancelling an attempt is O(log n).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


class Agenda:
    """What happens when, in order of time; ties in order of entry.

    `now` is the time of the last entry taken, s, and never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._entered = 0

    def at(self, time: float, action: Callable[..., object], *args: Any) -> None:
        """Call `action(*args)` at `time`, s."""
        self._entered += 1
        heapq.heappush(self._heap, (time, self._entered, action, args))

    def step(self) -> None:
        """Go to the next entry and carry it out; IndexError when there is none."""
        self.now, _, action, args = heapq.heappop(self._heap)
        action(*args)


class SpeedCurve:
    """Speed per attempt by the number of attempts on a replica, piecewise linear.

    Beyond the last point it stays at the last speed.  No points: always 1.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = ()) -> None:
        self._table = [1.0, 1.0]
        for (low, fast), (high, slow) in pairwise(points):
            for n in range(low + 1, high + 1):
                self._table.append(fast + (slow - fast) * (n - low) / (high - low))

    @property
    def constant(self) -> bool:
        """Whether attempts never slow each other down."""
        return len(set(self._table)) == 1

    def __call__(self, running: int) -> float:
        """Seconds of work per second, for each of `running` attempts."""
        return self._table[min(running, len(self._table) - 1)]


@dataclass(slots=True, eq=False)
class Run:
    """An attempt on a replica.

    Attributes:
        attempt_id: its id.
        owner: whatever the caller wants to find with it.
        replica: where it runs.
        work: its length alone on a replica, deadline included, s.
        masked: whether it ends by a fault of the infrastructure.
        started: when it was started, s.
        alive: whether it still runs.
    """

    attempt_id: str
    owner: Any
    replica: int
    work: float
    masked: bool
    started: float = 0.0
    alive: bool = True


@dataclass(slots=True)
class _Replica:
    """A replica's attempts, and the one event that is pending for it."""

    clock: float = 0.0  # when `done` was brought up to date
    done: float = 0.0  # work of an attempt that was always there
    speed: float = 1.0
    running: int = 0
    by_work: list[tuple[float, int, Run]] = field(
        default_factory=list[tuple[float, int, Run]]
    )  # by the reading of `done` at which each ends; the dead are skipped when met
    by_deadline: deque[Run] = field(default_factory=deque[Run])
    pending: Run | None = None
    pending_speed: float = 0.0
    ticket: int = 0  # an event with an older one is void


class Engine:
    """See the module's invariants.

    Args:
        replicas: number of replicas.
        curve: speed by concurrency.
        deadline_s: of an episode, from its start, s; None: it takes what it takes.
        agenda: where ends are entered.
        on_end: told of every attempt that ended by its work or its deadline.
    """

    def __init__(
        self,
        replicas: int,
        curve: SpeedCurve,
        deadline_s: float | None,
        agenda: Agenda,
        on_end: Callable[[Run], None],
    ) -> None:
        self._replicas = [_Replica() for _ in range(replicas)]
        self._curve = curve
        # At constant speed an attempt's work, which its caller caps at the deadline,
        # says already when it ends.
        self._deadline_s = None if curve.constant else deadline_s
        self._agenda = agenda
        self._on_end = on_end
        self._started = 0
        self.running = 0

    def start(self, run: Run) -> None:
        """Start `run` on its replica."""
        replica = self._replicas[run.replica]
        self._change(replica, 1)
        self._started += 1
        run.started = self._agenda.now
        heapq.heappush(replica.by_work, (replica.done + run.work, self._started, run))
        if self._deadline_s is not None:
            replica.by_deadline.append(run)
        self._schedule(run.replica, replica)

    def cancel(self, run: Run) -> None:
        """End `run` now."""
        replica = self._replicas[run.replica]
        run.alive = False
        self._change(replica, -1)
        self._schedule(run.replica, replica)

    def lose(self, index: int) -> list[Run]:
        """A replica dies; returns what ran on it, oldest first."""
        replica = self._replicas[index]
        runs = [run for _, _, run in sorted(replica.by_work, key=lambda e: e[1]) if run.alive]
        for run in runs:
            run.alive = False
        self._change(replica, -len(runs))
        replica.by_work.clear()
        replica.by_deadline.clear()
        self._schedule(index, replica)
        return runs

    def _change(self, replica: _Replica, by: int) -> None:
        now = self._agenda.now
        replica.done += (now - replica.clock) * replica.speed
        replica.clock = now
        replica.running += by
        replica.speed = self._curve(replica.running)
        self.running += by

    def _schedule(self, index: int, replica: _Replica) -> None:
        """Keep the event of whichever attempt ends first, and no other, in the agenda."""
        first, end = self._first(replica)
        if first is replica.pending and replica.speed == replica.pending_speed:
            return
        replica.pending, replica.pending_speed = first, replica.speed
        replica.ticket += 1
        if first is not None:
            self._agenda.at(max(end, self._agenda.now), self._fire, index, replica.ticket)

    def _first(self, replica: _Replica) -> tuple[Run | None, float]:
        """The attempt that ends first as things are, and when, s."""
        by_work, by_deadline = replica.by_work, replica.by_deadline
        while by_work and not by_work[0][2].alive:
            heapq.heappop(by_work)
        while by_deadline and not by_deadline[0].alive:
            by_deadline.popleft()
        if not by_work:
            return None, 0.0
        ends, _, first = by_work[0]
        end = replica.clock + (ends - replica.done) / replica.speed
        if by_deadline and self._deadline_s is not None:
            cut = by_deadline[0].started + self._deadline_s
            if cut < end:
                return by_deadline[0], cut
        return first, end

    def _fire(self, index: int, ticket: int) -> None:
        replica = self._replicas[index]
        if ticket != replica.ticket or replica.pending is None:
            return
        run, replica.pending = replica.pending, None
        if self._deadline_s is not None and self._agenda.now >= run.started + self._deadline_s:
            run.masked = False  # it was out of time before its fault struck
        self.cancel(run)
        self._on_end(run)
