"""Make the report of a campaign, finished or not, from its directory alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from rl.errors import EXIT_OK, run_command


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.report",
        description="Write one self-contained HTML page about a campaign: did it learn, by how "
        "much and how sure, what it cost in time, what the model typed. Works at any moment.",
    )
    parser.add_argument("campaign", type=Path, help="directory of the campaign")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: report.html in the campaign's directory)"
    )
    options = parser.parse_args(argv)

    from rl.evidence.layout import open_path
    from rl.evidence.report import write_report

    print(write_report(open_path(options.campaign), options.out))
    return EXIT_OK


def cli() -> NoReturn:
    """Run as a console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
