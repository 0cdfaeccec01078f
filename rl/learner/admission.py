"""What may be trained on: the staleness bound, as the learner holds it.

Invariant: whoever calls these before any arithmetic never trains on an episode staler
than the bound, on one of another version than its group's, or on one twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rl.errors import EvidenceError, StalenessViolation
from rl.records import EpisodeRecord


def check_next(version: int, update: int, action: str) -> None:
    """Raise `StalenessViolation` unless `update` is the one after `version`."""
    if update != version + 1:
        raise StalenessViolation(
            f"{action} for update {update}, but version {version} comes before "
            f"update {version + 1}",
            "learner",
        )


def staleness_of(
    update: int, group_id: str, version: int, episodes: Sequence[EpisodeRecord], bound: int
) -> int:
    """The staleness of a group of `version`, if these of its episodes may be trained on.

    Raises:
        StalenessViolation: a version beyond the bound, from the future, or mixed.
        EvidenceError: an attempt twice.
    """
    where = f"update {update}, group {group_id}"
    staleness = (update - 1) - version
    if not 0 <= staleness <= bound:
        raise StalenessViolation(
            f"version {version} is {staleness} updates stale, the bound is {bound}", where
        )
    mixed = sorted({episode.version for episode in episodes} - {version})
    if mixed:
        raise StalenessViolation(f"group of version {version} holds episodes of {mixed}", where)
    times = Counter(episode.attempt_id for episode in episodes)
    repeated = sorted(attempt for attempt, count in times.items() if count > 1)
    if repeated:
        raise EvidenceError(f"attempts {repeated} occur more than once", where)
    return staleness
