"""Submit a campaign to a Ray cluster and follow it: `python -m rl.submit`.

Run again, it attaches to what it has submitted; killed, it loses nothing.

Invariants:
- An intent is on disk before the cluster is asked, a receipt after it has answered.
- A submission id is used once: RUN.a1, and RUN.a2 and so on for each --resume, which
  submits only when the attempt before has ended.
- What is wrong here is refused here: nothing is submitted with a configuration that can't run.
- The exit code is the driver's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rl.config_file import load_config
from rl.errors import EXIT_OK, ConfigurationError, Interrupted, run_command
from rl.running import ROOT, origin_of, overrides, refuse_with_resume

if TYPE_CHECKING:
    from rl.submitting import Submission

DEFAULT_CONFIG = Path("configs/local.toml")
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
DEFAULT_RECEIPTS = Path("state/receipts")
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.submit",
        description="Submit a campaign to a Ray cluster, follow it, and end with its exit code. "
        "Run it again with the same --run-id to attach; Ctrl-C detaches, the job goes on.",
    )
    parser.add_argument(
        "--address",
        help=f"the cluster's job server (default: RAY_ADDRESS, or {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--config", type=Path, help=f"configuration file (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument("--run-id", help="the campaign's name (default: configuration and time)")
    parser.add_argument("--resume", metavar="RUN", help="continue a campaign that has ended early")
    parser.add_argument("--stop", metavar="RUN", help="have a campaign's job stop in order")
    parser.add_argument(
        "--state",
        type=Path,
        default=ROOT / "state",
        help="where the campaign is kept, on the node where the driver runs (%(default)s)",
    )
    parser.add_argument(
        "--receipts",
        type=Path,
        default=DEFAULT_RECEIPTS,
        help="where intents and receipts are kept, on this machine (%(default)s)",
    )
    parser.add_argument("--seed", type=int, help="replaces the configuration's seed")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the configuration; repeatable",
    )
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable of the job's environment, no secret: Ray shows it; repeatable",
    )
    parser.add_argument(
        "--train-only", action="store_true", help="as for rl.final: evaluation is left to --resume"
    )
    parser.add_argument("--detach", action="store_true", help="do not follow what was submitted")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be submitted; ask nobody"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON at the end")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(argv)
    submission = _submission(options)
    if options.plan:
        print(json.dumps(submission.plan(), indent=2))
        return EXIT_OK
    if not options.resume and not options.stop:
        _require_launch(options, submission)
    try:
        outcome = asyncio.run(submission.stop() if options.stop else submission.run(options.detach))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted(
            "detached; the job goes on",
            submission.run_id,
            f"attach with: {submission.again}; stop it with: {submission.stopping}",
        ) from None
    if options.json:
        print(json.dumps(outcome.row(), indent=2))
    return outcome.exit_code


def _submission(options: argparse.Namespace) -> Submission:
    """What the command line asks for, checked as far as it can be here.

    Raises:
        ConfigurationError: an option or the configuration is wrong.
    """
    from rl.evidence.code_pin import pin_code
    from rl.evidence.layout import new_run_id
    from rl.submitting import Submission

    named = [name for name in ("run_id", "resume", "stop") if getattr(options, name) is not None]
    if len(named) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigurationError(f"{both} can't be combined", "command line", "give one of them")
    if not options.state.is_absolute():
        raise ConfigurationError(
            "must be absolute: the job runs in a copy of the sources",
            f"--state {options.state}",
            f"such as {options.state.absolute()}",
        )
    if options.resume is not None:
        refuse_with_resume(options, ["config"])
    config = load_config(options.config or DEFAULT_CONFIG, overrides(options))
    return Submission(
        address=options.address or os.environ.get("RAY_ADDRESS") or DEFAULT_ADDRESS,
        run_id=options.resume or options.stop or options.run_id or new_run_id(config.name),
        resume=options.resume is not None,
        train_only=options.train_only,
        config=config,
        state=options.state,
        receipts=options.receipts,
        variables=dict(_variable(text) for text in options.env),
        code=pin_code(ROOT),
        out=sys.stderr if options.json else sys.stdout,
    )


def _require_launch(options: argparse.Namespace, submission: Submission) -> None:
    """Walk the guards of a launch that costs, unless it was submitted before.

    From a copy of the sources that was submitted itself, its launcher has walked them.

    Raises:
        CampaignError: a guard refuses; nothing is submitted.
    """
    from rl.evidence.code_pin import SUBMITTED_CODE
    from rl.evidence.receipts import Ledger
    from rl.guards import Launch, rents, require_launch
    from rl.prepare import prepare_tasks

    config, state = submission.config, options.receipts.parent
    ledger = Ledger(submission.receipts)
    launched = (ROOT / SUBMITTED_CODE).exists()
    if launched or not rents(config) or ledger.entries(submission.run_id):
        return
    tasks = prepare_tasks(config.tasks, state)
    origin = origin_of(options, DEFAULT_CONFIG)
    launch = Launch(config, origin, tasks.train, tasks.heldout, tasks.root, submission.code, state)
    for guard in require_launch(launch, ledger, submission.run_id):
        print(f"submit: guard holds: {guard.name}: {guard.found}", file=submission.out)


def _variable(text: str) -> tuple[str, str]:
    """NAME=VALUE of --env.

    Raises:
        ConfigurationError: it is not of this form, or looks like a secret.
    """
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ConfigurationError("not of the form NAME=VALUE", f"--env {name}")
    if _SECRET_NAME.search(name):
        raise ConfigurationError(
            "looks like a secret, and Ray shows a job's variables to everybody who may see jobs",
            f"--env {name}",
            "set it in the environment in which the cluster's nodes are started",
        )
    return name, value


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
