"""Screen task packages with the base model: `python -m rl.screen`.

Every task is attempted several times; those whose pass rate lies inside stated bounds
are kept, and a split into training and held-out tasks is drawn from them and frozen
with its provenance.

Invariants:
- Nothing starts before every task has passed its gate.
- The selection is made from graded attempts alone, and only when none is missing.
- A selection file is written once; another rule needs another file.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.config_file import describe, load_config
from rl.errors import EXIT_OK, ConfigurationError, EvidenceError, Interrupted, run_command
from rl.evaluating import (
    Wanted,
    chosen,
    folder_of,
    resumed,
    run_evaluation,
    show_plan,
)
from rl.running import (
    add_run_options,
    check_state,
    interrupt,
    overrides,
    refuse_with_resume,
)
from rl.screen_config import ScreenConfig
from rl.selection import SELECTION

if TYPE_CHECKING:
    from rl.evidence.layout import CampaignDir
    from rl.evidence.selection import SelectionRule

MODULE = "rl.screen"
DEFAULT_CONFIG = Path("configs/screen/local.toml")
# What a configuration may say of its own source, which another one takes the place of.
_NO_SOURCE: dict[str, Any] = {
    f"tasks.{key}": value
    for key, value in {"path": None, "cohort": None, "families": (), "split": None}.items()
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Attempt every task package several times with the base model, and keep the "
        "tasks whose pass rate lies inside bounds: those that reward can tell apart. The split "
        "that is drawn from them is frozen in selection.json, which [tasks] split names.",
    )
    parser.add_argument(
        "--config", type=Path, help=f"a screen's configuration (default: {DEFAULT_CONFIG})"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cohort", help="screen this cohort of the task source")
    where.add_argument("--from", dest="folder", type=Path, help="any folder of Harbor packages")
    parser.add_argument("--families", help="only these families, between commas")
    parser.add_argument("--tasks", type=int, help="only so many tasks, every family in proportion")
    add_run_options(parser, "screen")
    parser.add_argument("--json", action="store_true", help="print the plan or summary as JSON")
    parser.add_argument(
        "--describe-config", action="store_true", help="list every configuration key and exit"
    )
    rule = parser.add_argument_group("selection, from a finished screen")
    rule.add_argument("--select", metavar="RUN", help="select from this screen; run nothing")
    rule.add_argument("--low", type=float, help="least pass rate that is kept")
    rule.add_argument("--high", type=float, help="largest pass rate that is kept")
    rule.add_argument("--train", type=int, help="training tasks wanted")
    rule.add_argument("--heldout", type=int, help="held-out tasks wanted")
    rule.add_argument("--out", type=Path, help="file of the selection (in the screen's directory)")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    check_state(options.state)
    if options.describe_config:
        for key, text in describe(ScreenConfig):
            print(f"{key:<36} {text}")
        return EXIT_OK
    try:
        if options.select is not None:
            return _select_from(options)
        _refuse_rule(options)
        if options.resume is not None:
            frozen = ["config", "cohort", "folder", "families", "tasks"]
            refuse_with_resume(options, frozen)
            wanted = resumed(options, "screen")
        else:
            wanted = _wanted(options)
        if options.plan:
            show_plan(options, wanted)
            return EXIT_OK
        directory = run_evaluation(options, MODULE, wanted)
    except KeyboardInterrupt:
        raise Interrupted("stopped while preparing", remedy="run the same command again") from None
    return _select_after(directory, as_json=options.json)


def _wanted(options: argparse.Namespace) -> Wanted:
    from rl.evidence.frozen import EvaluationPlan
    from rl.prepare import prepare_all

    given = overrides(options)
    if options.cohort is not None:
        given |= _NO_SOURCE | {"tasks.source": "cohort", "tasks.cohort": options.cohort}
    if options.folder is not None:
        given |= _NO_SOURCE | {"tasks.source": "path", "tasks.path": str(options.folder)}
    config = load_config(options.config or DEFAULT_CONFIG, given, model=ScreenConfig)
    root, tasks = prepare_all(config.tasks, options.state)
    tasks = chosen(tasks, options.families, options.tasks)
    if config.screen.shards > len(tasks):
        raise ConfigurationError(
            f"{config.screen.shards} shards for {len(tasks)} tasks",
            "screen.shards",
            f"lower it: --set screen.shards={len(tasks)}",
        )
    plan = EvaluationPlan(
        attempts=config.screen.attempts,
        shards=config.screen.shards,
        retries=config.screen.retries,
    )
    return Wanted("screen", config, plan, tasks, root)


def _refuse_rule(options: argparse.Namespace) -> None:
    given = [
        f"--{name}"
        for name in ("low", "high", "train", "heldout", "out")
        if getattr(options, name) is not None
    ]
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} goes with --select",
            f"python -m {MODULE}",
            "for the rule of a new screen use --set screen.low=..., tasks.train=...",
        )


def _select_after(directory: CampaignDir, *, as_json: bool) -> int:
    """Select by the screen's own rule, as soon as it is complete."""
    from rl.evidence.frozen import load_frozen

    frozen = load_frozen(directory)
    rule = _rule(directory, None)
    if rule.train + rule.heldout > len(frozen.heldout):
        print(
            f"no selection: {rule.train} training and {rule.heldout} held-out tasks are wanted "
            f"and {len(frozen.heldout)} were screened; choose from them by: "
            f"python -m {MODULE} --select {frozen.run_id} --train N --heldout N",
            file=sys.stderr,
        )
        return EXIT_OK
    return _write(directory, rule, directory.root / SELECTION, as_json=as_json, own=False)


