"""From a screen's records to the frozen split.

Invariants:
- A task without all its graded attempts is not judged: the screen is incomplete.
- The split is a function of the screened tasks' content, the rule and the seed.
- Each family and tier has its share in both sets, none above what was kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rl.config import TasksConfig
from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.evaluation import EvaluationSummary, summarize_evaluation
from rl.evidence.frozen import Frozen, load_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM, Finding
from rl.evidence.selection import (
    Provenance,
    ScreenedTask,
    Selection,
    SelectionRule,
    read_selection,
    verdict_of,
)
from rl.evidence.stats import TaskRate
from rl.files import sha256_file
from rl.records import TaskRef
from rl.split import split

SELECTION: Final = "selection.json"  # in a screen's directory


def select(directory: CampaignDir, rule: SelectionRule) -> Selection:
    """Judge every task of a finished screen, and draw the split from what is kept.

    Raises:
        ConfigurationError: it is no complete screen, or too few tasks are kept.
        EvidenceError: its evidence is damaged.
    """
    frozen = load_frozen(directory)
    if frozen.kind != "screen":
        raise ConfigurationError(
            f"is a {frozen.kind}, and no screen", str(directory.root), "name a run of rl.screen"
        )
    summary = summarize_evaluation(directory)
    rates = _rates(frozen, summary, str(directory.root))
    tasks = [_screened(task, rates[task.digest], rule) for task in frozen.heldout]
    train, heldout = _split(frozen.heldout, tasks, rule, str(directory.root))
    return Selection(
        provenance=Provenance(
            screen=frozen.run_id,
            frozen_sha256=sha256_file(directory.frozen),
            traces={path.name: sha256_file(path) for path in directory.traces if path.exists()},
            model=f"{frozen.model.name} {frozen.model.pin}",
            attempts=frozen.evaluation.attempts,
        ),
        rule=rule,
        tasks=tasks,
        train=[task.digest for task in train],
        heldout=[task.digest for task in heldout],
    )


def check_selection(directory: CampaignDir) -> list[Finding]:
    """What a screen's selection.json says, held against its traces; nothing without one."""
    path = directory.root / SELECTION
    if load_frozen(directory).kind != "screen" or not path.exists():
        return []
    try:
        claimed = read_selection(path)
        derived = select(directory, claimed.rule)
    except (ConfigurationError, EvidenceError) as error:
        return [Finding(code="selection-unreadable", where=SELECTION, message=error.what)]
    return [
        Finding(
            code="selection-differs",
            where=f"{SELECTION} {name}",
            message="is not what the traces and the rule give",
        )
        for name in ("provenance", "tasks", "train", "heldout")
        if getattr(claimed, name) != getattr(derived, name)
    ]


def selection_lines(selection: Selection) -> list[str]:
    """What was kept, by family, for a terminal."""
    families: dict[tuple[int, str], list[ScreenedTask]] = {}
    for task in selection.tasks:
        families.setdefault((task.tier or 0, task.family or "-"), []).append(task)
    train, heldout = set(selection.train), set(selection.heldout)
    lines = [
        f"{'tier':<5}{'family':<18}{'tasks':>6}{'hard':>6}{'easy':>6}{'kept':>6}"
        f"{'train':>7}{'held':>6}{'rate':>7}"
    ]
    for (tier, family), tasks in sorted(families.items()):
        verdicts = [task.verdict for task in tasks]
        digests = {task.digest for task in tasks}
        rate = sum(task.rate for task in tasks) / len(tasks)
        lines.append(
            f"{tier:<5}{family:<18}{len(tasks):>6}{verdicts.count('too hard'):>6}"
            f"{verdicts.count('too easy'):>6}{verdicts.count('kept'):>6}"
            f"{len(digests & train):>7}{len(digests & heldout):>6}{rate:>7.2f}"
        )
    return lines


def _rates(frozen: Frozen, summary: EvaluationSummary, where: str) -> Mapping[str, TaskRate]:
    """The base model's rates by digest, all of them complete."""
    rates = {row.task_digest: row for row in summary.tasks.get(BASE_ARM, [])}
    wanted = frozen.evaluation.attempts
    short = [
        task.name
        for task in frozen.heldout
        if task.digest not in rates or rates[task.digest].attempts != wanted
    ]
    if short:
        raise ConfigurationError(
            f"{len(short)} of {len(frozen.heldout)} tasks don't have {wanted} graded attempts, "
            f"such as {short[0]}",
            where,
            f"finish it: python -m rl.screen --resume {frozen.run_id}",
        )
    return rates


def _screened(task: TaskRef, row: TaskRate, rule: SelectionRule) -> ScreenedTask:
    rate = row.solved / row.attempts
    return ScreenedTask(
        name=task.name,
        digest=task.digest,
        family=task.family,
        tier=task.tier,
        attempts=row.attempts,
        solved=row.solved,
        rate=rate,
        interval=row.interval,
        verdict=verdict_of(rate, rule),
    )


def _split(
    refs: Sequence[TaskRef], tasks: Sequence[ScreenedTask], rule: SelectionRule, where: str
) -> tuple[list[TaskRef], list[TaskRef]]:
    kept = {task.digest for task in tasks if task.verdict == "kept"}
    wanted = rule.train + rule.heldout
    if len(kept) < wanted:
        hard = sum(task.verdict == "too hard" for task in tasks)
        easy = sum(task.verdict == "too easy" for task in tasks)
        raise ConfigurationError(
            f"{len(kept)} of {len(tasks)} tasks have a pass rate from {rule.low:g} to "
            f"{rule.high:g} ({hard} below, {easy} above), and {wanted} are wanted",
            where,
            "widen --low and --high, or ask for fewer by --train and --heldout",
        )
    config = TasksConfig(train=rule.train, heldout=rule.heldout, seed=rule.seed)
    return split([ref for ref in refs if ref.digest in kept], config, where)
