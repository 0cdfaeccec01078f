"""What was submitted, and what became of it: `python -m rl.receipts`.

Invariants:
- `ls` and `inspect` change nothing; `resolve` writes one file, once.
- What a provider holds is asked of the provider; what a person found out is written down
  as such, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.errors import EXIT_OK, CampaignError, ConfigurationError, run_command

if TYPE_CHECKING:
    from rl.evidence.intents import Entry, Intent

DEFAULT_STATE = Path("state")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.receipts",
        description="Show intents and receipts of what was submitted, ask the provider what it "
        "holds, and state what was found of a submission whose launcher died in between.",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=DEFAULT_STATE,
        help="the directory with receipts/ in it (%(default)s)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="list every submission")
    inspect = commands.add_parser(
        "inspect", help="one run's submissions, and what their providers say"
    )
    inspect.add_argument("run", help="run id")
    resolve = commands.add_parser("resolve", help="state what the provider holds of a submission")
    resolve.add_argument("run", help="run id")
    resolve.add_argument("submission", help="submission id, such as RUN.a1")
    resolve.add_argument(
        "--finding",
        choices=("absent", "present"),
        required=True,
        help="absent: the provider holds nothing of it, and a new attempt may be launched",
    )
    resolve.add_argument(
        "--call",
        metavar="NAME=ID",
        action="append",
        default=[],
        help="present: the provider's id; repeatable",
    )
    resolve.add_argument("--because", required=True, help="how it was found out")
    for command in (ls, inspect, resolve):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    from rl.evidence.receipts import Ledger

    options = _parser().parse_args(argv)
    ledger = Ledger(options.state / "receipts")
    if options.command == "ls":
        entries = [entry for run in ledger.runs() for entry in ledger.entries(run)]
        _show(options, [_row(entry) for entry in entries], "nothing was submitted")
    elif options.command == "inspect":
        entries = ledger.entries(options.run)
        if not entries:
            raise ConfigurationError(
                f"nothing was submitted as '{options.run}'",
                str(ledger.root),
                "see `python -m rl.receipts ls`",
            )
        rows = [_row(entry) | {"provider_says": _ask(entry.intent)} for entry in entries]
        _show(options, [row | {"next": _next(row)} for row in rows], "")
    else:
        calls = dict(_call(text) for text in options.call)
        finding, because = options.finding, options.because
        ledger.resolve(options.run, options.submission, finding, because, calls)
        _show(options, [_row(ledger.entry(options.run, options.submission))], "")
    return EXIT_OK


def _row(entry: Entry) -> dict[str, Any]:
    intent = entry.intent
    standing = "being submitted" if entry.held else entry.standing
    return {
        "run": intent.run_id,
        "submission": intent.submission_id,
        "provider": intent.provider,
        "target": intent.target,
        "asked": intent.asked,
        "standing": standing,
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(intent.created_at)),
        "launcher": f"{intent.host}, process {intent.pid}",
        "calls": entry.calls,
        "tags": intent.tags,
        "reason": "" if entry.resolution is None else entry.resolution.reason,
    }


def _ask(intent: Intent) -> str:
    """What the provider says of a submission; a refusal is an answer too."""
    try:
        return asyncio.run(_ask_ray(intent)) if intent.provider == "ray" else _ask_modal(intent)
    except CampaignError as error:
        return f"could not be asked: {error.what}"


async def _ask_ray(intent: Intent) -> str:
    from actors.ray_auth import use_tokens
    from actors.ray_jobs import RayJobs

    use_tokens()
    jobs = RayJobs(intent.target)
    await jobs.connect()
    job = await jobs.find(intent.submission_id)
    if job is None:
        return "there is no such job"
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{job.status}{code}"


def _ask_modal(intent: Intent) -> str:
    from rl.provision.inquiry import told, what_exists

    return told(intent, what_exists(intent))


def _next(row: dict[str, Any]) -> str:
    """What a person can do about it."""
    run, name = row["run"], row["submission"]
    if row["standing"] == "ambiguous" and row["provider"] == "ray":
        return f"run the same rl.submit again: it asks {row['target']} under the same id"
    if row["standing"] == "ambiguous":
        return (
            f"state what you found: python -m rl.receipts resolve {run} {name} "
            "--finding absent --because WHY, or --finding present --call NAME=ID --because WHY"
        )
    if row["standing"] == "absent":
        return "launch it again"
    return "wait for it" if row["standing"] == "being submitted" else "nothing"


def _call(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigurationError("not of the form NAME=ID", f"--call {text}")
    return name, value


def _show(options: argparse.Namespace, rows: list[dict[str, Any]], nothing: str) -> None:
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print(nothing)
    for row in rows:
        calls = ", ".join(f"{key} {value}" for key, value in row["calls"].items())
        print(f"{row['submission']}: {row['standing']}" + (f" ({calls})" if calls else ""))
        print(f"    {row['asked']} at {row['provider']}, {row['target']}")
        print(f"    since {row['since']}, by {row['launcher']}")
        for key, words in (("reason", "found"), ("provider_says", "provider"), ("next", "next")):
            if row.get(key):
                print(f"    {words}: {row[key]}")


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
