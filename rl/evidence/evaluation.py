"""What an evaluation's directory says: arms, tasks, comparison, telemetry.

Invariants:
- Every number is derived from the traces and events, none from a summary file.
- Each trained arm is compared with base over the tasks that both attempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field

from rl.evidence.events import COUNTERS, STAGE, STAGE_DONE, Event, read_events
from rl.evidence.frozen import Frozen, RunKind, load_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM, Arms, Audit
from rl.evidence.stats import (
    ArmSummary,
    HeldoutComparison,
    TaskRate,
    compare_arms,
    summarize_arm,
    task_rates,
)
from rl.evidence.summary import p_text, percent, read_json
from rl.evidence.telemetry import Telemetry, telemetry
from rl.records import EpisodeRecord, Record


class EvaluationSummary(Record):
    """The numbers of an evaluation: its summary.json."""

    run_id: str
    kind: RunKind
    source: str = Field(description="the run that the weights are of, if another")
    created_at: float
    finished: bool
    attempts_planned: int
    outcomes: dict[str, int] = Field(description="attempts by outcome")
    arms: list[ArmSummary]
    comparisons: list[HeldoutComparison] = Field(description="each trained arm against base")
    tasks: dict[str, list[TaskRate]] = Field(description="per-task pass rates by arm")
    telemetry: Telemetry
    seconds: float | None = Field(description="first event to last, s")
    audit_findings: int | None = Field(description="None before the audit")


def summarize_evaluation(directory: CampaignDir) -> EvaluationSummary:
    """The numbers of the evaluation in `directory`, whatever it holds so far.

    Raises:
        EvidenceError: it was never frozen, or is damaged.
    """
    frozen = load_frozen(directory)
    events = read_events(directory.events, live=True)
    records = [
        record.model_copy(update={"samples": []})
        for record in directory.episodes("heldout", live=True)
    ]
    audit = read_json(directory.audit, Audit)
    times = [event.time for event in events]
    return EvaluationSummary(
        run_id=frozen.run_id,
        kind=frozen.kind,
        source=frozen.source,
        created_at=frozen.created_at,
        finished=any(e.kind == STAGE and e.fields.get("stage") == STAGE_DONE for e in events),
        attempts_planned=planned(directory, frozen),
        outcomes=dict(Counter(record.outcome for record in records)),
        **_figures(records, frozen.serving_config().seed),
        telemetry=telemetry(records, _counted(events)),
        seconds=max(times) - min(times) if times else None,
        audit_findings=len(audit.findings) if audit else None,
    )


def planned(directory: CampaignDir, frozen: Frozen) -> int:
    """Graded attempts that the evaluation is to have."""
    arms = read_json(directory.arms, Arms)
    return len(frozen.heldout) * frozen.evaluation.attempts * (len(arms.arms) if arms else 1)


def evaluation_lines(summary: EvaluationSummary) -> list[str]:
    """The closing lines on the terminal, without colour."""
    lines = [
        f"{arm.arm:<9}{arm.solved}/{arm.attempts} solved ({percent(arm.pass_rate)}, 95% interval "
        f"{percent(arm.interval.low)} to {percent(arm.interval.high)}), {arm.tasks} tasks, "
        f"{arm.masked} masked, {arm.cancelled} cancelled"
        for arm in summary.arms
    ]
    for row in summary.comparisons:
        verdict = "significant" if row.significant else "not significant"
        low, high = (percent(end, signed=True) for end in (row.interval.low, row.interval.high))
        lines.append(
            f"{row.final.arm} less base: {percent(row.difference, signed=True)}, 95% interval "
            f"{low} to {high}, p {p_text(row.p_value)}: {verdict}"
        )
    graded = summary.outcomes.get("graded", 0)
    lines.append(f"attempts {graded} graded of {summary.attempts_planned} planned")
    if summary.audit_findings is not None:
        found = summary.audit_findings
        lines.append(f"audit    {'no findings' if not found else f'{found} FINDINGS'}")
    return lines


def _figures(records: Sequence[EpisodeRecord], seed: int) -> dict[str, Any]:
    """Arms, comparisons and per-task rates, of the arms that have graded attempts."""
    graded: dict[str, set[str]] = {}
    for record in records:
        if record.outcome == "graded" and record.arm is not None:
            graded.setdefault(record.arm, set()).add(record.task_name)
    versions = {record.arm: record.version for record in records}
    names = sorted(graded, key=lambda arm: versions[arm])
    base = graded.get(BASE_ARM, set())
    return {
        "arms": [summarize_arm(records, name) for name in names],
        "comparisons": [
            compare_arms(records, BASE_ARM, name, seed)
            for name in names
            if name != BASE_ARM and graded[name] & base
        ],
        "tasks": {name: task_rates(records, name) for name in names},
    }


def _counted(events: Sequence[Event]) -> list[Mapping[str, float]]:
    """What the engines' counters rose by, from each begin to its end."""
    begun: dict[object, Mapping[str, float]] = {}
    rises: list[Mapping[str, float]] = []
    for event in events:
        if event.kind != COUNTERS:
            continue
        replica, values = event.fields["replica"], event.fields["values"]
        now = cast(Mapping[str, float], values)
        if event.fields["when"] == "begin":
            begun[replica] = now
        elif replica in begun:
            before = begun.pop(replica)
            rises.append({name: value - before.get(name, 0.0) for name, value in now.items()})
    return rises