def _select_from(options: argparse.Namespace) -> int:
    from rl.evidence.layout import open_existing

    names = ("config", "cohort", "folder", "families", "tasks", "resume", "run_id", "set")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if given or options.plan:
        raise ConfigurationError(
            f"{', '.join(given) or '--plan'} can't be combined with --select: nothing is run",
            options.select,
            "leave it out; --low, --high, --train, --heldout, --seed and --out go with --select",
        )
    directory = open_existing(options.select, folder_of(options.state, "screen"))
    rule = _rule(directory, options)
    path = options.out or directory.root / SELECTION
    if path.is_dir():
        raise ConfigurationError("is a directory", f"--out {path}", "name a file")
    return _write(directory, rule, path, as_json=options.json, own=True)


def _rule(directory: CampaignDir, options: argparse.Namespace | None) -> SelectionRule:
    """The screen's own rule, with what the command line replaces."""
    from rl.evidence.frozen import load_frozen
    from rl.evidence.selection import SelectionRule

    config = load_frozen(directory).serving_config()
    if not isinstance(config, ScreenConfig):
        raise ConfigurationError("is no screen", str(directory.root), "name a run of rl.screen")
    given = {} if options is None else vars(options)
    own = {
        "low": config.screen.low,
        "high": config.screen.high,
        "train": config.tasks.train,
        "heldout": config.tasks.heldout,
        "seed": config.tasks.seed,
    }
    values = {key: own[key] if given.get(key) is None else given[key] for key in own}
    if not 0 <= values["low"] <= values["high"] <= 1:
        raise ConfigurationError("must be 0 <= low <= high <= 1", "--low, --high")
    if min(values["train"], values["heldout"]) < 1:
        raise ConfigurationError("must be at least 1", "--train, --heldout")
    return SelectionRule.model_validate(values)


def _write(
    directory: CampaignDir, rule: SelectionRule, path: Path, *, as_json: bool, own: bool
) -> int:
    """Select and write; with `as_json`, print the selection if it is the command's `own`."""
    from rl.evidence.audit import audit
    from rl.evidence.selection import read_selection
    from rl.files import create_exclusive, json_bytes
    from rl.selection import select, selection_lines

    result = audit(directory)
    if result.findings:
        first = result.findings[0]
        raise EvidenceError(
            f"nothing is selected from a screen whose audit has {len(result.findings)} findings, "
            f"such as {first.message}",
            first.where,
            f"see all of them: python -m rl.audit {directory.root}",
        )
    selection = select(directory, rule)
    if path.exists():
        if read_selection(path) != selection:
            raise ConfigurationError(
                "holds another selection already", str(path), "name another file by --out"
            )
    else:
        create_exclusive(path, json_bytes(selection))
    if as_json:
        if own:
            print(selection.model_dump_json(indent=2))
        return EXIT_OK
    print("\n".join(selection_lines(selection)))
    kept = sum(task.verdict == "kept" for task in selection.tasks)
    print(
        f"{kept} of {len(selection.tasks)} tasks kept (pass rate {rule.low:g} to {rule.high:g}); "
        f"{len(selection.train)} to train on and {len(selection.heldout)} held out: {path}"
    )
    print(f'use it: [tasks] split = "{path}"')
    return EXIT_OK


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
