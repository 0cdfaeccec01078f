"""What a campaign directory says, read once, and its headline numbers.

Invariants:
- Reading never fails on a campaign that is unfinished or still runs: what is
  not there yet is listed in `missing`.  Evidence that is damaged does fail.
- Headline numbers come from the traces and metrics, not from a summary file.
- A verdict needs the held-out test: a rising training reward alone is called
  what it is.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field, ValidationError

from rl.config import CampaignConfig
from rl.errors import EvidenceError, first_problem
from rl.evidence.events import STAGE, STAGE_DONE, Event, read_events
from rl.evidence.frozen import Frozen, load_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM, Arms, Audit, Gates, eval_arm
from rl.evidence.stats import (
    ArmSummary,
    HeldoutComparison,
    compare_arms,
    solved,
    summarize_arm,
)
from rl.files import read_errors
from rl.records import EpisodeRecord, Record, UpdateMetrics

FIRST_UPDATES: Final = 2  # the start: few, because the policy soon moves
LAST_UPDATES: Final = 3  # the end: more, because it has settled
# Beyond any date, time, count or reward, and far below where sums lose their meaning.
LARGEST_NUMBER: Final = 1e11

Verdict = Literal["improved", "regressed", "not significant", "not evaluated"]


class EpisodeCounts(Record):
    """Episodes of one stage by outcome."""

    graded: int = 0
    masked: int = 0
    cancelled: int = 0
    solved: int = 0

    @property
    def total(self) -> int:
        """Attempts that came to an end."""
        return self.graded + self.masked + self.cancelled


class RewardEnd(Record):
    """Mean training reward over some updates at one end of the campaign."""

    mean: float
    updates: int = Field(description="number of updates averaged")


class Summary(Record):
    """The headline numbers: summary.json."""

    run_id: str
    created_at: float
    finished: bool
    verdict: Verdict
    headline: str = Field(description="one sentence for a reader in a hurry")
    updates_done: int
    updates_planned: int
    reward_first: RewardEnd | None = Field(description="at the start of training")
    reward_last: RewardEnd | None = Field(description="at the end; None before there is one")
    heldout: HeldoutComparison | None
    evals: list[ArmSummary] = Field(
        default_factory=list[ArmSummary], description="evaluations during training, by version"
    )
    train: EpisodeCounts
    evaluation: EpisodeCounts
    trained_episodes: int
    staleness: dict[int, int] = Field(description="trained episodes by staleness")
    seconds: float | None = Field(description="first event to last, s")
    gates_passed: int | None
    gates_total: int | None
    audit_findings: int | None = Field(description="None before the audit")
    missing: list[str] = Field(description="what the directory does not hold yet")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything a campaign directory holds, episodes without their tokens."""

    directory: CampaignDir
    frozen: Frozen
    config: CampaignConfig
    metrics: list[UpdateMetrics]
    events: list[Event]
    train: list[EpisodeRecord]
    evals: list[EpisodeRecord]
    heldout: list[EpisodeRecord]
    examples: dict[tuple[str, bool], EpisodeRecord]
    arms: Arms | None
    gates: Gates | None
    audit: Audit | None
    missing: list[str] = field(default_factory=list[str])

    @property
    def finished(self) -> bool:
        """Whether the campaign came to its planned end."""
        return any(e.kind == STAGE and e.fields.get("stage") == STAGE_DONE for e in self.events)

    @property
    def final_arm(self) -> str | None:
        """The arm that is compared with base, if there is one."""
        return self.arms.final.arm if self.arms and self.arms.final.arm != BASE_ARM else None


def load_evidence(directory: CampaignDir) -> Evidence:
    """Read a campaign's directory, whatever it holds so far.

    Raises:
        EvidenceError: it was never frozen, a file is damaged, or holds a number
            that nothing can have measured.
    """
    frozen = load_frozen(directory)
    if frozen.kind != "campaign":
        raise EvidenceError(
            f"is a {frozen.kind}, and no campaign",
            str(directory.root),
            f"its numbers are in {directory.summary.name}",
        )
    config = frozen.campaign_config()
    _refuse_absurd("frozen.json", {"created_at": frozen.created_at})
    metrics = directory.metrics_rows().read(live=True)
    for row in metrics:
        _refuse_absurd(
            f"metrics.jsonl update {row.update}",
            {
                "update": row.update,
                "reward_mean": row.reward_mean,
                "reward_std": row.reward_std,
                "episodes": row.episodes,
                "seconds": row.seconds,
                "staleness": max([*row.staleness.keys(), *row.staleness.values()], default=0),
            },
        )
    events = read_events(directory.events, live=True)
    for event in events:
        seconds = event.fields.get("seconds")
        seconds = seconds if isinstance(seconds, int | float) else 0
        numbers = {"time": event.time, "seconds": seconds}
        _refuse_absurd(f"events.jsonl {event.kind}", numbers)
    train = [_checked(r) for r in directory.episodes("train", live=True)]
    heldout: list[EpisodeRecord] = []
    examples: dict[tuple[str, bool], EpisodeRecord] = {}
    for record in directory.episodes("heldout", live=True):
        if record.outcome == "graded" and record.arm is not None:
            examples.setdefault((record.arm, solved(record)), record)
        heldout.append(_checked(record))
    evidence = Evidence(
        directory=directory,
        frozen=frozen,
        config=config,
        metrics=metrics,
        events=events,
        train=train,
        evals=_current_evals(directory),
        heldout=heldout,
        examples=examples,
        arms=read_json(directory.arms, Arms),
        gates=read_json(directory.gates, Gates),
        audit=read_json(directory.audit, Audit),
    )
    evidence.missing.extend(_missing(evidence))
    return evidence


