"""Gate task packages: `python -m rl.gate FOLDER`.

Any folder of Harbor packages can be given.  Each must load (schema, digest), its own
solution must score 1 and doing nothing 0, twice with the same result, within the
time, memory and disk that it asks for, and nothing may be left behind.

Invariants:
- Exit code 0 means that every package passed; 2 that some did not, with each named.
- A package that can't be loaded fails by itself; the others are gated all the same.
- Each result is on disk before the next line is printed, so a run that is
  interrupted loses nothing and goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rl.errors import EXIT_OK, EXIT_REFUSED, ConfigurationError, run_command

if TYPE_CHECKING:
    from sandboxes.gates import GateReport, GateResult
    from sandboxes.tasks import TaskPackage

DEFAULT_TASKS = Path("state/tasks")
DEFAULT_REPORT = Path("state/gates/report.json")
DEFAULT_CONCURRENCY = 4
DEFAULT_REPEATS = 2


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.gate",
        description="Check task packages in local sandboxes: each package's own solution must "
        "score 1 and doing nothing must score 0, twice, within what the package asks for. "
        "Results are kept by content digest, so a package that has passed is not run again.",
    )
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=DEFAULT_TASKS,
        help=f"a folder of task packages, or one package (default: {DEFAULT_TASKS})",
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=DEFAULT_REPORT,
        help=f"where results are kept (default: {DEFAULT_REPORT})",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        help=f"packages gated at once (default: {DEFAULT_CONCURRENCY})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        help=f"how often each attempt is made (default: {DEFAULT_REPEATS})",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    return parser


def main(argv: list[str]) -> int:
    """Gate the packages and print what was found; return the exit code."""
    args = build_parser().parse_args(argv)
    if args.concurrency < 1 or args.repeats < 1:
        raise ConfigurationError(
            "must be at least 1", "--concurrency or --repeats", "give a greater number"
        )
    results = _gate(args.path, args.report, args.concurrency, args.repeats)
    if args.json:
        import json

        print(json.dumps([result.model_dump(mode="json") for result in results], indent=1))
    else:
        _print_table(results)
    return EXIT_OK if all(result.verdict == "passed" for result in results) else EXIT_REFUSED


def _gate(path: Path, report_path: Path, concurrency: int, repeats: int) -> list[GateResult]:
    import asyncio

    from rl.config import SandboxConfig
    from sandboxes.gates import (
        AsRequested,
        gate_all,
        load_report,
        require_writable,
        save_report,
    )
    from sandboxes.tasks import CONFIG_NAME

    packages, refused = _load(path)
    for package in packages:
        for warning in package.warnings:
            print(f"warning: {package.path / CONFIG_NAME}: {warning}", file=sys.stderr)
    report: GateReport = load_report(report_path)
    require_writable(report_path)
    provider = AsRequested(SandboxConfig())
    provider.preflight()
    known = dict(report.results)
    finished = 0

    def on_result(result: GateResult) -> None:
        nonlocal finished
        finished += 1
        report.results[result.digest] = result
        save_report(report, report_path)
        print(
            f"[{finished}] {result.verdict:6s} {result.name} ({result.seconds:.1f} s)",
            file=sys.stderr,
            flush=True,
        )

    gated = asyncio.run(gate_all(packages, provider, None, concurrency, known, on_result, repeats))
    return sorted([*gated, *refused], key=lambda result: result.name)


def _load(path: Path) -> tuple[list[TaskPackage], list[GateResult]]:
    """The packages that can be gated, and the results of those that can't be loaded.

    Raises:
        TaskPackageError: there is no package at all, or the only one can't be loaded.
    """
    from sandboxes.gates import unloadable
    from sandboxes.tasks import CONFIG_NAME, load_package, survey_folder

    if (path / CONFIG_NAME).is_file():
        return [load_package(path)], []
    packages, errors = survey_folder(path)
    return packages, [unloadable(_package_name(error.where, path), error) for error in errors]


def _package_name(where: str, folder: Path) -> str:
    """The package of `folder` that an error's place lies in."""
    for base in (folder, folder.resolve()):
        if Path(where).is_relative_to(base):
            return Path(where).relative_to(base).parts[0]
    return where


def _print_table(results: list[GateResult]) -> None:
    width = max(len(result.name) for result in results)
    print(f"{'package':{width}s}  verdict  oracle  nothing")
    for result in results:
        print(
            f"{result.name:{width}s}  {result.verdict:7s}  {_rewards(result.oracle):>6s}  "
            f"{_rewards(result.nothing):>7s}"
        )
        for reason in result.reasons:
            print("    " + reason.replace("\n", "\n    "))
    passed = sum(result.verdict == "passed" for result in results)
    print(f"{passed} of {len(results)} passed")


def _rewards(values: list[float]) -> str:
    return ",".join(f"{value:g}" for value in values) or "-"


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
