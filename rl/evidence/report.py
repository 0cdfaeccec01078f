"""The report: one self-contained page about one campaign.

Invariants:
- The page needs no network and no script; its own policy forbids both.
- Whatever a model, a task or a tool wrote is escaped, and its control
  characters are shown as symbols, never sent to the browser.
- It can be made at any moment of a campaign; it says what is missing.
- Every number on it comes from `Evidence` or `Summary`, none from a cache.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rl.evidence import charts
from rl.evidence.events import PUBLISH, STAGE
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM
from rl.evidence.stats import EXACT_TASKS, SIGNIFICANCE, ArmSummary
from rl.evidence.summary import (
    Evidence,
    RewardEnd,
    Summary,
    load_evidence,
    p_text,
    percent,
    summarize,
)
from rl.files import write_bytes
from rl.records import EpisodeRecord

_TEXT_LIMIT: Final = 4_000  # characters of one output on the page; the trace has it all
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_EPISODE_STAGES: Final = ("create", "agent", "verify", "stop", "total")


@dataclass(frozen=True, slots=True)
class Example:
    """One episode shown on the page."""

    title: str
    solved: bool
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class Stage:
    """How long the campaign spent in a stage."""

    name: str
    seconds: float
    share: float


def write_report(directory: CampaignDir, out: Path | None = None) -> Path:
    """Make the page of a campaign and write it durably; returns its path.

    Raises:
        EvidenceError: the campaign was never frozen, or a file is damaged.
        InfrastructureError: the page can't be written.
    """
    target = out or directory.report
    evidence = load_evidence(directory)
    write_bytes(target, render(evidence, summarize(evidence)).encode())
    return target


def render(evidence: Evidence, summary: Summary) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=visible,
        percent=percent,
        points=points_text,
        duration=duration,
        when=when,
        number=number,
    )
    return environment.get_template("report.html.j2").render(
        e=evidence,
        s=summary,
        p_text=p_text,
        exact_tasks=EXACT_TASKS,
        few_tasks=_too_few_tasks(summary),
        arm_chart=_arm_chart(summary),
        reward_chart=_reward_chart(evidence, summary),
        eval_chart=_eval_chart(summary),
        seconds_chart=_seconds_chart(evidence),
        staleness_chart=_staleness_chart(summary),
        stages=_stages(evidence),
        publishes=_publish_seconds(evidence),
        median=statistics.median,
        episode_seconds=_episode_seconds(evidence.train),
        failures=_failures([*evidence.train, *evidence.heldout]),
        stops=_stop_reasons(evidence.train),
        examples=_examples(evidence),
        settings=flatten(evidence.frozen.config),
        made_at=time.time(),
    )


def visible(text: str, limit: int = _TEXT_LIMIT) -> str:
    """Text with control and invisible characters as symbols, cut to `limit`."""
    cut = text if len(text) <= limit else f"{text[:limit]}\n[... {len(text) - limit} more]"
    return _HIDDEN.sub(_symbol, cut.replace("\r\n", "\n"))


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20 or code == 0x7F:
        return f"^{chr(code ^ 0x40)}"  # as terminals and `cat -v` write it: ESC is ^[
    return f"<U+{code:04X}>"


def points_text(share: float) -> str:
    """A difference of shares in percentage points, signed."""
    return f"{share * 100:+.0f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Seconds for people: 0.42 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def when(moment: float) -> str:
    """A unix time as UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without needless exponents."""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}") if "e" not in text else text


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values of a configuration."""
    if isinstance(value, dict) and value:
        return [row for key, child in value.items() for row in flatten(child, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), "not set" if value is None else str(value))]


def _too_few_tasks(summary: Summary) -> bool:
    """Whether no outcome at all could be significant: 2 of 2**n patterns are extreme."""
    return summary.heldout is not None and 2.0 ** (1 - len(summary.heldout.tasks)) >= SIGNIFICANCE


def _arm_chart(summary: Summary) -> Markup | None:
    if summary.heldout is None:
        return None
    rows = [_range(summary.heldout.base, "base"), _range(summary.heldout.final, "final")]
    return charts.ranges(rows, label="Held-out pass rate of base and final weights")


def _range(arm: ArmSummary, kind: str) -> charts.Range:
    low, high = arm.interval.low, arm.interval.high
    text = (
        f"{arm.arm}: {arm.solved} of {arm.attempts} solved, {percent(arm.pass_rate)}, "
        f"95% interval {percent(low)} to {percent(high)}"
    )
    return charts.Range(arm.arm, kind, arm.pass_rate, low, high, text)


