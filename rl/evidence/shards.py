"""Held-out shards that runs of their own have evaluated, and that a campaign takes in.

A shard is a run of `rl.heldout --shard`: whole, with its own frozen.json, events, traces and
audit.  Taken in, it lies unchanged in the campaign's directory, under shards/.

Invariants:
- What is taken in is finished, has an audit without findings, and was evaluated under the
  campaign's own conditions: its tasks, weights, model, code, and configuration but for how
  much runs at once and for how long.
- Of two shards none has a task of the other, nor of what the campaign has begun itself.
- A shard is whole or absent, and an event tells of it with the digest of all its files, so
  that neither can be exchanged or removed unseen.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

from rl.errors import ConfigurationError
from rl.evidence.code_pin import code_differences
from rl.evidence.events import TAKEN_IN, Event, EventLog, read_events
from rl.evidence.frozen import (
    EvaluationPlan,
    Frozen,
    config_differences,
    load_frozen,
    model_differences,
)
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import Arms, Audit, Finding
from rl.evidence.summary import read_json
from rl.files import disk_errors, json_bytes, read_errors, sha256_files, sync_directory
from rl.records import TaskRef

# What a shard's run may have of its own: it decides how fast, not what is measured.
OWN_KEYS: Final = (
    "engine.replicas",
    "episodes.concurrency",
    "episodes.workers",
    "heldout.shards",
    "limits.",
    "resources.",
)


def shard_tasks(tasks: Sequence[TaskRef], shard: int, shards: int) -> list[TaskRef]:
    """The tasks of shard 1, 2, ... of `shards`; sizes differ by one at most."""
    return list(tasks[shard - 1 :: shards])


def shard_slots(slots: int, shard: int, shards: int) -> int:
    """The part that shard 1, 2, ... of `shards` has of the episode slots, at least one."""
    part, more = divmod(slots, shards)
    return max(1, part + (shard <= more))


def take_in(campaign: CampaignDir, shard: CampaignDir, events: EventLog) -> bool:
    """Copy a shard's directory into the campaign's, and tell of it; False: it is there already.

    Raises:
        ConfigurationError: it is no finished shard of this campaign, or not without findings.
        EvidenceError: something can't be read.
        InfrastructureError: the disk is full or can't be written.
    """
    digest = digest_of(shard)
    home = CampaignDir(campaign.shards_folder / shard.run_id)
    told = {row["run"]: row["sha256"] for row in _told(read_events(campaign.events))}
    if home.root.is_dir() and digest_of(home) == digest:
        if told.get(shard.run_id) != digest:  # a driver died in between
            events.append(TAKEN_IN, run=shard.run_id, sha256=digest)
        return False
    _require_fitting(campaign, shard)
    if home.root.exists() or shard.run_id in told:
        raise ConfigurationError(
            "another run of this name was taken in before", shard.run_id, "evaluate under another"
        )
    temporary = home.root.with_name(f".{shard.run_id}.tmp")
    with disk_errors(home.root):
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(shard.root, temporary)
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_dir():
                sync_directory(path)
        temporary.rename(home.root)
        sync_directory(home.root.parent)
    events.append(TAKEN_IN, run=shard.run_id, sha256=digest)
    return True


def digest_of(shard: CampaignDir) -> str:
    """sha256 over the names and contents of all files of a shard."""
    with read_errors(shard.root):
        return hashlib.sha256(json_bytes(sha256_files(shard.root))).hexdigest()


def shard_findings(
    campaign: CampaignDir, frozen: Frozen, plan: EvaluationPlan, events: Sequence[Event]
) -> Iterator[Finding]:
    """What is wrong with the shards that lie in a campaign, but for what their own audits find."""
    told = {row["run"]: row["sha256"] for row in _told(events)}
    seen: dict[str, str] = {}
    present = {shard.run_id: shard for shard in campaign.shards}
    for name in sorted(told.keys() - present.keys()):
        yield Finding(code="shard-lost", where=f"shards/{name}", message="taken in, and gone")
    for name, shard in present.items():
        where = f"shards/{name}"
        if told.get(name) != digest_of(shard):
            said = "is not what was taken in" if name in told else "lies there, and was not told of"
            yield Finding(code="shard-changed", where=where, message=said)
        own = load_frozen(shard)
        for problem in misfits(frozen, plan, read_json(campaign.arms, Arms), shard):
            yield Finding(code="shard-misfit", where=where, message=problem)
        for task in own.heldout:
            if task.digest in seen:
                message = f"task {task.name} is in shard {seen[task.digest]} as well"
                yield Finding(code="shard-overlap", where=where, message=message)
            seen[task.digest] = name


def misfits(
    frozen: Frozen, plan: EvaluationPlan, arms: Arms | None, shard: CampaignDir
) -> Iterator[str]:
    """In what a shard was not evaluated under the campaign's conditions."""
    own = load_frozen(shard)
    if own.kind != "heldout" or own.source != frozen.run_id:
        yield f"is a {own.kind} of '{own.source}', and no evaluation of '{frozen.run_id}'"
        return
    wanted = plan.model_copy(update={"shards": own.evaluation.shards})
    for key, difference in config_differences(wanted.model_dump(), own.evaluation.model_dump()):
        yield f"{key} of the evaluation: {difference}"
    held = {task.digest for task in frozen.heldout}
    for task in own.heldout:
        if task.digest not in held:
            yield f"task {task.name} is not held out by the campaign"
    for path, difference in config_differences(frozen.config, own.config):
        if not path.startswith(OWN_KEYS):
            yield f"configuration {path}: {difference}"
    yield from model_differences(frozen.model, own.model)
    yield from code_differences(frozen.code, own.code)
    if arms is None:
        yield "the campaign has no weights to evaluate yet"
    elif _weights(arms) != _weights(read_json(shard.arms, Arms)):
        yield "has evaluated other weights than the campaign's"


