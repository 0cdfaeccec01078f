"""The claims of a campaign, each derived again by one function.

Those about the run as a whole are in `rl.evidence.run_checks`, those about evaluations in
`rl.evidence.heldout_checks`.

Invariants:
- A check is a pure function from `Material` to findings; none raises on bad
  evidence, and none depends on another having passed.
- A check whose material could not be read yields nothing: the reading already
  made a finding.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from rl.config import ScheduleConfig
from rl.evidence.events import (
    DISPATCH,
    ENDED,
    Event,
)
from rl.evidence.heldout_checks import (
    check_adapters,
    check_arms,
    check_evals,
    check_heldout,
    check_proofs,
    check_stopped,
)
from rl.evidence.material import Material
from rl.evidence.rows import Finding, TrainedGroup
from rl.evidence.run_checks import (
    check_complete,
    check_frozen,
    check_gates,
    check_lifecycle,
    check_pinned,
    check_source,
)
from rl.records import EpisodeRecord

REWARD_TOLERANCE: Final = 1e-4  # the trainer may sum rewards in float32


def check_identities(material: Material) -> Iterator[Finding]:
    """Attempt ids are unique over the campaign; every dispatched one ended."""
    ends = Counter(record.attempt_id for record in material.records)
    for attempt_id, count in ends.items():
        if count > 1:
            yield Finding(
                code="duplicate-attempt",
                where=f"attempt {attempt_id}",
                message=f"ended {count} times; an attempt ends once",
            )
    dispatched: dict[str, Event] = {}
    for event in material.events:
        if event.kind != DISPATCH:
            continue
        attempt_id = str(event.fields.get("attempt_id"))
        where = f"attempt {attempt_id}"
        if attempt_id not in ends:
            yield Finding(
                code="lost-attempt", where=where, message="was dispatched and never ended"
            )
        if attempt_id in dispatched:
            yield Finding(code="dispatched-twice", where=where, message="was dispatched twice")
        dispatched[attempt_id] = event
    for record in material.records:
        yield from _check_dispatch(record, dispatched.get(record.attempt_id))


def _check_dispatch(record: EpisodeRecord, event: Event | None) -> Iterator[Finding]:
    """An attempt ran what it was dispatched for."""
    where = f"attempt {record.attempt_id}"
    if event is None:
        message = "has a record, and was never dispatched"
        yield Finding(code="undispatched-attempt", where=where, message=message)
        return
    ran = {
        "group_id": record.group_id,
        "task": record.task_name,
        "digest": record.task_digest,
        "version": record.version,
        "replica": record.replica,
        "stage": record.stage,
        "arm": record.arm,
        "adapter_sha256": record.adapter_sha256,
    }
    for name, value in ran.items():
        if event.fields.get(name) != value:
            yield Finding(
                code="dispatch-differs",
                where=where,
                message=f"was dispatched with {name} {event.fields.get(name)}, and ran {value}",
            )


def check_endings(material: Material) -> Iterator[Finding]:
    """Every record is, to the byte, what the campaign said of it when it was written."""
    endings = [event.fields for event in material.events if event.kind == ENDED]
    told = {str(fields.get("attempt_id")): fields for fields in endings}
    for attempt_id, count in Counter(str(row.get("attempt_id")) for row in endings).items():
        if count > 1:
            yield Finding(
                code="ended-twice",
                where=f"attempt {attempt_id}",
                message=f"events.jsonl tells of its end {count} times",
            )
    for record in material.records:
        said = told.get(record.attempt_id)
        where = f"attempt {record.attempt_id}"
        if said is None:
            message = "has a record, and events.jsonl does not tell of its end"
            yield Finding(code="untold-record", where=where, message=message)
        elif said.get("reward") != record.reward or said.get("outcome") != record.outcome:
            yield Finding(
                code="edited-reward",
                where=where,
                message=f"is {record.outcome} with reward {record.reward}; when it ended it was "
                f"{said.get('outcome')} with reward {said.get('reward')}",
            )
        elif said.get("sha256") != material.lines.get(record.attempt_id):
            message = "its record is not the one that was written when it ended"
            yield Finding(code="edited-record", where=where, message=message)
    for attempt_id in sorted(told.keys() - material.lines.keys()):
        yield Finding(
            code="lost-record",
            where=f"attempt {attempt_id}",
            message="ended, as events.jsonl tells, and no trace has its record",
        )


def check_rewards(material: Material) -> Iterator[Finding]:
    """Every reward has a verifier's log, and none stands for a failed machine."""
    for record in material.records:
        if record.outcome != "graded":
            continue
        where = f"attempt {record.attempt_id}"
        if not record.verifier_log.strip():
            yield Finding(
                code="no-verifier-log",
                where=where,
                message=f"has reward {record.reward} without a verifier log",
            )
        if record.stop_reason in ("infrastructure", "cancelled"):
            yield Finding(
                code="infrastructure-scored",
                where=where,
                message=f"stopped by '{record.stop_reason}', yet has reward {record.reward}",
            )


