"""Obtain the base model and the tasks of a campaign, once: `python -m rl.prepare`.

Invariants:
- The model is pinned and complete (`rl.learner.base_model`).
- Tasks of a cohort are verified against their pins, and against the cohort's
  manifest to the byte; training and held-out ones are disjoint by content digest.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.config import TasksConfig
from rl.config_file import load_config
from rl.errors import EXIT_OK, ConfigurationError, run_command
from rl.evidence.selection import read_selection
from rl.learner.base_model import (
    PreparedModel,
    check_model,
    expanded,
    prepare_model,
    require_model,
)
from rl.records import TaskRef
from rl.split import load_tasks, split

if TYPE_CHECKING:
    from sandboxes.source import TaskSource
    from sandboxes.tasks import TaskPackage

__all__ = [
    "PreparedModel",
    "PreparedTasks",
    "check_model",
    "prepare_model",
    "prepare_tasks",
    "require_model",
]

DEFAULT_CONFIG = Path("configs/local.toml")
DEFAULT_ROOT = Path("state")


@dataclass(frozen=True, slots=True)
class PreparedTasks:
    """Task packages in `root`, split; each task's path is relative to `root`."""

    root: Path
    train: list[TaskRef]
    heldout: list[TaskRef]


def prepare_tasks(config: TasksConfig, root: Path = DEFAULT_ROOT) -> PreparedTasks:
    """The tasks that `config` asks for, split into training and held-out ones.

    Args:
        config: the configuration's tasks section.
        root: directory under which packages and manifests are kept.

    Raises:
        ConfigurationError: there are fewer tasks than asked for, or a package is wrong.
        InfrastructureError: a repository can't be reached, or the disk is full.
    """
    folder, tasks = _all_tasks(config, root)
    if config.split is not None:
        train, heldout = _selected(tasks, config, expanded(config.split, "tasks.split"))
    else:
        train, heldout = split(tasks, config, where=str(folder))
    return PreparedTasks(root=folder.resolve(), train=train, heldout=heldout)


def prepare_all(config: TasksConfig, root: Path = DEFAULT_ROOT) -> tuple[Path, list[TaskRef]]:
    """Every task of a cohort or folder, and where they lie; nothing is split.

    Raises:
        ConfigurationError, InfrastructureError: as for `prepare_tasks`.
    """
    folder, tasks = _all_tasks(config, root)
    return folder.resolve(), tasks


def _all_tasks(config: TasksConfig, root: Path) -> tuple[Path, list[TaskRef]]:
    from sandboxes.manifest import prepare_cohort
    from sandboxes.source import SHIPPED, draw_bank, read_task_source

    if config.source == "cohort":
        source = read_task_source(expanded(config.pins, "tasks.pins") if config.pins else SHIPPED)
        cohort = prepare_cohort(source, config.cohort or "", root)
        folder = cohort.folder
        tasks = [_task_ref(package, folder.resolve()) for package in cohort.packages]
    else:
        if config.source == "path":
            folder = expanded(config.path or "", "tasks.path")
            if not folder.is_dir():
                raise ConfigurationError(
                    "no such folder of task packages", str(folder), "correct tasks.path"
                )
        else:
            count = config.train + config.heldout
            folder = draw_bank(config.families, count, config.seed, root / "tasks")
        tasks = load_tasks(folder)
    return folder, tasks


def _selected(
    tasks: Sequence[TaskRef], config: TasksConfig, path: Path
) -> tuple[list[TaskRef], list[TaskRef]]:
    """The split of a selection, by content.

    Raises:
        ConfigurationError: it is of other tasks, or of other sizes.
    """
    selection = read_selection(path)
    by_digest = {task.digest: task for task in tasks}
    names = {task.digest: task.name for task in selection.tasks}
    sets: list[list[TaskRef]] = []
    for key, digests in (("train", selection.train), ("heldout", selection.heldout)):
        gone = [digest for digest in digests if digest not in by_digest]
        if gone:
            raise ConfigurationError(
                f"task '{names[gone[0]]}' of it is not among the {len(tasks)} tasks prepared, "
                "or has other content there",
                str(path),
                "name the folder or cohort that was screened",
            )
        wanted = getattr(config, key)
        if len(digests) != wanted:
            raise ConfigurationError(
                f"holds {len(digests)} {key} tasks, and tasks.{key} is {wanted}",
                str(path),
                f"set tasks.{key} to {len(digests)}, or make another selection",
            )
        sets.append([by_digest[digest] for digest in digests])
    return sets[0], sets[1]


def _task_ref(package: TaskPackage, root: Path) -> TaskRef:
    """A package below `root`, as records name it."""
    return TaskRef(
        name=package.name,
        digest=package.digest,
        path=package.path.relative_to(root).as_posix(),
        family=package.family,
        tier=package.tier,
        instruction=package.instruction,
    )


