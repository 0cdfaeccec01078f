"""What a checkpoint keeps of a scheduler."""

from __future__ import annotations

from typing import TypedDict


class Frontier(TypedDict):
    """Ready for JSON.

    Keys:
        updates_done: updates that are finished.
        next_draw: first draw that has never been admitted.
        redraw: draws that were admitted and not trained on.
        durations: what is known of the tasks' durations.
    """

    updates_done: int
    next_draw: int
    redraw: list[int]
    durations: dict[str, tuple[int, float]]


FRESH = Frontier(updates_done=0, next_draw=0, redraw=[], durations={})
