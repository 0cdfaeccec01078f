"""Campaigns as a dataset: `python -m rl.dataset build | verify`.

Invariants:
- Campaigns are never changed, and no existing dataset is ever overwritten.
- Exit code 0: written, or verified without findings; 2: refused with the reason, or
  verified with findings, each named in a line.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import NoReturn

from rl.errors import EXIT_OK, EXIT_REFUSED, run_command

DEFAULT_SHARD_MB = 256  # the Hub's viewer and a download's retry like files of this size
DEFAULT_PAIRS = 4
MIB = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.dataset",
        description="Export campaigns as a dataset that `datasets.load_dataset(DIR)` reads, "
        "and check a released one.",
        epilog="Exit code 0: written, or as it should be. 2: refused, or there are findings; "
        "every line says what and where.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser(
        "build",
        help="export campaigns",
        description="Export the episodes of finished campaigns: Parquet, the same rows as "
        "zstd-compressed JSON Lines, a dataset card, and a manifest with the sha256 of every "
        "file. Split train is the training episodes, split eval the evaluations'. Each campaign "
        "is audited first. Secrets are replaced by [REDACTED:kind], and an episode whose tokens "
        "may spell one out loses its tokens.",
    )
    _add_build_options(build)
    verify = commands.add_parser(
        "verify",
        help="check a released dataset",
        description="Check a dataset's directory against its manifest: every file, both "
        "formats row by row, types, splits, secrets, and the card. Nothing is changed.",
    )
    verify.add_argument("directory", type=Path, metavar="DIR", help="the dataset's directory")
    for command in (build, verify):
        command.add_argument(
            "--secrets",
            type=Path,
            metavar="FILE",
            help="look for these secrets as well, one a line. Always looked for: well-known "
            "shapes, and the values of environment variables whose names end in KEY, TOKEN or "
            "SECRET or hold PASSWORD",
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_build_options(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "campaigns",
        type=Path,
        nargs="+",
        metavar="CAMPAIGN",
        help="directory of a campaign, such as state/campaigns/RUN_ID",
    )
    build.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory to make; must not exist"
    )
    build.add_argument(
        "--with-failed", action="store_true", help="masked and cancelled episodes as well"
    )
    build.add_argument(
        "--unaudited",
        action="store_true",
        help="don't audit the campaigns: export unfinished ones, or such with findings",
    )
    build.add_argument(
        "--sft",
        action="store_true",
        help="also write chats of solved training episodes, as set 'sft'",
    )
    build.add_argument(
        "--preferences",
        action="store_true",
        help="also write pairs of a solved and an unsolved episode of one group, as set "
        "'preferences'",
    )
    build.add_argument(
        "--pairs-per-group",
        type=_positive,
        default=DEFAULT_PAIRS,
        metavar="N",
        help="most pairs of one group (%(default)s)",
    )
    build.add_argument(
        "--shard-mb",
        type=_positive,
        default=DEFAULT_SHARD_MB,
        metavar="N",
        help="most MiB of one file (%(default)s)",
    )
    build.add_argument(
        "--license",
        type=_license,
        default="other",
        metavar="NAME",
        help="the Hub's name of the licence, such as apache-2.0, for the card (%(default)s)",
    )


def main(argv: list[str]) -> int:
    """Run the command."""
    options = build_parser().parse_args(argv)
    return _build(options) if options.command == "build" else _verify(options)


def _build(options: argparse.Namespace) -> int:
    from rl.evidence.dataset.build import Request, build
    from rl.evidence.dataset.scrub import Scrubber, known_secrets
    from rl.evidence.layout import open_path

    scrubber = Scrubber(known_secrets(os.environ, options.secrets))
    manifest = build(
        [open_path(path) for path in options.campaigns],
        options.out,
        Request(
            with_failed=options.with_failed,
            unaudited=options.unaudited,
            sft=options.sft,
            preferences=options.preferences,
            pairs_per_group=options.pairs_per_group,
            shard_bytes=options.shard_mb * MIB,
            license=options.license,
        ),
        scrubber,
    )
    if options.json:
        print(manifest.model_dump_json(indent=2))
        return EXIT_OK
    for name, splits in manifest.sets.items():
        rows = ", ".join(f"{split} {entry.rows}" for split, entry in splits.items())
        print(f"{name:<12} {rows} rows")
    kinds = ", ".join(f"{count} {kind}" for kind, count in manifest.scrubbed.items())
    print(f"{'secrets':<12} {kinds or 'none found'}", end="")
    lost = manifest.rows_without_tokens
    print(f"; {lost} episodes lost their tokens" if lost else "")
    size = sum(entry.bytes for entry in manifest.files.values()) / MIB
    print(f"{options.out}: {len(manifest.files)} files, {size:.1f} MiB")
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    from rl.evidence.dataset.check import Checker
    from rl.evidence.dataset.scrub import Scrubber, known_secrets

    checker = Checker(options.directory, Scrubber(known_secrets(os.environ, options.secrets)))
    findings = list(checker.findings())
    if options.json:
        import json

        print(json.dumps({"findings": [one.model_dump(mode="json") for one in findings]}, indent=2))
        return EXIT_REFUSED if findings else EXIT_OK
    for finding in findings:
        print(f"{finding.code}: {finding.where}: {finding.message}")
    rows = sum(e.rows for splits in checker.manifest.sets.values() for e in splits.values())
    verdict = f"{len(findings)} findings" if findings else "no findings"
    print(f"{options.directory}: {verdict}; {len(checker.manifest.files)} files, {rows} rows")
    return EXIT_REFUSED if findings else EXIT_OK


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return int(text)


def _license(text: str) -> str:
    """A licence as the Hub names it; it becomes a line of the card's header."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError("must be a licence's short name, such as apache-2.0")
    return text


def cli() -> NoReturn:
    """Run as a console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
