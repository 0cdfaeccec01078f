"""Rent a campaign's machines on Modal, follow it, stop it: `python -m rl.rent`.

What costs is an app of its own for each submission (`rl.provision.build`), made after every
guard has held (`rl.provision.launch`).

Invariants: those of `rl.provision.launch`, and
- The exit code is that of the campaign's driver; a refusal is one message and exit code 2.
- Who follows may leave at any time: the calls go on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Final, NoReturn

from rl.config_file import load_config
from rl.errors import (
    EXIT_OK,
    ConfigurationError,
    Interrupted,
    run_command,
)
from rl.running import DEFAULT_STATE, overrides

FINAL: Final = Path("configs/final.toml")
SMOKE: Final = Path("configs/smoke.toml")

Outcome = tuple[int, dict[str, Any]]  # the exit code, and what a script is told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.rent",
        description="Rent a campaign's machines on Modal. Nothing is made there before every "
        "guard holds; docs/modal.md says what is rented, and what has to be prepared once.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare_account",
        help="make the volumes and fill them with model and tasks: no GPU, no model call",
    )
    train = commands.add_parser(
        "train", help="the short run on two GPUs, whole: one or two updates"
    )
    final = commands.add_parser(
        "final_train",
        help="the campaign: training, held-out workers, report; --resume RUN continues one",
    )
    for command, default in ((prepare, FINAL), (train, SMOKE), (final, FINAL)):
        _add_configuration(command, default)
    train.add_argument(
        "--max-steps", type=int, default=2, help="updates, 1 or 2 (default: %(default)s)"
    )
    train.add_argument(
        "--concurrency",
        type=int,
        default=16,
        help="episodes at a time, 16 or 32 (default: %(default)s)",
    )
    for command in (train, final):
        command.add_argument("--run-id", help="the campaign's name (default: name and time)")
        command.add_argument("--resume", metavar="RUN", help="continue one that has ended early")
        command.add_argument(
            "--detach", action="store_true", help="do not follow what was launched"
        )
    follow = commands.add_parser("follow", help="relay what a launched campaign prints")
    stop = commands.add_parser("stop", help="cancel a campaign's calls: they stop in order")
    for command in (follow, stop):
        command.add_argument("run", help="run id")
    for command in (prepare, train, final, follow, stop):
        command.add_argument(
            "--json", action="store_true", help="print the outcome as JSON at the end"
        )
    for command in (train, final, follow, stop):
        command.add_argument(
            "--state",
            type=Path,
            default=DEFAULT_STATE,
            help="where gates, rehearsals and receipts are kept, on this machine (%(default)s)",
        )
    return parser


def _add_configuration(parser: argparse.ArgumentParser, default: Path) -> None:
    parser.add_argument(
        "--config", type=Path, default=default, help="configuration file (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the configuration, such as modal.workspace=my-lab; repeatable",
    )
    parser.add_argument("--seed", type=int, help="replaces the configuration's seed")


def main(argv: list[str]) -> int:
    """Run the command; with --json, standard output holds the outcome alone."""
    options = _parser().parse_args(argv)
    run: dict[str, Callable[[argparse.Namespace], Outcome]] = {
        "prepare_account": _prepare,
        "train": _train,
        "final_train": lambda given: _launch(given, {}),
        "follow": lambda given: _follow(given, given.run),
        "stop": _stop,
    }
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        code, outcome = run[options.command](options)
    if options.json:
        print(json.dumps(outcome, indent=2))
    return code


def _prepare(options: argparse.Namespace) -> Outcome:
    from rl.provision.launch import prepare_account as prepare

    found = prepare(load_config(options.config, overrides(options)))
    print(f"modal: prepared: {found}")
    return EXIT_OK, {"prepared": found}


def _train(options: argparse.Namespace) -> Outcome:
    from rl.provision.functions import smoke_overrides

    return _launch(options, smoke_overrides(options.max_steps, options.concurrency))


def _launch(options: argparse.Namespace, bounded: dict[str, Any]) -> Outcome:
    """Launch the function that the command is named after, and follow it.

    Args:
        options: the command line.
        bounded: what the command itself replaces in the configuration.
    """
    from rl.evidence.layout import new_run_id
    from rl.provision.launch import Request, launch

    if options.run_id is not None and options.resume is not None:
        raise ConfigurationError(
            "--run-id and --resume can't be combined", "command line", "give one of them"
        )
    config = load_config(options.config, overrides(options) | bounded)
    sets = [*options.set, *(f"{key}={json.dumps(value)}" for key, value in bounded.items())]
    seed = [] if options.seed is None else ["--seed", str(options.seed)]
    origin = [str(options.config), *seed, *(part for text in sets for part in ("--set", text))]
    run_id = options.resume or options.run_id or new_run_id(config.name)
    resume = options.resume is not None
    request = Request(options.command, config, shlex.join(origin), run_id, resume, options.state)
    calls = launch(request)
    if not options.detach:
        return _follow(options, run_id)
    print(f"modal: follow it with: {_following(run_id)}", flush=True)
    return EXIT_OK, {"run_id": run_id, "calls": calls}


def _follow(options: argparse.Namespace, run_id: str) -> Outcome:
    from rl.evidence.receipts import Ledger
    from rl.provision.following import follow, newest

    entry = newest(Ledger(options.state / "receipts"), run_id)
    try:
        answers = follow(entry)
    except KeyboardInterrupt:
        raise Interrupted(
            "detached; the calls go on", run_id, f"follow them with: {_following(run_id)}"
        ) from None
    code = next((one.exit_code for one in answers.values() if one.ending != "done"), EXIT_OK)
    told = {name: one.model_dump(mode="json") for name, one in answers.items()}
    return code, {"run_id": run_id, "exit_code": code, "calls": told}


def _stop(options: argparse.Namespace) -> Outcome:
    from rl.evidence.receipts import Ledger
    from rl.provision.following import newest, stop

    stopped = stop(newest(Ledger(options.state / "receipts"), options.run))
    print(f"modal: stopped: {', '.join(stopped) or 'nothing was running'}")
    return EXIT_OK, {"run_id": options.run, "stopped": stopped}


def _following(run_id: str) -> str:
    return f"python -m rl.rent follow {run_id}"


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
