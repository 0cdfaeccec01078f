"""The claims about the held-out evaluation, each derived again by one function.

Invariants: those of `rl.evidence.checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rl.evidence.events import BEGIN, DISPATCH, EVAL_OVER, PROVEN, STOPPED
from rl.evidence.material import Material
from rl.evidence.rows import BASE_ARM, ArmPin, Finding, eval_arm
from rl.files import sha256_files


def check_heldout(material: Material) -> Iterator[Finding]:
    """Each arm has exactly the configured graded attempts at each task, on its weights."""
    if material.plan is None:
        return
    if material.arms is None:
        yield Finding(
            code="missing-arms", where="arms.json", message="missing, or unreadable: see above"
        )
        return
    versions = {pin.arm: pin.version for pin in material.arms.arms}
    counts: Counter[tuple[str, str]] = Counter()
    masked: Counter[tuple[str, str]] = Counter()
    for record in material.measured:
        cell = (record.arm or "(none)", record.task_name)
        counts[cell] += record.outcome == "graded"
        masked[cell] += record.outcome != "graded"
        if record.arm not in versions:
            message = f"belongs to arm {record.arm}, which arms.json does not know"
            yield Finding(code="unknown-arm", where=f"attempt {record.attempt_id}", message=message)
        elif record.version != versions[record.arm]:
            yield Finding(
                code="arm-version",
                where=f"attempt {record.attempt_id}",
                message=f"ran version {record.version}; arm {record.arm} is "
                f"version {versions[record.arm]}",
            )
    wanted = material.plan.attempts
    for arm in versions:
        for task in material.evaluated:
            cell = (arm, task.name)
            if counts[cell] != wanted:
                yield Finding(
                    code="heldout-count",
                    where=f"arm {arm} task {task.name}",
                    message=f"has {counts[cell]} graded attempts, not {wanted}"
                    f" ({masked[cell]} masked or cancelled)",
                )


def check_arms(material: Material) -> Iterator[Finding]:
    """Base has no adapter, and each graded attempt ran on the adapter of its arm."""
    if material.arms is None:
        return
    pins = {pin.arm: pin.adapter_sha256 for pin in material.arms.arms}
    base = pins[BASE_ARM]
    if base is not None:
        yield Finding(
            code="arm-adapter",
            where=f"arm {BASE_ARM}",
            message=f"is pinned to adapter {base[:16]}; the base model has none",
        )
    for record in material.measured:
        if record.outcome != "graded" or record.arm not in pins:
            continue
        pinned = pins[record.arm]
        if record.adapter_sha256 != pinned:
            yield Finding(
                code="arm-adapter",
                where=f"attempt {record.attempt_id}",
                message=f"ran on adapter {(record.adapter_sha256 or 'none')[:16]}; "
                f"arm {record.arm} is pinned to {(pinned or 'none')[:16]}",
            )


def check_adapters(material: Material) -> Iterator[Finding]:
    """Each arm's adapter is the one that its update made, byte for byte."""
    if material.arms is None:
        return
    made = {row.update: row.adapter_sha256 for row in material.updates}
    for pin in material.arms.arms:
        trained = made.get(pin.version)
        if trained is not None and trained != pin.adapter_sha256:
            yield Finding(
                code="adapter-swapped",
                where=f"arm {pin.arm}",
                message=f"has adapter {(pin.adapter_sha256 or 'none')[:16]}; update {pin.version} "
                f"made {trained[:16]}",
            )
        yield from _check_adapter_files(material, pin)
    if not material.campaign:
        return
    newest = max((row.update for row in material.updates), default=0)
    if material.arms.final.version != newest:
        yield Finding(
            code="arm-version",
            where=f"arm {material.arms.final.arm}",
            message=f"is version {material.arms.final.version}; the last update made {newest}",
        )


