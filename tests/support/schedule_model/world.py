"""The outside world of one campaign: workers, trainer, broadcaster, crashes.

A `World` offers the moves that can happen next and carries out the one that a
test chooses, as `actors.training` would: the event goes to the scheduler, then
every command of a poll is obeyed.  `Books` and `Fleet` check each step.

NOTE: in two points the model's loop is more careful than `actors.training` is. It
does not publish a version that is current already, and it knows by its generation
whether a replica's failed load is news, so that news may come in any order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from rl.records import Outcome
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
from rl.schedule.scheduler import FRESH, Frontier
from tests.support.schedule_model.books import Books, Settled
from tests.support.schedule_model.checks import check_scheduler
from tests.support.schedule_model.fleet import Fleet
from tests.support.schedule_model.setting import DrawOrder, Faults, Setting, Violation, require

Kind = Literal[
    "grade", "mask", "cancelled", "train", "save", "begin", "load", "load fails", "hear",
    "tell", "rejoin", "rejoined", "rejoin fails", "back", "alive",
    "lose", "suspect", "crash",
]  # fmt: skip


@dataclass(frozen=True)
class Move:
    """Something that can happen next.

    Attributes:
        of: the replica or the attempt concerned, or the position of the news.
        fault: whether it need not ever happen.
    """

    kind: Kind
    of: int | str = 0
    reward: float = 0.0
    fault: bool = False


@dataclass(frozen=True)
class Running:
    """An attempt that a worker runs."""

    group_id: str
    replica: int
    life: int


@dataclass(frozen=True)
class Checkpoint:
    """What a resume starts from.

    Attributes:
        owes: what of the frontier decides what happens next: updates and draws.
    """

    frontier: Frontier
    settled: Settled
    owes: tuple[int, int, tuple[int, ...]] = (0, 0, ())


class World:
    """A campaign under way; see the module."""

    def __init__(self, setting: Setting, faults: Faults) -> None:
        self.setting = setting
        self.faults = replace(faults)
        self.clock = 0.0
        self.incarnation = -1
        self.saved = Checkpoint(FRESH, Settled())
        self.books = Books(setting, 0, Settled(), set())
        self._start()

    def _start(self) -> None:
        """A driver starts from what was saved last; replicas are up and empty."""
        setting, machines = self.setting, self.setting.machines
        frontier = self.saved.frontier
        self.incarnation += 1
        self.books = self.books.resumed(frontier["updates_done"], self.saved.settled)
        self.scheduler = machines.scheduler(
            setting.config,
            DrawOrder(),
            slots=setting.slots,
            replicas=setting.replicas,
            incarnation=self.incarnation,
            frontier=frontier,
            evals=self.books.evals.plan(),
        )
        self.fleet = Fleet(machines.ledger(setting.replicas), setting.replicas)
        self.running: dict[str, Running] = {}
        self.evaluating: dict[str, Running] = {}
        self.trained = frontier["updates_done"]  # the trainer's version
        self.unsaved: Checkpoint | None = None
        self.wanted = self.trained < setting.config.updates  # whether to publish it
        self._obey()

    # ---- what can happen ------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the campaign is at its end."""
        return self.scheduler.idle and self.unsaved is None

    @property
    def hopeless(self) -> bool:
        """Whether every replica is down for good."""
        return not self.fleet.back and all(r.down and not r.restart for r in self.fleet.replicas)

    def moves(self) -> list[Move]:
        """Everything that can happen next."""
        return [*self._worker_moves(), *self._shell_moves(), *self._fault_moves()]

    def reduced_moves(self) -> list[Move]:
        """Enough of the moves for every outcome of the campaign to be reached.

        Left out are all but one of the moves that differ only in an attempt's name,
        and the results of loads out of turn: they count together, and a load that is
        waited for can only have more happen to it.
        """
        turn = min(self.fleet.loading, default=0)
        reduced: dict[object, Move] = {}
        for move in self.moves():
            key: object = move
            if move.of in self.evaluating:
                book = next(b for b in self.books.evals.open.values() if move.of in b.running)
                key = (move.kind, self.evaluating[str(move.of)], book.running[str(move.of)])
            elif move.kind in ("grade", "mask", "cancelled"):
                attempt = self.running[str(move.of)]
                cancelled = move.of in self.books.groups[attempt.group_id].cancelled
                key = (move.kind, move.reward, attempt, cancelled)
            elif move.kind in ("load", "load fails") and move.of != turn:
                continue
            reduced.setdefault(key, move)
        return list(reduced.values())

    def _worker_moves(self) -> list[Move]:
        moves: list[Move] = []
        for attempt_id, attempt in sorted(self.running.items()):
            cancelled = attempt_id in self.books.groups[attempt.group_id].cancelled
            moves.extend(Move("grade", attempt_id, reward) for reward in self.setting.rewards)
            orphan = attempt.life != self.fleet.replicas[attempt.replica].life
            if orphan or self.faults.masks:
                moves.append(Move("mask", attempt_id, fault=not orphan))
            if cancelled or self.faults.cancels:
                moves.append(Move("cancelled", attempt_id, fault=not cancelled))
        for attempt_id, attempt in sorted(self.evaluating.items()):
            moves.append(Move("grade", attempt_id, self.setting.rewards[0]))
            orphan = attempt.life != self.fleet.replicas[attempt.replica].life
            if orphan or self.faults.masks:
                moves.append(Move("mask", attempt_id, fault=not orphan))
            if self.faults.cancels:
                moves.append(Move("cancelled", attempt_id, fault=True))
        return moves

    def _shell_moves(self) -> list[Move]:
        fleet = self.fleet
        moves: list[Move] = []
        if self.unsaved is not None:
            moves.append(Move("save"))
        elif self.books.stepping:
            moves.append(Move("train"))
        if self._publishable:
            moves.append(Move("begin"))
        for index, generation in fleet.loading.items():
            moves.append(Move("load", index))
            moves.extend(self._failure("load fails", index, generation))
        if fleet.published:
            moves.append(Move("hear"))
        moves.extend(Move("back", position) for position in range(len(fleet.back)))
        for index, replica in enumerate(fleet.replicas):
            if replica.restart == "tell":
                moves.append(Move("tell", index))
            elif replica.restart == "rejoin" and not fleet.locked:
                moves.append(Move("rejoin", index))
            if replica.suspended:
                moves.append(Move("alive", index))
        if fleet.rejoining is not None:
            moves.append(Move("rejoined"))
            moves.extend(self._failure("rejoin fails", *fleet.rejoining))
        return moves

    @property
    def _publishable(self) -> bool:
        """Whether the trainer's version is not current yet, and somebody can load it."""
        fleet = self.fleet
        newer = fleet.current is None or self.trained > fleet.current
        up = not all(replica.down for replica in fleet.replicas)
        return self.wanted and newer and up and not fleet.locked

    def _failure(self, kind: Kind, replica: int, generation: int) -> list[Move]:
        """A load fails for no reason, or because the replica was lost since it began."""
        orphan = generation != self.fleet.replicas[replica].life
        if orphan or self.faults.failed_loads:
            return [Move(kind, replica, fault=not orphan)]
        return []

    def _fault_moves(self) -> list[Move]:
        moves: list[Move] = []
        for index, replica in enumerate(self.fleet.replicas):
            if self.faults.losses and (not replica.down or replica.restart == "loading"):
                moves.append(Move("lose", index, fault=True))
            if self.faults.suspicions and not replica.down and not replica.suspended:
                moves.append(Move("suspect", index, fault=True))
        if self.faults.drivers:
            moves.append(Move("crash", fault=True))
        return moves

    # ---- what happens ---------------------------------------------------

    def apply(self, move: Move) -> None:
        """Let `move` happen, and check what comes of it."""
        match move.kind:
            case "grade" | "mask" | "cancelled":
                self._end(move)
            case "train":
                self._train()
            case "save":
                assert self.unsaved is not None
                self.saved, self.unsaved = self.unsaved, None
            case "lose":
                self.faults.losses -= 1
                self._lose(int(move.of))
            case "suspect":
                self.faults.suspicions -= 1
                self.fleet.replicas[int(move.of)].suspended = True
                self.scheduler.suspend_replica(int(move.of))
            case "alive":
                self.fleet.replicas[int(move.of)].suspended = False
                self.scheduler.resume_replica(int(move.of))
            case "crash":
                self.faults.drivers -= 1
                self._start()
                return
            case _:
                self._broadcast(move)
        self._obey()

    def _end(self, move: Move) -> None:
        attempt_id = str(move.of)
        evaluated = attempt_id in self.evaluating
        attempt = (self.evaluating if evaluated else self.running).pop(attempt_id)
        outcome: Outcome = "graded"
        if move.kind == "mask":
            self.faults.masks -= move.fault
            outcome = "masked"
        elif move.kind == "cancelled":
            self.faults.cancels -= move.fault
            outcome = "cancelled"
        reward = move.reward if outcome == "graded" else None
        if evaluated:
            self.books.evals.ended(attempt_id, outcome)
        else:
            self.books.ended(attempt.group_id, attempt_id, outcome, move.reward)
        self.scheduler.attempt_finished(attempt_id, outcome, reward, self.clock)
        try:
            self.scheduler.attempt_finished(attempt_id, outcome, reward, self.clock)
        except (KeyError, ValueError):
            return
        raise Violation(f"{attempt_id} has one terminal event")

    def _train(self) -> None:
        update = self.books.forming
        self.books.update_finished()
        self.trained = update
        self.scheduler.update_finished(update)
        self.wanted = not self.scheduler.done
        frontier: Frontier = json.loads(json.dumps(self.scheduler.frontier()))
        settled = Settled(frozenset(self.books.trained_draws), frozenset(self.books.dropped_draws))
        owes = (update, frontier["next_draw"], tuple(frontier["redraw"]))
        if self.faults.drivers:  # without a crash to come nothing is read back
            self.unsaved = Checkpoint(frontier, settled, owes)

    def _broadcast(self, move: Move) -> None:
        """Steps of the broadcaster's shell, and its news."""
        fleet = self.fleet
        match move.kind:
            case "begin":
                self.wanted = False
                fleet.begin(self.trained)
            case "load":
                fleet.loaded(int(move.of), True)
            case "load fails":
                self.faults.failed_loads -= move.fault
                fleet.loaded(int(move.of), False)
            case "hear":
                self._published()
            case "tell":
                fleet.tell(int(move.of))
            case "rejoin":
                if not fleet.rejoin(int(move.of)):
                    self._lose(int(move.of))
            case "rejoined" | "rejoin fails":
                self.faults.failed_loads -= move.fault
                self._rejoined(move.kind == "rejoined")
            case "back":
                self._back(int(move.of))
            case _:
                raise ValueError(move.kind)

    def _rejoined(self, proven: bool) -> None:
        assert self.fleet.rejoining is not None
        index = self.fleet.rejoining[0]
        accepted = self.fleet.rejoined(proven)
        replica = self.fleet.replicas[index]
        if replica.restart == "loading":
            replica.restart = ""
            if not accepted:
                self._lose(index)

    def _published(self) -> None:
        news = self.fleet.published.pop(0)
        for index, generation in news.failed.items():
            if generation == self.fleet.replicas[index].life:  # else it is known to be lost
                self._lose(index)
        if not news.serving:
            self.wanted = True
            return
        self.books.version_current(news.version)
        self.scheduler.version_current(news.version, news.serving)
        self.fleet.hear(news.version, news.serving)

    def _back(self, position: int) -> None:
        news = self.fleet.back.pop(position)
        replica = self.fleet.replicas[news.replica]
        self.scheduler.replica_back(news.replica, news.version, news.generation)
        if news.generation == replica.life:
            replica.down = False
            current = self.books.current
            if news.version in self.books.offered or current is None or news.version >= current:
                self.fleet.hear(news.version, {news.replica: news.generation})

    def _lose(self, index: int) -> None:
        replica = self.fleet.replicas[index]
        generation = self.scheduler.replica_lost(index)
        require(generation > replica.life, "a lost replica's generation rises")
        replica.life = generation
        replica.known = set()
        replica.suspended = False
        replica.down = True
        replica.restart = ""
        if self.faults.restarts:
            self.faults.restarts -= 1
            replica.restart = "tell"

    # ---- commands and checks --------------------------------------------

    def _obey(self) -> None:
        """Poll, as the training loop does after every event."""
        served = self.fleet.served()
        if self.books.current in served:
            for version in self.books.offered - served:
                self.books.stranded(version)
        for command in self.scheduler.poll(self.clock):
            self._execute(command)
        require(self.scheduler.poll(self.clock) == [], "a second poll yields nothing new")
        self._check()

    def _execute(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._dispatch(command)
            case DispatchEval():
                self._dispatch_eval(command)
            case EvalOver():
                self.books.evals.over(command)
            case CancelAttempt():
                self.books.cancel(command)
            case StreamAttempt():
                self.books.stream_attempt(command)
            case StreamGroup():
                self.books.stream_group(command)
            case StepUpdate():
                self.books.step(command)
            case DropGroup():
                self.books.drop(command)
            case RetireVersion(version):
                self.books.retire(command)
                for replica in self.fleet.replicas:
                    replica.known.discard(version)
                self.fleet.retire(version)

    def _load(self, index: int) -> int:
        attempts = [*self.running.values(), *self.evaluating.values()]
        return sum(attempt.replica == index for attempt in attempts)

    def _place(self, command: Dispatch | DispatchEval) -> None:
        index = command.replica
        eligible = self.fleet.eligible(command.version)
        require(index in eligible, f"replica {index} can run {command.attempt_id}")
        require(
            self._load(index) == min(self._load(other) for other in eligible),
            f"{command.attempt_id} goes to a least loaded replica",
        )

    def _dispatch_eval(self, command: DispatchEval) -> None:
        self._place(command)
        self.books.dispatch_eval(command)
        life = self.fleet.replicas[command.replica].life
        self.evaluating[command.attempt_id] = Running("", command.replica, life)

    def _dispatch(self, command: Dispatch) -> None:
        index = command.replica
        self._place(command)
        self.books.dispatch(command)
        life = self.fleet.replicas[index].life
        self.running[command.attempt_id] = Running(command.group_id, index, life)

    def _check(self) -> None:
        self.books.check()
        self.fleet.check()
        check_scheduler(self.scheduler, self.setting, self.books, self.fleet)
        if not self.scheduler.idle and not any(not move.fault for move in self.moves()):
            require(self.hopeless, "something can still happen until the campaign is done")