def summarize(evidence: Evidence) -> Summary:
    """The headline numbers of a campaign."""
    comparison = _comparison(evidence)
    verdict = _verdict(comparison)
    first, last = _reward_ends(evidence.metrics)
    staleness: Counter[int] = Counter()
    for row in evidence.metrics:
        staleness.update(row.staleness)
    times = [event.time for event in evidence.events]
    gates = evidence.gates.gates if evidence.gates else None
    return Summary(
        run_id=evidence.frozen.run_id,
        created_at=evidence.frozen.created_at,
        finished=evidence.finished,
        verdict=verdict,
        headline=_headline(verdict, comparison, first, last),
        updates_done=len(evidence.metrics),
        updates_planned=evidence.config.schedule.updates,
        reward_first=first,
        reward_last=last,
        heldout=comparison,
        evals=_evals(evidence.evals),
        train=_count(evidence.train),
        evaluation=_count(evidence.heldout),
        trained_episodes=sum(row.episodes for row in evidence.metrics),
        staleness=dict(sorted(staleness.items())),
        seconds=max(times) - min(times) if times else None,
        gates_passed=sum(gate.passed for gate in gates) if gates is not None else None,
        gates_total=len(gates) if gates is not None else None,
        audit_findings=len(evidence.audit.findings) if evidence.audit else None,
        missing=evidence.missing,
    )


def _current_evals(directory: CampaignDir) -> list[EpisodeRecord]:
    """Evaluations during training, less those of weights that were made again."""
    gone = directory.superseded_adapters()
    records = [_checked(record) for record in directory.episodes("eval", live=True)]
    return [record for record in records if record.adapter_sha256 not in gone]


def _evals(records: Sequence[EpisodeRecord]) -> list[ArmSummary]:
    versions = sorted({r.version for r in records if r.outcome == "graded"})
    return [summarize_arm(records, eval_arm(version)) for version in versions]


def summary_lines(summary: Summary) -> list[str]:
    """The closing lines on the terminal, without colour."""
    lines = [summary.headline]
    done = f"{summary.updates_done} of {summary.updates_planned} updates"
    if summary.reward_first is not None and summary.reward_last is not None:
        lines.append(
            f"training   {done}; mean reward {summary.reward_first.mean:.2f} "
            f"(first {summary.reward_first.updates}) -> {summary.reward_last.mean:.2f} "
            f"(last {summary.reward_last.updates})"
        )
    else:
        lines.append(f"training   {done}")
    if summary.evals:
        rates = ", ".join(f"{arm.version}: {percent(arm.pass_rate)}" for arm in summary.evals)
        lines.append(f"on the way held-out tasks solved, by version: {rates}")
    if summary.heldout is not None:
        lines.extend(
            f"held-out   {arm.arm:<8} {arm.solved}/{arm.attempts} solved "
            f"({percent(arm.pass_rate)}, 95% interval {percent(arm.interval.low)} "
            f"to {percent(arm.interval.high)})"
            for arm in (summary.heldout.base, summary.heldout.final)
        )
    lines.append(f"episodes   {_outcomes('training', summary.train)}")
    if summary.evaluation.total:
        lines.append(f"           {_outcomes('held-out', summary.evaluation)}")
    if summary.gates_total is not None:
        lines.append(f"gates      {summary.gates_passed} of {summary.gates_total} passed")
    if summary.audit_findings is not None:
        found = summary.audit_findings
        lines.append(f"audit      {'no findings' if not found else f'{found} FINDINGS'}")
    if summary.missing:
        lines.append(f"missing    {'; '.join(summary.missing)}")
    return lines


def percent(share: float, signed: bool = False) -> str:
    """A share as a whole percentage, such as 37% or +5%."""
    text = f"{share * 100:{'+' if signed else ''}.0f}"
    return f"{text.replace('-', '\N{MINUS SIGN}')}%"