def check_evals(material: Material) -> Iterator[Finding]:
    """Evaluations during training: planned versions, their own weights, every attempt told of."""
    if material.config is None:
        return
    config = material.config
    planned = config.eval_versions
    made = {row.update: row.adapter_sha256 for row in material.updates}
    counts: Counter[tuple[int, str]] = Counter()
    for record in material.evals:
        where = f"attempt {record.attempt_id}"
        version = record.version
        if version not in planned or record.arm != eval_arm(version):
            message = f"evaluates version {version} as {record.arm}, which is not planned"
            yield Finding(code="unexpected-eval", where=where, message=message)
        elif record.adapter_sha256 in material.superseded:
            continue
        elif version in made and record.adapter_sha256 != made[version]:
            yield Finding(
                code="arm-adapter",
                where=where,
                message=f"ran on adapter {(record.adapter_sha256 or 'none')[:16]}; update "
                f"{version} made {(made[version] or 'none')[:16]}",
            )
        elif record.outcome == "graded":
            counts[version, record.task_name] += 1
    yield from _check_eval_counts(material, counts)


def _check_eval_counts(material: Material, counts: Counter[tuple[int, str]]) -> Iterator[Finding]:
    config = material.config
    if config is None or config.eval is None:
        return
    told = {e.fields.get("version"): e.fields for e in material.events if e.kind == EVAL_OVER}
    for version in config.eval_versions:
        cells = {task.name: counts[version, task.name] for task in material.eval_tasks}
        total, wanted = sum(cells.values()), config.eval.attempts * len(cells)
        said = told.get(version)
        where = f"arm {eval_arm(version)}"
        if said is None:
            yield Finding(code="eval-count", where=where, message="its end is not told of")
        elif said.get("graded") != total or (total < wanted and not said.get("reason")):
            yield Finding(
                code="eval-count",
                where=where,
                message=f"has {total} graded attempts of {wanted}; when it ended it had "
                f"{said.get('graded')}",
            )
        for name, count in cells.items():
            if count > config.eval.attempts:
                yield Finding(
                    code="eval-count",
                    where=f"{where} task {name}",
                    message=f"has {count} graded attempts, not {config.eval.attempts}",
                )


def check_proofs(material: Material) -> Iterator[Finding]:
    """Every worker had proven its way to every replica before the first attempt at an arm."""
    if material.serving is None:
        return
    workers, replicas = material.serving.episodes.workers, material.serving.engine.replicas
    proven: set[object] = set()
    told = False
    for event in material.events:
        fields = event.fields
        if event.kind == BEGIN:
            proven, told = set(), False
        elif event.kind == PROVEN:
            reached = fields.get("replicas")
            if isinstance(reached, list) and len(reached) == replicas:
                proven.add(fields.get("worker"))
        elif event.kind == DISPATCH and fields.get("stage") == "heldout" and not told:
            told = len(proven) < workers
            if told:
                yield Finding(
                    code="unproven-worker",
                    where=f"attempt {fields.get('attempt_id')}",
                    message=f"began when {len(proven)} of {workers} workers had proven key, "
                    "model name and a generation at every replica",
                )


def check_stopped(material: Material) -> Iterator[Finding]:
    """Nothing that the run had started is left."""
    for event in material.events:
        left = event.fields.get("left")
        if event.kind == STOPPED and left:
            yield Finding(
                code="process-left", where="events.jsonl stopped", message=f"left behind: {left}"
            )


def _check_adapter_files(material: Material, pin: ArmPin) -> Iterator[Finding]:
    if pin.directory is None:
        return
    folder = material.directory.root / pin.directory
    if not folder.is_dir():
        yield Finding(
            code="adapter-missing", where=f"arm {pin.arm}", message=f"{pin.directory} is gone"
        )
        return
    try:
        found = sha256_files(folder)
    except OSError as error:
        yield Finding(
            code="adapter-unreadable",
            where=f"arm {pin.arm}",
            message=f"{pin.directory} can't be read: {error.strerror}",
        )
        return
    for name in sorted(pin.files.keys() | found.keys()):
        if pin.files.get(name) != found.get(name):
            yield Finding(
                code="adapter-swapped",
                where=f"arm {pin.arm} file {pin.directory}/{name}",
                message="is not what arms.json pins",
            )
