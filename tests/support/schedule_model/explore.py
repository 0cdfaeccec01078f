"""Every interleaving of a small campaign, and random walks through larger ones."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from tests.support.schedule_model.setting import Faults, Setting, Violation
from tests.support.schedule_model.world import Move, World

# What does not decide what happens next.  Of `_heaps`, the pool's index, the
# entries that are out of date tell how a state was reached; what the index is for
# is checked at each dispatch.  Ids can't come back, as each bears its draw and its
# driver's number.  Which draws are settled the scheduler's frontier tells, as is
# checked at each step.
FORGOTTEN = frozenset(
    {"counts", "_config", "_order", "_estimates", "_heaps", "setting", "_setting", "clock",
     "started", "used_ids", "_plan", "trained_draws", "dropped_draws", "frontier", "settled"}
)  # fmt: skip
ATOMS = frozenset({int, str, float, bool, type(None)})


def canonical(value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """A nested tuple that is equal for states that can't be told apart."""
    kind = value.__class__
    if kind in ATOMS:
        return value
    seen = {} if seen is None else seen
    if kind in (set, frozenset):
        return tuple(sorted(value))
    if kind is dict:
        keys = sorted(value)
        return (*keys, *_canonical_all([value[key] for key in keys], seen))
    if kind in (tuple, list, deque):
        return tuple(_canonical_all(value, seen))
    known = seen.get(id(value))
    if known is not None:
        return ("seen", known)
    seen[id(value)] = len(seen)
    return tuple(_canonical_all(map(value.__getattribute__, _names(kind, value)), seen))


def _canonical_all(values: Iterable[Any], seen: dict[int, int]) -> list[Hashable]:
    return [v if v.__class__ in ATOMS else canonical(v, seen) for v in values]


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(kind: type, value: Any) -> tuple[str, ...]:
    """The attributes that count; all objects of a class have the same."""
    if kind not in _NAMES:
        names = [f.name for f in fields(value)] if is_dataclass(value) else sorted(vars(value))
        _NAMES[kind] = tuple(name for name in names if name not in FORGOTTEN)
    return _NAMES[kind]


@dataclass(slots=True)
class Explored:
    """How much an exploration has seen."""

    states: int = 0
    moves: int = 0
    ends: int = 0


@dataclass(slots=True)
class _Graph:
    """The states that were found, numbered from 0, and how they follow each other.

    Attributes:
        found: number by hash of the canonical state.
        way: the state that each was first reached from, and the move.
        before: states from which each follows without a fault.
        ends: states in which the campaign is over, or every replica is gone for good.
    """

    found: dict[int, int] = field(default_factory=dict[int, int])
    way: list[tuple[int, Move | None]] = field(default_factory=list[tuple[int, Move | None]])
    before: list[list[int]] = field(default_factory=list[list[int]])
    ends: list[int] = field(default_factory=list[int])

    def add(self, world: World, state: int, move: Move | None) -> tuple[int, bool]:
        """The number of what `move` made of `state`, and whether it is new."""
        number = self.found.setdefault(hash(canonical(world)), len(self.found))
        new = number == len(self.way)
        if new:
            self.way.append((state, move))
            self.before.append([])
            if world.over or world.hopeless:
                self.ends.append(number)
        if move is not None and not move.fault:
            self.before[number].append(state)
        return number, new

    def path(self, number: int) -> str:
        """The moves that lead to a state, a line each."""
        moves: list[str] = []
        number, move = self.way[number]
        while move is not None:
            moves.append(str(move))
            number, move = self.way[number]
        return "\n".join(reversed(moves))

    def check_ends(self) -> None:
        """From every state the campaign's end can be reached without a fault."""
        reaching = set(self.ends)
        todo = list(self.ends)
        while todo:
            earlier = [state for state in self.before[todo.pop()] if state not in reaching]
            reaching.update(earlier)
            todo.extend(earlier)
        stuck = next((n for n in range(len(self.way)) if n not in reaching), None)
        if stuck is not None:
            raise Violation(f"the campaign can't come to an end after\n{self.path(stuck)}")


def explore(setting: Setting, faults: Faults, limit: int = 1_000_000) -> Explored:
    """Visit every state that can be reached; raises `Violation` with the way to a bad one."""
    start = World(setting, faults)
    graph = _Graph()
    graph.add(start, 0, None)
    queue = deque([(pickle.dumps(start), 0)])
    explored = Explored()
    while queue:
        pickled, state = queue.popleft()
        world: World = pickle.loads(pickled)
        moves = world.reduced_moves()
        explored.moves += len(moves)
        while moves:
            move = moves.pop()
            following = pickle.loads(pickled) if moves else world
            try:
                following.apply(move)
            except Exception as error:
                way = f"{graph.path(state)}\n{move}"
                raise Violation(f"{type(error).__name__}: {error}\nafter\n{way}") from error
            number, new = graph.add(following, state, move)
            if new and not following.over:
                queue.append((pickle.dumps(following), number))
        if len(graph.way) > limit:
            raise RuntimeError(f"more than {limit} states")
    graph.check_ends()
    explored.states, explored.ends = len(graph.way), len(graph.ends)
    return explored


# Many times as many moves as the longest campaign of the tests takes.
ENDLESS = 20_000


def walk(setting: Setting, faults: Faults, seed: int, fault_share: float = 0.2) -> World:
    """One random campaign up to its end."""
    rng = random.Random(seed)
    world = World(setting, faults)
    for _ in range(ENDLESS):
        if world.over or world.hopeless:
            return world
        moves = world.moves()
        usual = [move for move in moves if not move.fault]
        unusual = [move for move in moves if move.fault]
        pick = unusual if not usual or (unusual and rng.random() < fault_share) else usual
        world.clock += rng.random()
        world.apply(rng.choice(pick))
    raise Violation("the campaign does not come to an end")


def finish(world: World) -> None:
    """Let a campaign come to its end without any further fault."""
    for _ in range(ENDLESS):
        if world.over or world.hopeless:
            return
        world.apply(next(move for move in world.moves() if not move.fault))
    raise Violation("the campaign does not come to an end")
