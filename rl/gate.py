"""Gate task packages: `python -m rl.gate FOLDER`.

Invariants:
- Exit code 0 means that every package passed; 2 that some did not, with each named.
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

DEFAULT_TASKS = Path("state/tasks")
DEFAULT_REPORT = Path("state/gates.json")
DEFAULT_CONCURRENCY = 4


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.gate",
        description="Check task packages in local sandboxes: each package's own solution must "
        "score 1 and doing nothing must score 0. Results are kept by content digest, so a "
        "package that has passed is not run again.",
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
        "--repeats", type=int, default=1, help="how often each attempt is made (default: 1)"
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
        DEFAULT_LIMITS,
        gate_all,
        load_report,
        require_writable,
        save_report,
    )
    from sandboxes.provider import SandboxProvider
    from sandboxes.tasks import CONFIG_NAME, load_folder, load_package

    single = (path / CONFIG_NAME).is_file()
    packages = [load_package(path)] if single else load_folder(path)
    report: GateReport = load_report(report_path)
    require_writable(report_path)
    provider = SandboxProvider(SandboxConfig())
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

    return asyncio.run(
        gate_all(packages, provider, DEFAULT_LIMITS, concurrency, known, on_result, repeats)
    )


def _print_table(results: list[GateResult]) -> None:
    width = max(len(result.name) for result in results)
    print(f"{'package':{width}s}  verdict  oracle  nothing")
    for result in results:
        print(
            f"{result.name:{width}s}  {result.verdict:7s}  {_rewards(result.oracle):>6s}  "
            f"{_rewards(result.nothing):>7s}"
        )
        for reason in result.reasons:
            print(f"    {reason}")
    passed = sum(result.verdict == "passed" for result in results)
    print(f"{passed} of {len(results)} passed")


def _rewards(values: list[float]) -> str:
    return ",".join(f"{value:g}" for value in values) or "-"


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