def check_tasks(material: Material) -> Iterator[Finding]:
    """Every episode ran a task that was frozen for its stage."""
    stages = (
        ("training", material.train, material.frozen.train),
        ("evaluation", material.evals, material.eval_tasks),
        ("held-out", material.measured, material.evaluated),
    )
    for stage, records, tasks in stages:
        digests = {task.name: task.digest for task in tasks}
        for record in records:
            if digests.get(record.task_name) != record.task_digest:
                known = record.task_name in digests
                problem = "has other content" if known else f"is no {stage} task"
                yield Finding(
                    code="unknown-task",
                    where=f"attempt {record.attempt_id}",
                    message=f"ran {record.task_name}, which {problem}",
                )


def check_sequence(material: Material) -> Iterator[Finding]:
    """Updates 1 to the last were each made once, and each has its metrics."""
    if material.config is None:
        return
    wanted = range(1, material.config.schedule.updates + 1)
    sources = (
        ("updates.jsonl", [row.update for row in material.updates]),
        ("metrics.jsonl", [row.update for row in material.metrics]),
    )
    for name, updates in sources:
        counts = Counter(updates)
        for update in sorted({*wanted, *counts}):
            count = counts[update]
            if count == 0:
                yield Finding(
                    code="missing-update", where=f"{name} update {update}", message="has no row"
                )
            elif count > 1 or update not in wanted:
                yield Finding(
                    code="unexpected-update",
                    where=f"{name} update {update}",
                    message=f"has {count} rows; updates 1 to {wanted[-1]} have one each",
                )


def check_batches(material: Material) -> Iterator[Finding]:
    """Batches are whole, fresh and graded, and no attempt is trained on twice."""
    if material.config is None:
        return
    schedule = material.config.schedule
    by_id = {record.attempt_id: record for record in material.train}
    by_group: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in material.train:
        by_group[record.group_id].append(record)
    trained: dict[str, int] = {}
    for row in material.updates:
        if len(row.groups) != schedule.groups_per_batch:
            yield Finding(
                code="batch-size",
                where=f"update {row.update}",
                message=f"has {len(row.groups)} groups; {schedule.groups_per_batch} configured",
            )
        for group in row.groups:
            yield from _check_group(group, row.update, by_group[group.group_id], schedule)
            for attempt_id in group.attempt_ids:
                if attempt_id in trained:
                    yield Finding(
                        code="trained-twice",
                        where=f"attempt {attempt_id}",
                        message=f"is in update {trained[attempt_id]} and update {row.update}",
                    )
                trained[attempt_id] = row.update
                yield from _check_trained(
                    attempt_id, by_id.get(attempt_id), group, row.update, schedule.max_staleness
                )


def _check_group(
    group: TrainedGroup, update: int, records: list[EpisodeRecord], schedule: ScheduleConfig
) -> Iterator[Finding]:
    """A trained group is whole but for masked attempts, of one task and version."""
    where = f"group {group.group_id} of update {update}"
    absent = schedule.group_size - len(group.attempt_ids)
    excused = sum(record.outcome != "graded" for record in records)
    if absent < 0 or absent > excused or len(group.attempt_ids) < schedule.min_group:
        yield Finding(
            code="group-size",
            where=where,
            message=f"has {len(group.attempt_ids)} attempts; {schedule.group_size} configured "
            f"and {excused} masked or cancelled",
        )
    graded = {record.attempt_id for record in records if record.outcome == "graded"}
    for attempt_id in sorted(graded - set(group.attempt_ids)):
        yield Finding(
            code="omitted-attempt",
            where=f"attempt {attempt_id}",
            message=f"was graded, but left out of its {where}",
        )
    tasks = sorted({record.task_name for record in records})
    if len(tasks) > 1:
        yield Finding(code="mixed-tasks", where=where, message=f"has several tasks: {tasks}")


