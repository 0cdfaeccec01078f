"""What runs left behind: `python -m rl.state ls | verify | archive | restore | billing`.

Invariants:
- Only `archive --remove` deletes anything, and only what an archive on disk, read back
  and compared, holds as well.
- Exit code 0: done, and nothing is wrong; 2: findings, each with its file, or a refusal
  with its reason, and then nothing was half done.
- The result goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl.errors import EXIT_OK, EXIT_REFUSED, ConfigurationError, EvidenceError, run_command
from rl.running import check_state

if TYPE_CHECKING:
    from rl.evidence.archive_manifest import ArchiveManifest

DEFAULT_STATE = Path("state")
DEFAULT_PRICES = Path("configs/billing/prices.toml")
DEFAULT_LEVEL = 6
SUFFIX = ".tar.zst"
_RUN = "a run id, or the folder of a run"
_EXIT = "Exit code 0: done, nothing wrong. 2: findings or a refusal, each with file and remedy."


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.state",
        description="Look after the evidence that runs leave in a state directory: list it, "
        "prove it, put it into archives, bring it back, and see what it cost.",
        epilog=f"{_EXIT} Only `archive --remove` ever deletes anything. See docs/evidence.md.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "ls",
        help="list runs, archives and folders",
        description="List every run (finished ones first, the others apart), every archive, and "
        "every folder with its size and whether it can be made again. Nothing is read in "
        "full: `verify` does that.",
    )
    verify = commands.add_parser(
        "verify",
        help="read everything to its end and name what is damaged",
        description="Read traces, JSON Lines, JSON, checkpoints, cohorts and archives to their "
        "ends, and name every file that is torn or damaged. Changes nothing.",
        epilog=_EXIT,
    )
    verify.add_argument(
        "paths",
        type=_path,
        nargs="*",
        metavar="PATH",
        help="a run id, or any file or folder; by default the whole state directory",
    )
    _add_archive(commands)
    _add_restore(commands)
    _add_billing(commands)
    for name, command in commands.choices.items():
        command.add_argument(
            "--state", type=_path, default=DEFAULT_STATE, help="the state directory (%(default)s)"
        )
        if name != "restore":
            command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_archive(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    command = commands.add_parser(
        "archive",
        help="put runs or folders into archives",
        description="Put each run, folder or file of the state directory into one compressed "
        f"archive, state/archives/NAME-DATE-TIME{SUFFIX}, with a manifest of every file's "
        "sha256 in it and beside it. A run that is being written is refused.",
        epilog="Any tar unpacks it: tar --zstd -xf ARCHIVE",
    )
    command.add_argument("targets", type=_path, nargs="+", metavar="RUN|PATH", help=_RUN)
    command.add_argument(
        "--out", type=_path, metavar="DIR", help="where archives go (STATE/archives)"
    )
    command.add_argument(
        "--remove",
        action="store_true",
        help="delete the original after the archive was read back from the disk and every file "
        "of it compared with the original once more",
    )
    command.add_argument(
        "--level",
        type=int,
        default=DEFAULT_LEVEL,
        metavar="N",
        help="of compression, 1 (fast) to 19 (small); %(default)s",
    )


def _add_restore(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    command = commands.add_parser(
        "restore",
        help="bring back what an archive holds",
        description="Unpack an archive to where it came from. It gets its place only when every "
        "file has the sha256 of the manifest; what exists is never replaced.",
    )
    command.add_argument(
        "archive", type=_path, metavar="ARCHIVE", help="the file, or its name in STATE/archives"
    )
    command.add_argument(
        "--to", type=_path, metavar="DIR", help="what it becomes instead; must not exist yet"
    )


def _add_billing(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    command = commands.add_parser(
        "billing",
        help="what a run cost: by its receipts, and as the provider says",
        description="Estimate what a run cost from its receipts and a dated table of list "
        "prices, put Modal's own report beside it if asked, and write both to "
        "STATE/billing/RUN.json. Reports that were fetched before are kept.",
    )
    command.add_argument("run", type=_path, metavar="RUN", help=_RUN)
    command.add_argument(
        "--fetch", action="store_true", help="ask Modal for its report of the run's hours"
    )
    command.add_argument("--gpu", help="price the run's GPUs as these, such as A100-80GB")
    command.add_argument(
        "--prices", type=_path, default=DEFAULT_PRICES, help="the price table (%(default)s)"
    )


def _path(text: str) -> Path:
    """A path that says something."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a run, a file or a folder")
    return Path(text)


def main(argv: list[str]) -> int:
    """Run the command."""
    options = build_parser().parse_args(argv)
    check_state(options.state)
    if options.command != "restore" and not options.state.is_dir():
        raise ConfigurationError(
            "no such state directory",
            str(options.state),
            "run this where the project is, or name the directory by --state",
        )
    commands = {
        "ls": _ls,
        "verify": _verify,
        "archive": _archive,
        "restore": _restore,
        "billing": _billing,
    }
    return commands[options.command](options)


def _ls(options: argparse.Namespace) -> int:
    from rl.evidence.store import survey_store
    from rl.evidence.store_text import print_store

    store = survey_store(options.state)
    if options.json:
        print(store.model_dump_json(indent=2))
    else:
        print_store(store)
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    from rl.evidence.store_check import StoreChecker, whole_store
    from rl.evidence.store_text import progress

    paths = [_place(path, options.state) for path in options.paths] or whole_store(options.state)
    with progress() as meter:
        checker = StoreChecker(_check_checkpoint, _check_cohort, meter)
        result = checker.check(paths)
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        for note in result.notes:
            print(f"note: {note}")
        for finding in result.findings:
            print(f"{finding.code}: {finding.where}: {finding.message}")
        checked = ", ".join(f"{count} {kind}" for kind, count in result.checked.items())
        verdict = f"{len(result.findings)} findings" if result.findings else "no findings"
        print(f"{verdict}; read {checked or 'nothing of ours'}")
    return EXIT_REFUSED if result.findings else EXIT_OK