def _task_source(options: argparse.Namespace) -> tuple[TaskSource, list[TaskPackage]]:
    """The task source that a command line names, and what of it has been loaded for that."""
    from sandboxes.manifest import pin_folder
    from sandboxes.source import SHIPPED, pin_embedded, read_task_source

    if options.folder is None:
        return pin_embedded() if options.pins else read_task_source(options.source or SHIPPED), []
    pinned = pin_folder(options.folder, options.cohort)
    left_out = pinned.left_out
    if left_out is not None:
        if not options.skip_unfit:
            left_out.remedy = f"{left_out.remedy}; --skip-unfit goes on with the others"
            raise left_out
        print(f"left out: {left_out.where}: {left_out.what}", file=sys.stderr)
    return pinned.source, pinned.packages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.prepare",
        description="Obtain what a campaign needs, once: the base model (downloaded or converted "
        "by its pin), or task packages (fetched, verified by digest, each cohort pinned by a "
        "manifest; with --config, that configuration's tasks and their split).",
    )
    parser.add_argument("what", choices=("model", "tasks"), help="what to prepare")
    parser.add_argument(
        "--config", type=Path, help=f"configuration (for the model: {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help="where results are kept (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    tasks = parser.add_argument_group("tasks")
    where = tasks.add_mutually_exclusive_group()
    where.add_argument("--source", type=Path, help="task source (sandboxes/task-source.json)")
    where.add_argument(
        "--from", dest="folder", type=Path, help="any folder of Harbor packages, pinned as it is"
    )
    tasks.add_argument("--cohort", help="this cohort alone; with --from, the name it gets")
    tasks.add_argument("--list", action="store_true", help="print one task a line")
    tasks.add_argument(
        "--skip-unfit", action="store_true", help="with --from, leave out what can't be run here"
    )
    tasks.add_argument(
        "--pins",
        action="store_true",
        help="print a task source file: for the folder of --from, or for the embedded bank",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args(argv)
    given = [options.source, options.folder, options.cohort, options.list, options.pins]
    if any(given) and (options.what == "model" or options.config is not None):
        parser.error(
            "--source, --from, --cohort, --list and --pins go with tasks, without --config"
        )
    if options.skip_unfit and options.folder is None:
        parser.error("--skip-unfit goes with --from")
    if options.pins and (options.source is not None or options.list or options.json):
        parser.error("--pins goes with neither --source nor --list nor --json")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.what == "model":
        _show_model(options)
    elif options.config is not None:
        _show_split(options)
    elif options.pins:
        print(_task_source(options)[0].model_dump_json(indent=2))
    else:
        _show_cohorts(options)
    return EXIT_OK


def _show_model(options: argparse.Namespace) -> None:
    start = time.monotonic()
    config = load_config(options.config or DEFAULT_CONFIG)
    model = prepare_model(config.model, options.root)
    if options.json:
        print(json.dumps(asdict(model), default=str, indent=2))
    else:
        print(f"model {model.name} is ready: {model.path} ({time.monotonic() - start:.1f} s)")


def _show_split(options: argparse.Namespace) -> None:
    start = time.monotonic()
    tasks = prepare_tasks(load_config(options.config).tasks, options.root)
    if options.json:
        rows = {
            "root": str(tasks.root),
            "train": [task.model_dump(mode="json") for task in tasks.train],
            "heldout": [task.model_dump(mode="json") for task in tasks.heldout],
        }
        print(json.dumps(rows, indent=2))
    else:
        print(
            f"tasks are ready: {len(tasks.train)} to train on, {len(tasks.heldout)} held out, "
            f"in {tasks.root} ({time.monotonic() - start:.1f} s)"
        )


def _show_cohorts(options: argparse.Namespace) -> None:
    from sandboxes.manifest import listing, prepare_cohort
    from sandboxes.tasks import CONFIG_NAME

    source, loaded = _task_source(options)
    rows: list[dict[str, Any]] = []
    for name in [options.cohort] if options.cohort else sorted(source.cohorts):
        start = time.monotonic()
        cohort = prepare_cohort(source, name, options.root, loaded)
        for package in cohort.packages:
            for warning in package.warnings:
                print(f"warning: {package.path / CONFIG_NAME}: {warning}", file=sys.stderr)
        packages = cohort.manifest.packages
        rows.append(
            {
                "cohort": name,
                "folder": str(cohort.folder),
                "manifest": str(cohort.path),
                "source": cohort.manifest.source.model_dump(),
                "packages": [package.model_dump(exclude={"files"}) for package in packages],
            }
        )
        if options.list and not options.json:
            print("\n".join(listing(packages)))
        elif not options.json:
            print(
                f"cohort {name} is ready: {len(packages)} packages in {cohort.folder}, pinned by "
                f"{cohort.path} ({time.monotonic() - start:.1f} s)"
            )
    if options.json:
        print(json.dumps(rows, indent=2))


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
