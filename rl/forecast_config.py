"""How long the parts of a campaign take, for a forecast: assumed, or recorded.

Invariants:
- Every value is a range, low to high, and the file says where its values come from.
- What is recorded of a run was measured: its range is the one that the run itself showed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic import Field, model_validator

from rl.config_file import load_config
from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.events import PUBLISH, STAGE, Event, read_events
from rl.evidence.layout import CampaignDir
from rl.simulation.recorded import read_recordings
from rl.values import Amount, Fraction, Positive, Section, Share, Text

SHIPPED: Final = Path("configs/forecast")
_LOW, _HIGH = 0.1, 0.9  # quantiles of what was recorded


class Range(Section):
    """A value that is not known exactly."""

    low: Amount = Field(description="little is less than this")
    likely: Amount = Field(description="the best guess, or the median of what was recorded")
    high: Amount = Field(description="little is more than this")

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if not self.low <= self.likely <= self.high:
            raise ValueError("low, likely and high are in this order")
        return self

    @staticmethod
    def of(values: Sequence[float]) -> Range:
        """The range of recorded values."""
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return Range(low=at(_LOW), likely=at(0.5), high=at(_HIGH))


class StageTimes(Section):
    """What is not simulated: stages of a campaign, s."""

    prepare: Range = Field(description="model and task packages, once they are downloaded")
    gate_each: Range = Field(description="gates, per task, over all that run at once")
    start: Range = Field(description="from the first actor to the first attempt")
    verify: Range = Field(description="loading the last checkpoint afresh")
    load_arm: Range = Field(description="loading and proving an arm for the evaluation")
    report: Range = Field(description="audit and report")


class Durations(Section):
    """What a forecast goes by."""

    as_of: date = Field(description="the day on which the values were put down")
    source: Text = Field(description="where they come from, and for what hardware and model")
    measured: bool = Field(description="whether they were measured, not assumed")
    attempt: Range = Field(
        description="mean time of an attempt, alone on a replica: sandbox, turns, verifier, s"
    )
    attempt_spread: Range = Field(description="standard deviation of that over its mean")
    task_share: Share = Field(
        description="share of the variance of log(duration) that lies between tasks"
    )
    speed: tuple[tuple[Positive, Fraction], ...] = Field(
        default=(),
        description="pairs (attempts on a replica, speed of each), from (1, 1.0) on; empty: "
        "attempts never slow each other down",
    )
    trainer_episode: Range = Field(description="the trainer's time for one episode, s")
    publish: Range = Field(description="from a step to its version being served, s")
    masked: Range = Field(description="share of attempts that infrastructure ends")
    stages: StageTimes = Field(description="what is not simulated")

    @model_validator(mode="after")
    def _speed_falls(self) -> Durations:
        if self.speed and self.speed[0] != (1, 1.0):
            raise ValueError("speed begins with (1, 1.0)")
        if any(b[0] <= a[0] or b[1] > a[1] for a, b in pairwise(self.speed)):
            raise ValueError("speed goes on in rising attempts and never rises itself")
        if self.masked.high > 1:
            raise ValueError("masked is a share, at most 1")
        return self


def load_durations(source: Path) -> tuple[Durations, Path | None]:
    """Durations of a file, or of a campaign's directory.

    Returns:
        The durations, and the campaign whose attempts are drawn from, if it was one.

    Raises:
        ConfigurationError: there is nothing to read, or it is wrong.
        EvidenceError: a campaign's evidence is damaged.
    """
    if source.is_dir():
        return recorded_durations(source), source
    return load_config(source, model=Durations), None


def recorded_durations(root: Path) -> Durations:
    """What a campaign's own evidence says of its durations.

    Raises:
        ConfigurationError: it has not trained, or not evaluated, or stopped in between.
        EvidenceError: its evidence is damaged.
    """
    directory = CampaignDir(root)
    events = read_events(directory.events, live=True)
    spans = _stage_spans(events)
    lacking = {"start", "train", "heldout"} - spans.keys()
    updates = directory.metrics_rows().read(live=True)
    if lacking or not updates:
        raise ConfigurationError(
            f"it did not get through {', '.join(sorted(lacking)) or 'an update'}",
            str(root),
            "record a campaign that ran to its end, or name a file of durations",
        )
    seconds = [one for task in read_recordings(root) for one in task]
    mean = sum(seconds) / len(seconds)
    spread = (sum((one - mean) ** 2 for one in seconds) / len(seconds)) ** 0.5 / mean
    outcomes = [record.outcome for record in directory.episodes("train", live=True)]
    gates = max(1, _gated(directory))
    exact = {name: _exact(spans.get(name, 0.0)) for name in ("start", "checkpoint", "report")}
    return Durations(
        as_of=date.fromtimestamp(events[-1].time),
        source=f"recorded by {directory.run_id}",
        measured=True,
        attempt=_exact(mean),
        attempt_spread=_exact(spread),
        task_share=0.0,  # not asked: attempts are drawn from the recording itself
        trainer_episode=Range.of([row.seconds / max(1, row.episodes) for row in updates]),
        publish=Range.of([float(str(e.fields["seconds"])) for e in events if e.kind == PUBLISH]),
        masked=_exact(outcomes.count("masked") / len(outcomes)),
        stages=StageTimes(
            prepare=_exact(0.0),
            gate_each=_exact(spans.get("gates", 0.0) / gates),
            start=exact["start"],
            verify=exact["checkpoint"],
            load_arm=_exact(0.0),
            report=exact["report"],
        ),
    )


def _exact(value: float) -> Range:
    return Range(low=value, likely=value, high=value)


def _stage_spans(events: Sequence[Event]) -> dict[str, float]:
    """Seconds that each stage took; of one that was entered twice, the last time."""
    stages = [(event.time, str(event.fields["stage"])) for event in events if event.kind == STAGE]
    return {name: after - at for (at, name), (after, _) in pairwise(stages)}


def _gated(directory: CampaignDir) -> int:
    """How many tasks were gated in this very run."""
    try:
        gates: Any = json.loads(directory.gates.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvidenceError(f"cannot be read: {error}", str(directory.gates)) from error
    return sum(not gate["reused"] for gate in gates["gates"])