def read_json[ModelT: BaseModel](path: Path, model: type[ModelT]) -> ModelT | None:
    """The record in a JSON file; None if the file is absent.

    Raises:
        EvidenceError: it can't be read, or is no valid record.
    """
    with read_errors(path):
        if not path.exists():
            return None
        data = path.read_bytes()
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise EvidenceError(
            f"not a valid {model.__name__}: {first_problem(error)}",
            str(path),
            "restore the file from an archive",
        ) from None


def _refuse_absurd(where: str, numbers: Mapping[str, float]) -> None:
    """Refuse numbers that no sum, chart or date can hold."""
    for name, value in numbers.items():
        if not abs(value) <= LARGEST_NUMBER:  # so that NaN is refused as well
            shown = float(max(-sys.float_info.max, min(value, sys.float_info.max)))
            raise EvidenceError(
                f"{name} is {shown:g}, which nothing can have measured",
                where,
                "restore the file from an archive",
            )


def _checked(record: EpisodeRecord) -> EpisodeRecord:
    """The record without what takes memory: tokens, turns, log."""
    numbers = {**record.timings, "reward": record.reward or 0.0}
    _refuse_absurd(f"attempt {record.attempt_id}", numbers)
    return record.model_copy(update={"samples": [], "turns": [], "verifier_log": ""})


def _missing(evidence: Evidence) -> list[str]:
    planned = evidence.config.schedule.updates
    wanted = evidence.config.heldout_attempts
    graded = sum(record.outcome == "graded" for record in evidence.heldout)
    checks = (
        (len(evidence.metrics) < planned, f"updates {len(evidence.metrics) + 1} to {planned}"),
        (graded < wanted, f"{wanted - graded} of {wanted} held-out attempts"),
        (evidence.gates is None, "gate results"),
        (evidence.arms is None, "the arms' adapters"),
        (evidence.audit is None, "the audit"),
    )
    return [what for absent, what in checks if absent]


def _comparison(evidence: Evidence) -> HeldoutComparison | None:
    """Base against final, as soon as both have a graded attempt at one task."""
    final = evidence.final_arm
    if final is None:
        return None
    tasks = {
        arm: {r.task_name for r in evidence.heldout if r.arm == arm and r.outcome == "graded"}
        for arm in (BASE_ARM, final)
    }
    if not tasks[BASE_ARM] & tasks[final]:
        return None
    return compare_arms(evidence.heldout, BASE_ARM, final, seed=evidence.config.seed)


def _verdict(comparison: HeldoutComparison | None) -> Verdict:
    if comparison is None:
        return "not evaluated"
    if not comparison.significant:
        return "not significant"
    return "improved" if comparison.difference > 0 else "regressed"


def _headline(
    verdict: Verdict,
    comparison: HeldoutComparison | None,
    first: RewardEnd | None,
    last: RewardEnd | None,
) -> str:
    if comparison is None:
        if first is None:
            return "No update has been made yet."
        course = f"is {first.mean:.2f} after one update"
        if last is not None:
            course = f"went from {first.mean:.2f} to {last.mean:.2f}"
        return f"Not evaluated on held-out tasks yet; mean training reward {course}."
    before, after = percent(comparison.base.pass_rate), percent(comparison.final.pass_rate)
    change = f"from {before} to {after} (p {p_text(comparison.p_value)})"
    if verdict == "improved":
        return f"The model improved: it solves held-out tasks more often, {change}."
    if verdict == "regressed":
        return f"The model got worse: it solves held-out tasks less often, {change}."
    return f"No significant change on held-out tasks: {change}."


def p_text(p_value: float) -> str:
    """A p-value as text with its relation sign."""
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}"


def _reward_ends(
    metrics: Sequence[UpdateMetrics],
) -> tuple[RewardEnd | None, RewardEnd | None]:
    """Mean reward at the start and the end, over updates that never overlap."""
    rewards = [row.reward_mean for row in metrics]
    if len(rewards) < FIRST_UPDATES + LAST_UPDATES:
        first, last = rewards[:1], rewards[1:][-1:]
    else:
        first, last = rewards[:FIRST_UPDATES], rewards[-LAST_UPDATES:]
    return _reward_end(first), _reward_end(last)


def _reward_end(rewards: Sequence[float]) -> RewardEnd | None:
    if not rewards:
        return None
    return RewardEnd(mean=math.fsum(rewards) / len(rewards), updates=len(rewards))


def _count(records: Sequence[EpisodeRecord]) -> EpisodeCounts:
    outcomes = Counter(record.outcome for record in records)
    return EpisodeCounts(
        graded=outcomes["graded"],
        masked=outcomes["masked"],
        cancelled=outcomes["cancelled"],
        solved=sum(solved(record) for record in records),
    )


def _outcomes(label: str, counts: EpisodeCounts) -> str:
    return (
        f"{label}: {counts.total} ended: {counts.graded} graded, {counts.masked} masked, "
        f"{counts.cancelled} cancelled"
    )