def _check_trained(
    attempt_id: str,
    record: EpisodeRecord | None,
    group: TrainedGroup,
    update: int,
    max_staleness: int,
) -> Iterator[Finding]:
    """A trained attempt was graded, in its group, on its version, within the bound."""
    where = f"attempt {attempt_id} of update {update}"
    if record is None:
        yield Finding(code="missing-attempt", where=where, message="is in no trace")
        return
    if record.outcome != "graded":
        yield Finding(code="trained-ungraded", where=where, message=f"is {record.outcome}")
    if record.group_id != group.group_id:
        yield Finding(
            code="wrong-group", where=where, message=f"is of group {record.group_id} in the trace"
        )
    if record.version != group.version:
        yield Finding(
            code="mixed-versions",
            where=where,
            message=f"is of version {record.version}, its group of version {group.version}",
        )
    staleness = update - 1 - record.version
    if not 0 <= staleness <= max_staleness:
        yield Finding(
            code="stale-episode",
            where=where,
            message=f"has staleness {staleness} (version {record.version}); "
            f"the bound is {max_staleness}",
        )


def check_metrics(material: Material) -> Iterator[Finding]:
    """Each update's metrics agree with the episodes it trained on."""
    by_id = {record.attempt_id: record for record in material.train}
    rows = {row.update: row for row in material.updates}
    for metrics in material.metrics:
        row = rows.get(metrics.update)
        if row is None:
            continue
        pairs = [
            (group, by_id[attempt_id])
            for group in row.groups
            for attempt_id in group.attempt_ids
            if attempt_id in by_id
        ]
        rewards = [record.reward for _, record in pairs if record.reward is not None]
        # Not `fsum`, which raises when damaged rewards overflow.
        mean = sum(reward / len(rewards) for reward in rewards) if rewards else math.nan
        spread = (
            math.sqrt(sum((r - mean) * (r - mean) / len(rewards) for r in rewards))
            if rewards
            else 0.0
        )
        by_group: dict[str, set[float | None]] = defaultdict(set)
        for group, record in pairs:
            by_group[group.group_id].add(record.reward)
        flat = sum(len(values) < 2 for values in by_group.values())
        staleness = Counter(row.update - 1 - record.version for _, record in pairs)
        claims = (
            ("episodes", metrics.episodes, len(pairs), metrics.episodes == len(pairs)),
            (
                "reward_mean",
                metrics.reward_mean,
                mean,
                math.isclose(metrics.reward_mean, mean, abs_tol=REWARD_TOLERANCE),
            ),
            (
                "reward_std",
                metrics.reward_std,
                spread,
                math.isclose(metrics.reward_std, spread, abs_tol=REWARD_TOLERANCE),
            ),
            (
                "zero_variance_groups",
                metrics.zero_variance_groups,
                flat,
                metrics.zero_variance_groups == flat,
            ),
            (
                "staleness",
                metrics.staleness,
                dict(staleness),
                {k: n for k, n in metrics.staleness.items() if n} == dict(staleness),
            ),
        )
        for name, claimed, derived, agree in claims:
            if not agree:
                yield Finding(
                    code="metrics-differ",
                    where=f"metrics.jsonl update {metrics.update}",
                    message=f"{name} says {claimed}, the trace says {derived}",
                )


EVALUATION: Final[tuple[Callable[[Material], Iterator[Finding]], ...]] = (
    check_frozen,
    check_source,
    check_pinned,
    check_complete,
    check_identities,
    check_endings,
    check_rewards,
    check_tasks,
    check_lifecycle,
    check_gates,
    check_heldout,
    check_arms,
    check_adapters,
    check_proofs,
    check_stopped,
)
CAMPAIGN: Final = (*EVALUATION, check_sequence, check_batches, check_metrics, check_evals)
