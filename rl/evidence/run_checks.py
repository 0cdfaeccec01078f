"""The claims about the run as a whole, each derived again by one function.

What it was started with, that it came to its end, and the gates before it.

Invariants: those of `rl.evidence.checks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rl.errors import EvidenceError
from rl.evidence.events import BEGIN, PINNED, REPORTED, STAGE, STAGE_DONE, STOPPED
from rl.evidence.frozen import config_digest
from rl.evidence.lifecycle import lifecycle_steps
from rl.evidence.material import Material
from rl.evidence.near_duplicates import near_duplicates
from rl.evidence.rows import Finding, GateResult
from rl.evidence.snapshot import SNAPSHOT, kept_sha256
from rl.files import sha256_file

ORACLE_REWARD: Final = 1.0  # what a task's own solution scores
NOTHING_REWARD: Final = 0.0


def check_frozen(material: Material) -> Iterator[Finding]:
    """The configuration has its digest; no held-out task is trained on."""
    frozen = material.frozen
    if config_digest(frozen.config) != frozen.config_digest:
        yield Finding(
            code="config-digest",
            where="frozen.json config",
            message=f"does not have the digest {frozen.config_digest[:16]} that was frozen",
        )
    if material.serving is not None:
        threshold = material.serving.tasks.near_duplicate
        for pair in near_duplicates(frozen.train, frozen.heldout, threshold):
            yield Finding(
                code="near-duplicate",
                where=f"held-out task {pair.heldout.name}",
                message=f"has an instruction {pair.similarity:.0%} like that of training task "
                f"{pair.train.name}; the bound is {threshold:.0%}",
            )
    trained = {task.digest: task.name for task in frozen.train}
    for task in frozen.heldout:
        if task.digest in trained:
            yield Finding(
                code="leaked-task",
                where=f"held-out task {task.name}",
                message=f"has the content of training task {trained[task.digest]}",
            )


def check_source(material: Material) -> Iterator[Finding]:
    """The sources in the directory are those that the run was started with."""
    pinned = material.frozen.code.source_sha256
    if pinned is None:
        return
    try:
        found = kept_sha256(material.directory.root)
    except EvidenceError as error:
        yield Finding(code="source-snapshot", where=error.where, message=error.what)
        return
    if found != pinned:
        said = "missing" if found is None else "not what frozen.json pins"
        yield Finding(code="source-snapshot", where=SNAPSHOT, message=said)


def check_pinned(material: Material) -> Iterator[Finding]:
    """Files that a driver found or wrote are as they were then."""
    pins: dict[str, set[object]] = defaultdict(set)
    latest: dict[str, object] = {}
    for event in material.events:
        if event.kind == BEGIN and "frozen" in event.fields:
            pins["frozen.json"].add(event.fields["frozen"])
            latest["frozen.json"] = event.fields["frozen"]
        elif event.kind == PINNED:
            latest[str(event.fields.get("file"))] = event.fields.get("sha256")
    for name, pinned in sorted(latest.items()):
        path = material.directory.root / Path(name).name
        found = sha256_file(path) if path.is_file() else None
        if found != pinned or len(pins[name]) > 1:
            said = "missing" if found is None else "not what it was when the run went on with it"
            yield Finding(code="changed-file", where=name, message=said)


def check_complete(material: Material) -> Iterator[Finding]:
    """A run that says that it is done has begun, has stopped, and has left its files."""
    kinds = {event.kind for event in material.events}
    if not any(e.kind == STAGE and e.fields.get("stage") == STAGE_DONE for e in material.events):
        yield Finding(code="unfinished", where="events.jsonl", message="the run is not done")
        return
    for kind in (BEGIN, STOPPED):
        if kind not in kinds:
            message = f"has no '{kind}', though the run is done"
            yield Finding(code="missing-event", where="events.jsonl", message=message)
    directory = material.directory
    wanted = [directory.lifecycle, directory.failed_trace]
    if REPORTED in kinds:
        wanted += [directory.audit, directory.summary]
    for path in wanted:
        if not path.is_file():
            name = path.relative_to(directory.root).as_posix()
            yield Finding(code="missing-file", where=name, message="is gone")


def check_lifecycle(material: Material) -> Iterator[Finding]:
    """Every lifecycle step has a receipt, unless its driver died and another took over."""
    steps = lifecycle_steps(material.lifecycle)
    newest = max((step.intent.incarnation for step in steps), default=0)
    for step in steps:
        if step.receipt is None and step.intent.incarnation == newest:
            yield Finding(
                code="unfinished-step",
                where=f"lifecycle.jsonl {step.name}",
                message="was begun, and has neither a receipt nor a later driver",
            )


def check_gates(material: Material) -> Iterator[Finding]:
    """Every task used has passed its gate, by the very content that was frozen."""
    if material.gates is None:
        yield Finding(
            code="missing-gates", where="gates.json", message="missing, or unreadable: see above"
        )
        return
    by_digest: dict[str, list[GateResult]] = defaultdict(list)
    for gate in material.gates.gates:
        by_digest[gate.digest].append(gate)
    trained = material.frozen.train if material.campaign else []
    held = max(material.evaluated, material.eval_tasks, key=len)
    for task in [*trained, *held]:
        where = f"task {task.name}"
        if task.digest not in by_digest:
            yield Finding(
                code="ungated-task", where=where, message="gates.json has no gate of its content"
            )
        for gate in by_digest.get(task.digest, []):
            rewards = (gate.oracle_reward, gate.nothing_reward)
            if not gate.passed or rewards != (ORACLE_REWARD, NOTHING_REWARD):
                yield Finding(
                    code="failed-gate",
                    where=where,
                    message=f"{'passed' if gate.passed else 'did not pass'} its gate, where its "
                    f"solution scored {rewards[0]} and doing nothing scored {rewards[1]}",
                )
