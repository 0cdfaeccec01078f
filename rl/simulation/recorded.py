"""Durations that were recorded: of a campaign, or in a file of JSON lines.

Invariant: only attempts that ended by themselves count, so that a fault of the
infrastructure is no duration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from rl.errors import ConfigurationError, first_problem
from rl.evidence.layout import CampaignDir
from rl.values import Seconds, Section, Text

_SHAPE = 'give a campaign\'s directory, or JSON lines like {"task": "t1", "seconds": 12.5}'


class Recording(Section):
    """One line of a file: a finished attempt."""

    task: Text
    seconds: Seconds


@lru_cache(maxsize=4)
def read_recordings(source: Path) -> Sequence[Sequence[float]]:
    """Seconds of every finished attempt, one sequence per task, tasks by name.

    Raises:
        ConfigurationError: there is nothing, or something else, to read.
        EvidenceError: a campaign's trace is damaged.
    """
    rows = _of_campaign(source) if source.is_dir() else _of_file(source)
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row.seconds)
    if not by_task:
        raise ConfigurationError("holds no finished attempt", str(source), _SHAPE)
    return tuple(tuple(by_task[task]) for task in sorted(by_task))


def _of_campaign(root: Path) -> Iterator[Recording]:
    for record in CampaignDir(root).episodes("train", live=True):
        seconds = record.timings.get("total", 0.0)
        if record.outcome == "graded" and seconds > 0:
            yield Recording(task=record.task_name, seconds=seconds)


def _of_file(path: Path) -> Iterator[Recording]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise ConfigurationError(what, str(path), _SHAPE) from None
    except UnicodeDecodeError:
        raise ConfigurationError("cannot be read: no UTF-8 text", str(path), _SHAPE) from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield Recording.model_validate_json(line)
        except ValidationError as error:
            what = f"not a recording: {first_problem(error)}"
            raise ConfigurationError(what, f"{path}:{number}", _SHAPE) from None
