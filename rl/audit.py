"""Audit a campaign from its directory alone.

Exit code 0: every claim was derived again and holds.  2: there are findings,
each printed with the record it concerns, or the directory can't be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from rl.errors import EXIT_OK, EXIT_REFUSED, run_command


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.audit",
        description="Derive every claim of a campaign, evaluation, screen or probe again from "
        "its raw traces, and name what does not hold. Needs nothing but the run's directory, and "
        "changes nothing.",
        epilog="Exit code 0: everything holds. 2: there are findings, or it can't be read.",
    )
    parser.add_argument("campaign", type=Path, help="directory of the run, wherever it lies")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)

    from rl.evidence.audit import audit
    from rl.evidence.layout import open_path
    from rl.selection import check_selection

    directory = open_path(options.campaign)
    result = audit(directory)
    result = result.model_copy(update={"findings": [*result.findings, *check_selection(directory)]})
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        for finding in result.findings:
            print(f"{finding.code}: {finding.where}: {finding.message}")
        checked = ", ".join(f"{count} {kind}" for kind, count in result.checked.items())
        verdict = f"{len(result.findings)} findings" if result.findings else "no findings"
        print(f"{result.run_id}: {verdict}; checked {checked}")
    return EXIT_REFUSED if result.findings else EXIT_OK


def cli() -> NoReturn:
    """Run as a console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