def _check_checkpoint(path: Path) -> str:
    from rl.learner.checkpoint import verify

    verify(path)
    return ""


def _check_cohort(path: Path) -> str:
    """Check a cohort's manifest, and its packages where they are on this machine."""
    from sandboxes.manifest import read_manifest, verify
    from sandboxes.source import FolderSource, GitSource

    manifest = read_manifest(path)
    source, tasks = manifest.source, path.parent.parent / "tasks"
    if isinstance(source, FolderSource):
        folders = [Path(source.path)] if Path(source.path).is_dir() else []
    elif isinstance(source, GitSource):
        folders = sorted(tasks.glob(f"git-{source.commit[:12]}-*"))
    else:
        folders = sorted(tasks.glob(f"{manifest.cohort}-*"))
    wanted = {package.name for package in manifest.packages}
    folders = [each for each in folders if wanted <= {child.name for child in each.iterdir()}]
    if not folders:
        return "its packages are not on this machine"
    for folder in folders:
        verify(manifest, folder)
    return ""


def _archive(options: argparse.Namespace) -> int:
    from rl.evidence.archive import LEVELS, archive
    from rl.evidence.store_text import progress

    if options.level not in LEVELS:
        raise ConfigurationError(
            f"no level of compression: {options.level}",
            "--level",
            f"give {LEVELS[0]} to {LEVELS[-1]}",
        )
    targets = [_place(path, options.state) for path in options.targets]
    rows: list[dict[str, Any]] = []
    for target in targets:
        with progress() as meter:
            made = archive(
                target,
                options.state,
                options.out,
                level=options.level,
                remove=options.remove,
                meter=meter,
            )
        if options.json:
            row = made.manifest.model_dump(mode="json", exclude={"entries"})
            rows.append(row | {"file": str(made.path), "removed": options.remove})
            continue
        print(f"{made.path}: {_holds(made.manifest)}")
        print(f"  {target} {'was removed' if options.remove else 'is as it was'}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return EXIT_OK


def _holds(manifest: ArchiveManifest) -> str:
    from rl.evidence.store_text import size

    packed = f", {size(manifest.archive.bytes)} packed" if manifest.archive else ""
    return f"{manifest.files} files, {size(manifest.bytes)}{packed}"


def _restore(options: argparse.Namespace) -> int:
    from rl.evidence.archive_read import restore
    from rl.evidence.store_text import progress

    archive: Path = options.archive
    folder: Path = options.state / "archives"
    named = folder / (archive.name.removesuffix(".json").removesuffix(SUFFIX) + SUFFIX)
    if not archive.exists() and archive.name == str(archive) and named.exists():
        archive = named
    if not archive.is_file():
        raise ConfigurationError(
            "no such archive", str(archive), f"see what there is: ls {folder}, or rl.state ls"
        )
    with progress() as meter:
        where = restore(archive, options.state, options.to, meter=meter)
    print(f"{where}: restored, every file as it was archived")
    return EXIT_OK


def _billing(options: argparse.Namespace) -> int:
    from rl.evidence.billing import BILLING, Billing, estimate, read_billing
    from rl.evidence.layout import CampaignDir
    from rl.evidence.prices import load_prices
    from rl.evidence.store_text import print_billing
    from rl.evidence.usage import usage_of
    from rl.files import write_json

    prices = load_prices(options.prices)
    place = _place(options.run, options.state)
    directory, kind = CampaignDir(place), place.resolve().parent.name
    made = estimate(usage_of(directory), prices, options.gpu, str(options.prices))
    path: Path = options.state / BILLING / f"{directory.run_id}.json"
    before = read_billing(path)
    if before is not None and before.kind != kind:
        raise EvidenceError(
            f"is of the run of this name in {before.kind}, not in {kind}",
            str(path),
            "move it away, or name another --state",
        )
    reports = list(before.reports) if before else []
    if options.fetch:
        from sandboxes.modal_billing import fetch_report

        reports.append(fetch_report(directory.run_id, made.begun, made.ended))
    billing = Billing(kind=kind, run_id=directory.run_id, estimate=made, reports=reports)
    path.parent.mkdir(exist_ok=True)
    write_json(path, billing)
    if options.json:
        print(billing.model_dump_json(indent=2))
    else:
        print_billing(billing, path)
    return EXIT_OK


def _place(path: Path, state: Path) -> Path:
    """What a person means by a run id or a path.

    Raises:
        ConfigurationError: there is nothing of the name, or several runs have it.
    """
    from rl.evidence.store import runs_in

    if path.exists():
        return path
    runs = runs_in(state)
    found = [run for run in runs if str(path) == run.name]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(run) for run in found)
        raise ConfigurationError("several runs have this name", str(path), f"name one: {names}")
    newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:3]
    names = ", ".join(run.name for run in newest)
    raise ConfigurationError(
        "no such run, file or folder",
        str(path),
        f"the newest runs are: {names}" if names else f"{state} holds no run yet",
    )


def cli() -> NoReturn:
    """Run as a console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