def _reward_chart(evidence: Evidence, summary: Summary) -> Markup | None:
    """Mean reward by update, with a band of one standard error."""
    if not evidence.metrics:
        return None
    points: list[charts.Point] = []
    for row in evidence.metrics:
        error = row.reward_std / math.sqrt(max(1, row.episodes))
        title = f"update {row.update}: mean reward {row.reward_mean:.3f}, {row.episodes} episodes"
        low, high = row.reward_mean - error, row.reward_mean + error
        points.append(charts.Point(row.update, row.reward_mean, max(0.0, low), high, title))
    updates = [point.x for point in points]
    levels = [
        _level(end, updates[:count] if start else updates[-count:])
        for end, start in ((summary.reward_first, True), (summary.reward_last, False))
        if end is not None and (count := end.updates)
    ]
    return charts.curve(
        points,
        levels,
        label="Mean training reward by update",
        x_axis="update",
        y_axis="mean reward",
    )


def _eval_chart(summary: Summary) -> Markup | None:
    """Held-out pass rate of the versions that were evaluated during training."""
    if not summary.evals:
        return None
    points = [
        charts.Point(
            arm.version,
            arm.pass_rate,
            arm.interval.low,
            arm.interval.high,
            f"version {arm.version}: {arm.solved} of {arm.attempts} solved, "
            f"{percent(arm.pass_rate)}, 95% interval {percent(arm.interval.low)} to "
            f"{percent(arm.interval.high)}",
        )
        for arm in summary.evals
    ]
    label = "Held-out pass rate of versions evaluated during training"
    return charts.curve(points, [], label=label, x_axis="version", y_axis="pass rate")


def _level(end: RewardEnd, updates: Sequence[int]) -> charts.Level:
    title = f"mean of updates {updates[0]} to {updates[-1]}: {end.mean:.3f}"
    return charts.Level(updates[0], updates[-1], end.mean, title)


def _seconds_chart(evidence: Evidence) -> Markup | None:
    if not evidence.metrics:
        return None
    rows = [
        charts.Bar(str(row.update), row.seconds, f"update {row.update}: {duration(row.seconds)}")
        for row in evidence.metrics
    ]
    return charts.bars(rows, label="Seconds by update", x_axis="update", y_axis="seconds")


def _staleness_chart(summary: Summary) -> Markup | None:
    if not summary.staleness:
        return None
    rows = [
        charts.Bar(str(age), count, f"staleness {age}: {count} episodes")
        for age, count in summary.staleness.items()
    ]
    return charts.bars(
        rows,
        label="Trained episodes by staleness",
        x_axis="staleness in updates",
        y_axis="episodes",
    )


def _stages(evidence: Evidence) -> list[Stage]:
    """Time spent by stage; the last one lasts until the last event."""
    events = evidence.events
    marks = [(e.time, str(e.fields.get("stage"))) for e in events if e.kind == STAGE]
    if not marks:
        return []
    ends = [moment for moment, _ in marks[1:]] + [max(e.time for e in events)]
    spent: dict[str, float] = defaultdict(float)
    for (start, name), end in zip(marks, ends, strict=True):
        spent[name] += max(0.0, end - start)
    total = math.fsum(spent.values()) or 1.0
    return [Stage(name, seconds, seconds / total) for name, seconds in spent.items() if seconds]


def _publish_seconds(evidence: Evidence) -> list[float]:
    seconds = [e.fields.get("seconds") for e in evidence.events if e.kind == PUBLISH]
    return [float(value) for value in seconds if isinstance(value, int | float)]


def _episode_seconds(records: Sequence[EpisodeRecord]) -> list[tuple[str, float, float]]:
    """Median and slowest seconds of each stage of a graded episode."""
    rows: list[tuple[str, float, float]] = []
    for stage in _EPISODE_STAGES:
        values = [r.timings[stage] for r in records if r.outcome == "graded" and stage in r.timings]
        if values:
            rows.append((stage, statistics.median(values), max(values)))
    return rows


def _failures(records: Sequence[EpisodeRecord]) -> list[tuple[str, int, str]]:
    """Why attempts were masked: kind, count, one message of it."""
    failed = [record.failure for record in records if record.failure is not None]
    counts = Counter(failure.kind for failure in failed)
    samples = {failure.kind: failure.message for failure in reversed(failed)}
    return [(kind, count, samples[kind]) for kind, count in counts.most_common()]


def _stop_reasons(records: Sequence[EpisodeRecord]) -> list[tuple[str, int]]:
    return Counter(r.stop_reason for r in records if r.outcome == "graded").most_common()


def _examples(evidence: Evidence) -> list[Example]:
    """A solved and a failed held-out episode of each arm, as far as there are any."""
    arms = [BASE_ARM, *([evidence.final_arm] if evidence.final_arm else [])]
    return [
        Example(f"{arm}, {'solved' if won else 'failed'}", won, record)
        for arm in arms
        for won in (True, False)
        if (record := evidence.examples.get((arm, won))) is not None
    ]
