"""`python -m rl.final`: one whole RL campaign."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rl.config import CampaignConfig
from rl.config_file import describe, load_config
from rl.errors import EXIT_OK, ConfigurationError, Interrupted, run_command
from rl.running import (
    ROOT,
    add_run_options,
    check_state,
    continuing,
    interrupt,
    origin_of,
    overrides,
    refuse_with_resume,
    run_until_signal,
)

if TYPE_CHECKING:
    from rl.evidence.code_pin import CodePin
    from rl.forecast import Forecast
    from rl.prepare import PreparedTasks
    from rl.progress import Progress

DEFAULT_CONFIG = Path("configs/local.toml")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.final",
        description="Run a whole RL campaign: gate the tasks, freeze the configuration, train "
        "asynchronously, checkpoint, evaluate base and final weights on held-out tasks, audit, "
        "and write a report.",
    )
    parser.add_argument(
        "--config", type=Path, help=f"configuration file (default: {DEFAULT_CONFIG})"
    )
    add_run_options(parser, "campaign")
    parser.add_argument(
        "--json", action="store_true", help="print the plan, or the closing summary, as JSON"
    )
    parser.add_argument(
        "--durations",
        type=Path,
        help="with --plan: what the forecast goes by, a file like those in configs/forecast/ or "
        "the directory of an earlier campaign (default: by engine.device)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="walk the whole launch and campaign on this machine, with a stand-in for what costs",
    )
    parser.add_argument(
        "--train-only",
        action="store_true",
        help="end once the last checkpoint is proven; evaluation and report are left to --resume",
    )
    parser.add_argument(
        "--take-in",
        metavar="RUN",
        action="append",
        default=[],
        help="with --resume: take in the held-out attempts of a run of rl.heldout --shard; "
        "repeatable",
    )
    parser.add_argument(
        "--describe-config", action="store_true", help="list every configuration key and exit"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    check_state(options.state)
    if options.describe_config:
        for key, text in describe():
            print(f"{key:<36} {text}")
        return EXIT_OK
    _refuse_parts(options)
    if options.plan:
        return _plan(options)
    if options.durations is not None:
        raise ConfigurationError("goes with --plan", "--durations", "leave it out, or add --plan")
    if options.rehearse:
        return _rehearse(options)
    directory = None
    try:
        if options.resume is not None:
            from rl.campaign import frozen_config
            from rl.evidence.layout import open_existing

            refuse_with_resume(options, ["config"])
            directory = open_existing(options.resume, options.state / "campaigns")
            config = frozen_config(directory)
        else:
            config = _config(options)
        return _run(options, config)
    except KeyboardInterrupt:
        raise Interrupted("stopped while preparing", remedy="run the same command again") from None


def _refuse_parts(options: argparse.Namespace) -> None:
    """Refuse `--take-in` and `--train-only` where they mean nothing.

    Raises:
        ConfigurationError: there is nothing to take in into, or nothing is run.
    """
    if options.train_only and (options.plan or options.rehearse):
        raise ConfigurationError(
            "goes with a campaign that is run", "--train-only", "leave it out here"
        )
    if options.take_in and (options.resume is None or options.train_only):
        raise ConfigurationError(
            "goes with --resume, and without --train-only: a campaign is evaluated when it is "
            "trained",
            "--take-in",
            "train first, with --train-only",
        )


def _config(options: argparse.Namespace) -> CampaignConfig:
    return load_config(options.config or DEFAULT_CONFIG, overrides(options))


def _plan(options: argparse.Namespace) -> int:
    """Validate everything that can be validated without starting anything."""
    from rl.evidence.frozen import require_distinct
    from rl.forecast import forecast_lines
    from rl.plan import plan, plan_lines
    from rl.prepare import check_model, prepare_tasks
    from sandboxes.provider import SandboxProvider

    if options.resume is not None:
        raise ConfigurationError(
            "can't be combined with --plan: what is frozen is in frozen.json",
            f"--resume {options.resume}",
            "leave one of them out",
        )
    config = _config(options)
    SandboxProvider(config.sandbox).preflight()
    model = check_model(config.model)
    tasks = prepare_tasks(config.tasks, options.state)
    require_distinct(tasks.train, tasks.heldout, config.tasks.near_duplicate)
    found = _forecast(options, config)
    if options.json:
        print(json.dumps(plan(config) | {"forecast": found.model_dump(mode="json")}, indent=2))
        return EXIT_OK
    for line in [*plan_lines(config), *forecast_lines(found)]:
        print(line)
    print(
        f"validated: configuration {options.config or DEFAULT_CONFIG}; model: {model}; "
        f"{len(tasks.train)} training and {len(tasks.heldout)} held-out task packages in "
        f"{tasks.root}, disjoint by digest and by instruction. "
        "Nothing was started."
    )
    return EXIT_OK


def _forecast(options: argparse.Namespace, config: CampaignConfig) -> Forecast:
    """What time and money the campaign will take.

    Raises:
        ConfigurationError: durations or prices can't be read.
        EvidenceError: the campaign that durations are taken from is damaged.
    """
    from rl.evidence.prices import DEFAULT, load_prices
    from rl.forecast import forecast
    from rl.forecast_config import SHIPPED, load_durations

    own = SHIPPED / ("h100.toml" if config.engine.device == "cuda" else "local.toml")
    durations, recording = load_durations(options.durations or ROOT / own)
    return forecast(config, durations, load_prices(ROOT / DEFAULT), recording)


def _rehearse(options: argparse.Namespace) -> int:
    """Walk what a launch would go through."""
    from rl.rehearsing import rehearse

    given = [name for name in ("resume", "run_id", "address") if getattr(options, name) is not None]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigurationError(
            f"{names} can't be combined with --rehearse: it makes a run and a cluster of its own",
            "--rehearse",
            "leave it out",
        )
    origin = origin_of(options, DEFAULT_CONFIG)
    return rehearse(_config(options), origin, options.state, options.json)


def _run(options: argparse.Namespace, config: CampaignConfig) -> int:
    from rl.campaign import Campaign
    from rl.evidence.code_pin import pin_code
    from rl.evidence.layout import create, find_run, new_run_id, open_existing
    from rl.prepare import prepare_model, prepare_tasks
    from rl.progress import Progress
    from sandboxes.provider import SandboxProvider

    SandboxProvider(config.sandbox).preflight()
    # With --json standard output holds the summary alone.
    with Progress(stderr=options.json) as progress:
        progress.stage("prepare", f"model {config.model.name} and task packages")
        tasks = prepare_tasks(config.tasks, options.state)
        code = pin_code(ROOT)
        if options.resume is None:
            options.run_id = options.run_id or new_run_id(config.name)
            _require_launch(options, config, tasks, code, progress)
        model = prepare_model(config.model, options.state)
        root = options.state / "campaigns"
        if options.resume is not None:
            directory = open_existing(options.resume, root)
        else:
            directory = create(options.run_id, root)
        campaign = Campaign(
            config=config,
            directory=directory,
            model=model,
            tasks=tasks,
            task_root=tasks.root,
            code=code,
            gate_report=options.state / "gates" / "report.json",
            progress=progress,
            address=options.address,
            dashboard=not options.no_dashboard,
            train_only=options.train_only,
            shards=[find_run(name, options.state / "heldout") for name in options.take_in],
        )
        campaign.freeze()
        how = continuing("rl.final", options)
        run_until_signal(campaign.run, how, directory.run_id)
    if options.json:
        outcome = directory.arms if options.train_only else directory.summary
        print(outcome.read_text(encoding="utf-8"))
    return EXIT_OK


def _require_launch(
    options: argparse.Namespace,
    config: CampaignConfig,
    tasks: PreparedTasks,
    code: CodePin,
    progress: Progress,
) -> None:
    """Walk the guards of a campaign that costs; whoever has submitted this one has done so.

    Raises:
        CampaignError: a guard refuses; nothing was started.
    """
    from rl.evidence.code_pin import SUBMITTED_CODE
    from rl.evidence.receipts import Ledger
    from rl.guards import Launch, rents, require_launch

    if not rents(config) or (ROOT / SUBMITTED_CODE).exists():
        return
    origin, state = origin_of(options, DEFAULT_CONFIG), options.state
    launch = Launch(config, origin, tasks.train, tasks.heldout, tasks.root, code, state)
    for guard in require_launch(launch, Ledger(state / "receipts"), options.run_id):
        progress.note(f"guard holds: {guard.name}: {guard.found}")


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