def _require_fitting(campaign: CampaignDir, shard: CampaignDir) -> None:
    """Refuse a shard that is not finished, not clean, not this campaign's, or begun twice."""
    frozen, own = load_frozen(campaign), load_frozen(shard)
    where = str(shard.root)
    problems = list(misfits(frozen, frozen.evaluation, read_json(campaign.arms, Arms), shard))
    if problems:
        raise ConfigurationError(
            "\n  - ".join(["is no shard of this campaign:", *problems]),
            where,
            f"evaluate it with `python -m rl.heldout {campaign.run_id} --shard K/N`",
        )
    result = read_json(shard.audit, Audit)
    if result is None or not shard.summary.is_file() or result.findings:
        said = "is not finished" if result is None else f"has {len(result.findings)} findings"
        raise ConfigurationError(
            said, where, f"continue it: python -m rl.heldout --resume {shard.run_id}"
        )
    begun = {record.task_digest: "the campaign" for record in campaign.own_episodes("heldout")}
    for other in campaign.shards:
        begun |= {task.digest: other.run_id for task in load_frozen(other).heldout}
    for task in own.heldout:
        if task.digest in begun:
            raise ConfigurationError(
                f"task {task.name} was begun by {begun[task.digest]} as well",
                where,
                "take in shards of other tasks; --resume alone evaluates what is missing",
            )


def _told(events: Sequence[Event]) -> list[dict[str, str]]:
    rows = [event.fields for event in events if event.kind == TAKEN_IN]
    return [{"run": str(row.get("run")), "sha256": str(row.get("sha256"))} for row in rows]


def _weights(arms: Arms | None) -> list[tuple[str, int, str | None]]:
    """The arms by what they are, wherever their files lie."""
    pins = arms.arms if arms else []
    return [(pin.arm, pin.version, pin.adapter_sha256) for pin in pins]
