"""What the commands that run something share: options, signals, continuing.

Invariants:
- A signal stops a run in order, once; the message says how to go on.
- A continued run takes nothing from the command line that was frozen.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rl.errors import CampaignError, ConfigurationError, Interrupted

DEFAULT_STATE = Path("state")
ROOT = Path(__file__).resolve().parent.parent


def add_run_options(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of every command that runs `what`."""
    parser.add_argument("--run-id", help=f"the {what}'s name (default: configuration and time)")
    parser.add_argument("--resume", metavar="RUN", help=f"continue an interrupted {what}")
    parser.add_argument(
        "--plan", action="store_true", help="print what would be done; start nothing"
    )
    parser.add_argument("--seed", type=int, help="replaces the configuration's seed")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the configuration, such as engine.replicas=2; repeatable",
    )
    parser.add_argument(
        "--state", type=Path, default=DEFAULT_STATE, help="where everything is kept (%(default)s)"
    )
    parser.add_argument("--address", help="Ray cluster to use (default: RAY_ADDRESS, or a new one)")
    parser.add_argument("--no-dashboard", action="store_true", help="start Ray without dashboard")


def check_state(state: Path) -> None:
    """Refuse a path that can hold nothing.

    Raises:
        ConfigurationError: it is empty.
    """
    if not str(state) or str(state) == ".":
        raise ConfigurationError("an empty path", "--state", "name a directory, such as state")


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Values that the command line puts in the place of the configuration's.

    Raises:
        ConfigurationError: one is not of the form KEY=VALUE.
    """
    given = dict(_assignment(text) for text in options.set)
    if options.seed is not None:
        given["seed"] = options.seed
    return given


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


def origin_of(options: argparse.Namespace, default: Path) -> str:
    """What tells a configuration on a command line: its file, and what replaces its values."""
    seed = [] if options.seed is None else ["--seed", str(options.seed)]
    replaced = [part for text in options.set for part in ("--set", text)]
    return shlex.join([str(options.config or default), *seed, *replaced])


def refuse_with_resume(options: argparse.Namespace, frozen: Sequence[str]) -> None:
    """A continued run has its configuration already.

    Args:
        options: the command line.
        frozen: names of options that say what is frozen, beside those of every command.

    Raises:
        ConfigurationError: one of them is given.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("set", "seed", "run_id", *frozen)
        if getattr(options, name) not in (None, [], ())
    ]
    if options.plan:
        given.append("--plan")
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} can't be combined with --resume: what is run is frozen",
            options.resume,
            "leave them out, or start a new run",
        )


def interrupt(number: int, frame: object) -> None:
    """A signal handler: `ray job stop` and `kill` are a Ctrl-C."""
    del number, frame
    raise KeyboardInterrupt


def run_until_signal(run: Callable[[], Awaitable[None]], command: str, run_id: str) -> None:
    """Run to the end; an interrupt stops it in order, and says how to go on.

    Args:
        run: what is run.
        command: how it is continued, without the run's name: `python -m rl.final --resume`.
        run_id: the run's name.

    Raises:
        Interrupted: a signal stopped it.
        CampaignError: what the run raised, with a remedy.
    """
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

    how = f"continue it with: {command} {run_id}"
    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted(
            f"stopped by {received[0] if received else 'cancellation'}; nothing is lost",
            f"run {run_id}",
            how,
        ) from None
    except CampaignError as error:
        if not error.remedy:
            error.remedy = how
        raise


def continuing(module: str, options: argparse.Namespace) -> str:
    """The command that continues a run of `module`, without the run's name."""
    where = "" if options.state == DEFAULT_STATE else f" --state {options.state}"
    return f"python -m {module}{where} --resume"
