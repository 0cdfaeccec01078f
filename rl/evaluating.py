"""What `rl.heldout`, `rl.screen` and `rl.probe` share: from a command line to a run.

Invariants:
- A continued evaluation is what was frozen: configuration, plan, tasks and weights
  come from its own directory, and are proven to be the same.
- Model and packages are verified against their pins before anything is started.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config import ServingConfig
from rl.errors import ConfigurationError, EvidenceError
from rl.records import AdapterBytes, TaskRef
from rl.running import ROOT, continuing, run_until_signal

if TYPE_CHECKING:
    from rl.evidence.frozen import EvaluationPlan, Frozen, RunKind
    from rl.evidence.layout import CampaignDir
    from rl.prepare import PreparedModel

FOLDERS = {"heldout": "heldout", "screen": "screens", "probe": "probes"}
GATE_REPORT = Path("gates/report.json")


@dataclass(frozen=True, slots=True)
class Wanted:
    """An evaluation as it was asked for.

    Attributes:
        kind: what it is for.
        config: the whole configuration.
        plan: attempts, shards, retries.
        tasks: what is attempted.
        task_root: folder of the packages.
        adapters: by arm name, beside the base model.
        source: the run that the adapters are of.
        trained_on: the tasks that they were trained on.
        model_files: sha256 by file of the base model that they belong to, if that is known.
    """

    kind: RunKind
    config: ServingConfig
    plan: EvaluationPlan
    tasks: Sequence[TaskRef]
    task_root: Path
    adapters: dict[str, AdapterBytes] = field(default_factory=dict[str, AdapterBytes])
    source: str = ""
    trained_on: Sequence[TaskRef] = ()
    model_files: Mapping[str, str] | None = None


def run_evaluation(options: argparse.Namespace, module: str, wanted: Wanted) -> CampaignDir:
    """Run what is wanted to its end, or what is left of it; its directory.

    Raises:
        CampaignError: with a remedy; the directory can be continued.
    """
    from rl.evaluation import Evaluation
    from rl.evidence.code_pin import pin_code
    from rl.evidence.layout import CampaignDir, create, new_run_id
    from rl.prepare import prepare_model
    from rl.progress import Progress
    from sandboxes.provider import SandboxProvider

    config = wanted.config
    SandboxProvider(config.sandbox).preflight()
    with Progress(stderr=options.json) as progress:
        progress.stage("prepare", f"model {config.model.name}, {len(wanted.tasks)} task packages")
        model = prepare_model(config.model, options.state)
        _require_model(model, wanted)
        code = pin_code(ROOT)
        root = folder_of(options.state, wanted.kind)
        run_id = options.resume or options.run_id or new_run_id(f"{config.name}-{wanted.kind}")
        evaluation = Evaluation(
            config=config,
            directory=CampaignDir(root / run_id),
            model=model,
            task_root=wanted.task_root,
            code=code,
            gate_report=options.state / GATE_REPORT,
            progress=progress,
            address=options.address,
            dashboard=not options.no_dashboard,
            kind=wanted.kind,
            plan=wanted.plan,
            tasks=wanted.tasks,
            adapters=wanted.adapters,
            source=wanted.source,
            trained_on=wanted.trained_on,
        )
        evaluation.require_gates(wanted.tasks)  # before anything is written
        if options.resume is None:
            create(run_id, root)
        evaluation.freeze()
        directory = evaluation.directory
        run_until_signal(evaluation.run, continuing(module, options), directory.run_id)
    if options.json:
        print(directory.summary.read_text(encoding="utf-8"))
    return directory


def _require_model(model: PreparedModel, wanted: Wanted) -> None:
    """An adapter is served over the very base model that it was trained over."""
    for name, digest in (wanted.model_files or {}).items():
        if model.files.get(name) != digest:
            raise EvidenceError(
                f"is not the base model that {wanted.source} was trained over",
                str(model.path / name),
                "restore it, or prepare it again: python -m rl.prepare model",
            )


def resumed(options: argparse.Namespace, kind: RunKind) -> Wanted:
    """What a frozen evaluation of this kind was begun with.

    Raises:
        ConfigurationError: there is none of the name, or it is of another kind.
        EvidenceError: tasks or weights are not what was frozen.
    """
    from rl.evaluation import kept_adapters
    from rl.evidence.frozen import load_frozen

    directory = frozen_directory(options, kind)
    frozen = load_frozen(directory)
    if frozen.kind != kind:
        raise ConfigurationError(
            f"is a {frozen.kind}, and no {kind}", str(directory.root), "name a run of its own kind"
        )
    return Wanted(
        kind=kind,
        config=frozen.serving_config(),
        plan=frozen.evaluation,
        tasks=frozen.heldout,
        task_root=frozen_tasks(frozen, frozen.heldout, options.state),
        adapters=kept_adapters(directory),
        source=frozen.source,
        trained_on=frozen.train,
    )


def frozen_tasks(frozen: Frozen, tasks: Sequence[TaskRef], state: Path) -> Path:
    """Prepare the packages of frozen tasks; the folder that they lie in.

    Raises:
        EvidenceError: one is gone or has other content.
    """
    from rl.prepare import prepare_all

    root, there = prepare_all(frozen.serving_config().tasks, state)
    found = {task.path: task.digest for task in there}
    for task in tasks:
        if found.get(task.path) != task.digest:
            raise EvidenceError(
                f"task '{task.name}' is not there as it was frozen",
                str(root / task.path),
                "restore the task packages: python -m rl.prepare tasks",
            )
    return root


def folder_of(state: Path, kind: RunKind) -> Path:
    """The folder of all runs of a kind."""
    return state / FOLDERS[kind]


def frozen_directory(options: argparse.Namespace, kind: RunKind) -> CampaignDir:
    """The directory of the run that `--resume` names."""
    from rl.evidence.layout import open_existing

    return open_existing(options.resume, folder_of(options.state, kind))


def chosen(tasks: Sequence[TaskRef], families: str | None, count: int | None) -> list[TaskRef]:
    """The tasks of some families, and of those a subset, every family in proportion.

    Raises:
        ConfigurationError: a family is unknown, or there are fewer tasks.
    """
    from rl.split import subset

    kept = list(tasks)
    if families is not None:
        names = {name.strip() for name in families.split(",") if name.strip()}
        known = {task.family for task in tasks}
        if not names or names - known:
            raise ConfigurationError(
                f"unknown family '{next(iter(sorted(names - known)), '')}'",
                "--families",
                f"known here: {', '.join(sorted(known)) or 'none'}",
            )
        kept = [task for task in kept if task.family in names]
    if count is None:
        return kept
    if count < 1:
        raise ConfigurationError("must be at least 1", "--tasks", "give a greater number")
    return subset(kept, count, "--tasks")


def show_plan(options: argparse.Namespace, wanted: Wanted) -> None:
    """Print what would be done; nothing is started."""
    from rl.prepare import check_model
    from sandboxes.provider import SandboxProvider

    config, plan = wanted.config, wanted.plan
    SandboxProvider(config.sandbox).preflight()
    arms = ["base", *wanted.adapters]
    sizes = [len(wanted.tasks[index :: plan.shards]) for index in range(plan.shards)]
    rows: dict[str, Any] = {
        "name": config.name,
        "kind": wanted.kind,
        "model": check_model(config.model),
        "arms": arms,
        "tasks": len(wanted.tasks),
        "shards": sizes,
        "attempts_per_task_and_arm": plan.attempts,
        "attempts": len(wanted.tasks) * plan.attempts * len(arms),
        "replicas": config.engine.replicas,
        "concurrent_episodes": config.episodes.concurrency,
        "concurrent_per_replica": config.episodes.concurrency // plan.shards,
        "sandbox": config.sandbox.provider,
        "watchdog_s": config.limits.watchdog_s,
    }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name, value in rows.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):<28} {shown}")
    print("Nothing was started.")
