"""The audit: re-derives what a campaign claims from its raw traces.

Invariants:
- It needs the campaign's directory and this package, nothing else, and it
  changes nothing.
- It stops at no finding: damaged evidence is a finding, and whatever can still
  be checked is checked.
- Every finding names the record.  No findings means that each claim in
  `rl.evidence.checks` was derived again and held.
- An unfinished campaign has findings: what is missing can't be vouched for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from rl.errors import EvidenceError
from rl.evidence import checks
from rl.evidence.evaluation import EvaluationSummary, summarize_evaluation
from rl.evidence.events import Event
from rl.evidence.frozen import Frozen, load_frozen
from rl.evidence.layout import STAGES, CampaignDir
from rl.evidence.lines import JsonLines
from rl.evidence.material import Material
from rl.evidence.rows import Arms, Audit, Finding, Gates
from rl.evidence.shards import shard_findings
from rl.evidence.summary import Summary, load_evidence, read_json, summarize
from rl.evidence.traces import Frame, TornTraceError, parse_record, read_frames
from rl.records import EpisodeRecord, Stage

# What a summary says of things that came after it, or of the audit itself.
_NOT_DERIVED = frozenset({"audit_findings", "missing", "seconds"})


def audit(directory: CampaignDir) -> Audit:
    """Audit a campaign's directory.

    Raises:
        EvidenceError: frozen.json is missing or unreadable, so nothing can be checked.
    """
    frozen = load_frozen(directory)
    findings: list[Finding] = []
    material = _gather(directory, frozen, findings)
    for check in checks.CAMPAIGN if material.campaign else checks.EVALUATION:
        findings.extend(check(material))
    findings.extend(_check_shards(material))
    if not findings:
        findings.extend(_check_summary(directory, material.campaign))
    return Audit(
        run_id=frozen.run_id,
        checked={
            "training episodes": len(material.train),
            "held-out episodes": len(material.measured),
            "updates": len(material.updates),
            "evaluation episodes": len(material.evals),
            "tasks": len(frozen.train) + len(frozen.heldout),
            "gates": len(material.gates.gates) if material.gates else 0,
            "arms": len(material.arms.arms) if material.arms else 0,
            "held-out shards": len(directory.shards),
        },
        findings=findings,
    )


def _gather(directory: CampaignDir, frozen: Frozen, findings: list[Finding]) -> Material:
    """Read everything; what can't be read becomes a finding."""

    def attempt[T](code: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except EvidenceError as error:
            findings.append(Finding(code=code, where=error.where, message=error.what))
            return otherwise

    events = JsonLines(directory.events, Event)
    records: dict[Stage, list[EpisodeRecord]] = {stage: [] for stage in STAGES}
    lines: dict[str, str] = {}
    for path in directory.traces:
        for frame, record in _records(path, findings):
            records[record.stage].append(record)
            lines[record.attempt_id] = frame.sha256
            findings.extend(_misplaced(path, directory, record))
    return Material(
        directory=directory,
        frozen=frozen,
        config=attempt("config-unreadable", frozen.campaign_config, None)
        if frozen.kind == "campaign"
        else None,
        serving=attempt("config-unreadable", frozen.serving_config, None),
        plan=attempt("config-unreadable", lambda: frozen.evaluation, None),
        train=records["train"],
        evals=records["eval"],
        heldout=records["heldout"],
        lines=lines,
        metrics=attempt("damaged-metrics", directory.metrics_rows().read, []),
        updates=attempt("damaged-updates", directory.update_rows().read, []),
        events=attempt("damaged-events", events.read, []),
        lifecycle=attempt("damaged-lifecycle", directory.lifecycle_rows().read, []),
        arms=attempt("damaged-arms", lambda: read_json(directory.arms, Arms), None),
        superseded=attempt("damaged-superseded", directory.superseded_adapters, set()),
        shards=attempt("damaged-shard", lambda: list(_of_shards(directory)), []),
        gates=attempt("damaged-gates", lambda: read_json(directory.gates, Gates), None),
    )


def _records(path: Path, findings: list[Finding]) -> Iterable[tuple[Frame, EpisodeRecord]]:
    """The valid records of a trace, without tokens and turns, each with its frame."""
    try:
        for frame in read_frames(path):
            try:
                record = parse_record(frame, path)
            except EvidenceError as error:
                findings.append(_invalid_record(frame, error))
                continue
            yield frame, record.model_copy(update={"samples": [], "turns": []})
    except TornTraceError as error:
        findings.append(Finding(code="torn-trace", where=error.where, message=error.what))
    except EvidenceError as error:
        findings.append(Finding(code="damaged-trace", where=error.where, message=error.what))


def _of_shards(directory: CampaignDir) -> Iterable[EpisodeRecord]:
    """Held-out records of the shards that were taken in, without tokens and turns."""
    for shard in directory.shards:
        for record in shard.own_episodes("heldout"):
            yield record.model_copy(update={"samples": [], "turns": []})


def _check_shards(material: Material) -> Iterable[Finding]:
    """Each shard is the campaign's, whole, as it was taken in, and passes an audit of its own."""
    directory, frozen, plan = material.directory, material.frozen, material.plan
    if not material.campaign or plan is None:
        return
    try:
        yield from shard_findings(directory, frozen, plan, material.events)
        for shard in directory.shards:
            for found in audit(shard).findings:
                where = f"shards/{shard.run_id} {found.where}"
                yield found.model_copy(update={"where": where})
    except EvidenceError as error:
        yield Finding(code="damaged-shard", where=error.where, message=error.what)


def _misplaced(path: Path, directory: CampaignDir, record: EpisodeRecord) -> Iterable[Finding]:
    """What was graded lies in its stage's trace, all else among the failed."""
    graded = record.outcome == "graded"
    home = directory.trace(record.stage) if graded else directory.failed_trace
    if path != home:
        yield Finding(
            code="misplaced-record",
            where=f"attempt {record.attempt_id}",
            message=f"is {record.outcome} in stage {record.stage}, and lies in {path.name}",
        )


def _invalid_record(frame: Frame, error: EvidenceError) -> Finding:
    """Name what is wrong with a record that its type refuses."""
    try:
        raw: Any = from_json(frame.data)
    except ValueError:
        raw = None
    code, where = "invalid-record", error.where
    if isinstance(raw, dict):
        where = f"attempt {raw.get('attempt_id')} ({error.where})"
        if raw.get("outcome") in ("masked", "cancelled") and raw.get("reward") is not None:
            code = "masked-reward"
    return Finding(code=code, where=where, message=error.what)


def _check_summary(directory: CampaignDir, campaign: bool) -> list[Finding]:
    """Compare summary.json with the numbers derived again, field by field."""
    try:
        if campaign:
            claimed = read_json(directory.summary, Summary)
            derived = summarize(load_evidence(directory))
        else:
            claimed = read_json(directory.summary, EvaluationSummary)
            derived = summarize_evaluation(directory)
    except EvidenceError as error:
        return [Finding(code="summary-unreadable", where=error.where, message=error.what)]
    if claimed is None:
        return []
    return [
        Finding(
            code="summary-differs",
            where=f"summary.json {name}",
            message=f"says {_short(claimed, name)}, the traces say {_short(derived, name)}",
        )
        for name in sorted(type(derived).model_fields.keys() - _NOT_DERIVED)
        if getattr(claimed, name) != getattr(derived, name)
    ]


def _short(model: BaseModel, name: str, limit: int = 200) -> str:
    text = str(getattr(model, name))
    return text if len(text) <= limit else f"{text[:limit]}..."
