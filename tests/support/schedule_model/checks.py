"""What the scheduler says of itself, and refuses, between any two events."""

from __future__ import annotations

from collections.abc import Callable

from rl.errors import StalenessViolation
from rl.schedule.scheduler import Scheduler
from tests.support.schedule_model.books import Books
from tests.support.schedule_model.fleet import Fleet
from tests.support.schedule_model.setting import Setting, Violation, require


def check_scheduler(scheduler: Scheduler, setting: Setting, books: Books, fleet: Fleet) -> None:
    """Hold a scheduler that has just been polled against the books."""
    require(scheduler.in_flight == books.running, "the scheduler knows what runs")
    require(scheduler.streamed_groups == len(books.placed), "and what is in the batch")
    require(scheduler.training == books.stepping, "and whether the trainer is busy")
    done = books.finished == setting.config.updates
    require(scheduler.done == done, "and it is done when every update is made")
    idle = done and not books.evals.open
    require(scheduler.idle == idle, "and idle when every evaluation is over, too")
    _check_frontier(scheduler, books)
    _check_idle_slots(setting, books, fleet)
    _check_refusals(scheduler, books)


def _check_frontier(scheduler: Scheduler, books: Books) -> None:
    frontier = scheduler.frontier()
    settled = books.trained_draws | books.dropped_draws
    owed = sorted(set(range(frontier["next_draw"])) - settled)
    require(frontier["redraw"] == owed, "no draw is lost, and none is trained again")
    require(frontier["updates_done"] == books.finished, "finished updates are kept")


def _check_idle_slots(setting: Setting, books: Books, fleet: Fleet) -> None:
    if books.running == setting.slots:
        return
    for version, book in books.evals.open.items():
        idle = book.owed and fleet.eligible(version)
        require(not idle, f"version {version} waits for its evaluation, so no slot is idle")
    for group_id, group in books.groups.items():
        idle = group.owed and fleet.eligible(group.version)
        require(not idle, f"{group_id} is owed an attempt, so no slot is idle")
    current = books.current
    if current is not None and fleet.eligible(current):
        due = books.due(current)
        idle = due >= books.forming and books.room(due) > 0
        require(not idle, "a group could be admitted, so no slot is idle")


def _check_refusals(scheduler: Scheduler, books: Books) -> None:
    forming = books.forming
    _refused(
        lambda: scheduler.version_current(forming, {}),
        f"version {forming} is not current before its update",
    )
    wrong = forming + 1 if books.stepping else forming
    _refused(
        lambda: scheduler.update_finished(wrong),
        f"update {wrong} does not finish before it starts",
    )


def _refused(event: Callable[[], None], rule: str) -> None:
    try:
        event()
    except StalenessViolation:
        return
    raise Violation(rule)
