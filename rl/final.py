"""`python -m rl.final`: one whole RL campaign."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from rl.config import CampaignConfig
from rl.config_file import describe, load_config
from rl.errors import EXIT_OK, CampaignError, ConfigurationError, Interrupted, run_command

DEFAULT_CONFIG = Path("configs/local.toml")
DEFAULT_STATE = Path("state")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.final",
        description="Run a whole RL campaign: gate the tasks, freeze the configuration, train "
        "asynchronously, checkpoint, evaluate base and final weights on held-out tasks, audit, "
        "and write a report.",
    )
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help="configuration file (%(default)s)"
    )
    parser.add_argument("--run-id", help="the campaign's name (default: configuration and time)")
    parser.add_argument("--resume", metavar="RUN", help="continue an interrupted campaign")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be done; start nothing"
    )
    parser.add_argument("--seed", type=int, help="replaces the configuration's seed")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the configuration, such as schedule.updates=2; repeatable",
    )
    parser.add_argument(
        "--state", type=Path, default=DEFAULT_STATE, help="where everything is kept (%(default)s)"
    )
    parser.add_argument("--address", help="Ray cluster to use (default: RAY_ADDRESS, or a new one)")
    parser.add_argument("--no-dashboard", action="store_true", help="start Ray without dashboard")
    parser.add_argument(
        "--json", action="store_true", help="print the plan, or the closing summary, as JSON"
    )
    parser.add_argument(
        "--describe-config", action="store_true", help="list every configuration key and exit"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # `ray job stop` and `kill` are a Ctrl-C
    if not str(options.state) or str(options.state) == ".":
        raise ConfigurationError("an empty path", "--state", "name a directory, such as state")
    if options.describe_config:
        for key, text in describe():
            print(f"{key:<36} {text}")
        return EXIT_OK
    if options.plan:
        return _plan(options)
    directory = None
    try:
        if options.resume is not None:
            from rl.campaign import frozen_config
            from rl.evidence.layout import open_existing

            _refuse_with_resume(options)
            directory = open_existing(options.resume, options.state / "campaigns")
            config = frozen_config(directory)
        else:
            config = _config(options)
        return _run(options, config)
    except KeyboardInterrupt:
        raise Interrupted("stopped while preparing", remedy="run the same command again") from None


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt


def _config(options: argparse.Namespace) -> CampaignConfig:
    overrides = dict(_assignment(text) for text in options.set)
    if options.seed is not None:
        overrides["seed"] = options.seed
    return load_config(options.config, overrides)


def _assignment(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value in TOML; a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError("not of the form KEY=VALUE", f"--set {text}")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # no TOML: a bare word
        return key.strip(), value.strip()
    if list(parsed) != ["value"]:
        raise ConfigurationError("holds more than one value", f"--set {text!r}", "repeat --set")
    return key.strip(), parsed["value"]


def _refuse_with_resume(options: argparse.Namespace) -> None:
    """A continued campaign has its configuration already."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("set", "seed", "run_id")
        if getattr(options, name) not in (None, [])
    ]
    if options.config != DEFAULT_CONFIG:
        given.append("--config")
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} can't be combined with --resume: the configuration is frozen",
            options.resume,
            "leave them out, or start a new campaign",
        )


def _plan(options: argparse.Namespace) -> int:
    """Validate everything that can be validated without starting anything."""
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
    if options.json:
        print(json.dumps(plan(config), indent=2))
        return EXIT_OK
    for line in plan_lines(config):
        print(line)
    print(
        f"validated: configuration {options.config}; model: {model}; "
        f"{len(tasks.train)} training and {len(tasks.heldout)} held-out task packages in "
        f"{tasks.root}, disjoint by digest. "
        "Nothing was started."
    )
    return EXIT_OK


def _run(options: argparse.Namespace, config: CampaignConfig) -> int:
    from rl.campaign import Campaign
    from rl.evidence.frozen import pin_code
    from rl.evidence.layout import create, new_run_id, open_existing
    from rl.prepare import prepare_model, prepare_tasks
    from rl.progress import Progress
    from sandboxes.provider import SandboxProvider

    SandboxProvider(config.sandbox).preflight()
    # With --json standard output holds the summary alone.
    with Progress(stderr=options.json) as progress:
        progress.stage("prepare", f"model {config.model.name} and task packages")
        model = prepare_model(config.model, options.state)
        tasks = prepare_tasks(config.tasks, options.state)
        code = pin_code(Path(__file__).resolve().parent.parent)
        root = options.state / "campaigns"
        if options.resume is not None:
            directory = open_existing(options.resume, root)
        else:
            run_id = new_run_id(config.name) if options.run_id is None else options.run_id
            directory = create(run_id, root)
        campaign = Campaign(
            config=config,
            directory=directory,
            model=model,
            tasks=tasks,
            code=code,
            gate_report=options.state / "gates" / "report.json",
            progress=progress,
            address=options.address,
            dashboard=not options.no_dashboard,
        )
        campaign.freeze()
        _run_until_signal(campaign.run, options, directory.run_id)
    if options.json:
        print(directory.summary.read_text(encoding="utf-8"))
    return EXIT_OK


def _run_until_signal(run: Any, options: argparse.Namespace, run_id: str) -> None:
    """Run the campaign; an interrupt stops it in order, and says how to go on."""
    received: list[str] = []

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(run())

        def stop(name: str) -> None:
            if task.done():  # it came while the report was being written, which is done now
                return
            received.append(name)
            if len(received) == 1:
                print(f"\n{name}: stopping in order ...", file=sys.stderr, flush=True)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number.name)
        await task

    how = f"continue it with: python -m rl.final --resume {run_id}"
    if options.state != DEFAULT_STATE:
        how += f" --state {options.state}"
    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted(
            f"stopped by {received[0] if received else 'cancellation'}; nothing is lost",
            f"campaign {run_id}",
            how,
        ) from None
    except CampaignError as error:
        if not error.remedy:
            error.remedy = how
        raise


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
