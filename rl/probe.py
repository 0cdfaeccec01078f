"""A policy experiment on a few tasks, without training: `python -m rl.probe`.

It says what a policy does and what it takes: turns, tokens, latencies, exit codes,
stop reasons, prefix-cache hits.

Invariants:
- A probe is reproducible from its record: `--repeat PROBE` runs the same tasks, seeds,
  weights and settings again, and says which attempts sampled the same tokens.
- Nothing is trained, and no task needs to be held out: its pass rate is no claim.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rl.config_file import load_config
from rl.errors import EXIT_OK, ConfigurationError, Interrupted, run_command
from rl.evaluating import (
    Wanted,
    chosen,
    folder_of,
    frozen_tasks,
    resumed,
    run_evaluation,
    show_plan,
)
from rl.heldout import adapters_of, with_overrides
from rl.running import (
    add_run_options,
    check_state,
    interrupt,
    overrides,
    refuse_with_resume,
)

if TYPE_CHECKING:
    from rl.evidence.frozen import EvaluationPlan
    from rl.evidence.layout import CampaignDir
    from rl.records import TaskRef

MODULE = "rl.probe"
DEFAULT_CONFIG = Path("configs/local.toml")
DEFAULT_TASKS = 6
DEFAULT_ATTEMPTS = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Run a policy on a few tasks without training, and tell what it did: "
        "latencies and tokens of every turn, exit codes, stop reasons, pass rates.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--config",
        type=Path,
        help=f"probe the base model of this configuration (default: {DEFAULT_CONFIG})",
    )
    what.add_argument("--campaign", help="probe base and trained weights of this campaign")
    what.add_argument("--repeat", metavar="PROBE", help="run this probe again, and compare")
    parser.add_argument(
        "--update",
        type=int,
        action="append",
        default=[],
        help="with --campaign: the checkpoint of this update; repeatable (default: the newest)",
    )
    parser.add_argument("--families", help="only these families, between commas")
    parser.add_argument("--tasks", type=int, help=f"number of tasks (default: {DEFAULT_TASKS})")
    parser.add_argument(
        "--attempts", type=int, help=f"attempts per task (default: {DEFAULT_ATTEMPTS})"
    )
    add_run_options(parser, "probe")
    parser.add_argument("--json", action="store_true", help="print the plan or summary as JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    check_state(options.state)
    if options.update and options.campaign is None:
        parser.error("--update goes with --campaign")
    try:
        if options.resume is not None:
            frozen = ["config", "campaign", "repeat", "update", "families", "tasks", "attempts"]
            refuse_with_resume(options, frozen)
            wanted = resumed(options, "probe")
        elif options.repeat is not None:
            wanted = _again(options)
        elif options.campaign is not None:
            wanted = _of_campaign(options)
        else:
            wanted = _of_config(options)
        if options.plan:
            show_plan(options, wanted)
            return EXIT_OK
        directory = run_evaluation(options, MODULE, wanted)
    except KeyboardInterrupt:
        raise Interrupted("stopped while preparing", remedy="run the same command again") from None
    if not options.json:
        _show(directory, options)
    return EXIT_OK


def _of_config(options: argparse.Namespace) -> Wanted:
    from rl.prepare import prepare_all

    config = load_config(options.config or DEFAULT_CONFIG, overrides(options))
    root, tasks = prepare_all(config.tasks, options.state)
    picked = _picked(tasks, options)
    plan = _plan(options, config.engine.replicas, len(picked), config.schedule.attempt_retries)
    return Wanted("probe", config, plan, picked, root)


def _of_campaign(options: argparse.Namespace) -> Wanted:
    from rl.evidence.frozen import load_frozen
    from rl.evidence.layout import find_run

    campaign = find_run(options.campaign, options.state / "campaigns")
    frozen = load_frozen(campaign)
    config = with_overrides(frozen, options)
    picked = _picked(frozen.heldout, options)
    return Wanted(
        "probe",
        config,
        _plan(options, config.engine.replicas, len(picked), config.schedule.attempt_retries),
        picked,
        frozen_tasks(frozen, picked, options.state),
        adapters=adapters_of(campaign, frozen, options.update),
        source=frozen.run_id,
        trained_on=frozen.train,
        model_files=frozen.model.files,
    )


def _picked(tasks: Sequence[TaskRef], options: argparse.Namespace) -> list[TaskRef]:
    """The tasks of the families that are wanted, a few of them by default."""
    if options.tasks is not None:
        return chosen(tasks, options.families, options.tasks)
    of_families = chosen(tasks, options.families, None)
    return chosen(of_families, None, min(DEFAULT_TASKS, len(of_families)))


def _again(options: argparse.Namespace) -> Wanted:
    """What another probe was begun with."""
    given = ["families", "tasks", "attempts", "set", "seed"]
    wrong = [f"--{name}" for name in given if getattr(options, name) not in (None, [])]
    if wrong:
        raise ConfigurationError(
            f"{', '.join(wrong)} can't be combined with --repeat: it runs what was recorded",
            options.repeat,
            "leave them out, or make a new probe",
        )
    named = argparse.Namespace(**{**vars(options), "resume": options.repeat})
    return resumed(named, "probe")


def _plan(options: argparse.Namespace, replicas: int, tasks: int, retries: int) -> EvaluationPlan:
    from rl.evidence.frozen import EvaluationPlan

    attempts = DEFAULT_ATTEMPTS if options.attempts is None else options.attempts
    if attempts < 1:
        raise ConfigurationError("must be at least 1", "--attempts", "give a greater number")
    return EvaluationPlan(attempts=attempts, shards=min(replicas, tasks), retries=retries)


def _show(directory: CampaignDir, options: argparse.Namespace) -> None:
    from rl.evidence.evaluation import summarize_evaluation
    from rl.evidence.layout import open_existing
    from rl.evidence.telemetry import same_tokens, telemetry_lines

    summary = summarize_evaluation(directory)
    print("\n".join(telemetry_lines(summary.telemetry)))
    for arm, rows in summary.tasks.items():
        for row in rows:
            print(f"{arm:<9}{row.task_name:<44} {row.solved}/{row.attempts}")
    if options.repeat is not None:
        earlier = open_existing(options.repeat, folder_of(options.state, "probe"))
        same, both = same_tokens(earlier.episodes("heldout"), directory.episodes("heldout"))
        print(f"repeated: {same} of {both} attempts sampled the same tokens as {options.repeat}")
    print(f"probe: {directory.root}; again: python -m {MODULE} --repeat {directory.run_id}")


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
