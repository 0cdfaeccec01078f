"""Look at checkpoints: `python -m rl.checkpoint list | verify | probe | diff`.

Invariants:
- Nothing is ever changed.
- Exit code 0: whole, in agreement, or the same; 1: `probe` found a difference above
  its tolerance, or `diff` one at all; 2: it could not be looked at, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rl.errors import EXIT_OK, ConfigurationError, EvidenceError, run_command

if TYPE_CHECKING:
    from rl.checkpoint_probe import ProbeReport
    from rl.evidence.layout import CampaignDir
    from rl.learner.compare import Comparison
    from rl.learner.inventory import Listed

DEFAULT_STATE = Path("state")
DEFAULT_DEADLINE_S = 900.0  # an engine takes one minute on a laptop, several with a large model
EXIT_DIFFERENT = 1  # as `diff` and `cmp` say it
MIB = 1024 * 1024
_PATH = (
    "a checkpoint's directory (such as state/campaigns/RUN/checkpoints/update-0005); for a "
    "campaign's directory or run id, its newest complete one"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.checkpoint",
        description="Look at the full checkpoints of a campaign: adapter, optimizer, random "
        "state and the scheduler's frontier, under a manifest with the sha256 of every file.",
        epilog="Exit code 0: whole, in agreement, or the same. 1: probe found a difference "
        "above its tolerance, or diff found one. 2: it can't be looked at; the message says why.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser(
        "list",
        help="which checkpoints there are",
        description="List a campaign's checkpoints with their size and state. Files are not "
        "hashed: `verify` does that.",
    )
    listing.add_argument(
        "path",
        type=Path,
        metavar="RUN|DIR",
        help="a run id, a campaign's directory, or any folder that holds checkpoints",
    )
    verify = commands.add_parser(
        "verify",
        help="check every file against the manifest",
        description="Check that a checkpoint is as it was written: its manifest, and size and "
        "sha256 of every file. The first file that is not is named, and the exit code is 2.",
    )
    verify.add_argument("path", type=Path, metavar="PATH", help=_PATH)
    probe = commands.add_parser(
        "probe",
        help="load the adapter into PEFT and into vLLM and compare their logprobs",
        description="Verify a checkpoint, load its adapter into PEFT and into a vLLM replica of "
        "its own, compare the logprobs of both on fixed prompts, and report the largest "
        "difference. Takes about two minutes on a laptop. Exit code 1 if it is above the "
        "tolerance.",
    )
    _add_probe_options(probe)
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Say in what two checkpoints differ: update, configuration, adapter, "
        "optimizer, scheduler. Exit code 0 if training would go on from both alike, 1 if not.",
    )
    diff.add_argument("a", type=Path, metavar="A", help=_PATH)
    diff.add_argument("b", type=Path, metavar="B", help="the other one")
    for command in (listing, verify, probe, diff):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_argument(
            "--state",
            type=Path,
            default=DEFAULT_STATE,
            help="where run ids are looked for (%(default)s)",
        )
    return parser


def _add_probe_options(probe: argparse.ArgumentParser) -> None:
    probe.add_argument("path", type=Path, metavar="PATH", help=_PATH)
    probe.add_argument(
        "--engine",
        choices=("vllm", "none"),
        default="vllm",
        help="none: compare PEFT with what the trainer recorded, and start no engine (%(default)s)",
    )
    probe.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the base model (default: the one that the campaign around the checkpoint froze)",
    )
    probe.add_argument(
        "--device", choices=("cpu", "cuda"), help="where both run (default: as in the campaign)"
    )
    probe.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="largest difference that counts as agreement (default: by the model's dtype)",
    )
    probe.add_argument(
        "--deadline",
        type=float,
        default=DEFAULT_DEADLINE_S,
        metavar="S",
        help="limit of the engine's part, s (%(default)g)",
    )


def main(argv: list[str]) -> int:
    """Run the command."""
    options = build_parser().parse_args(argv)
    if options.command == "list":
        return _list(options)
    if options.command == "verify":
        return _verify(options)
    if options.command == "probe":
        return _probe(options)
    return _diff(options)


def _list(options: argparse.Namespace) -> int:
    import json

    from rl.learner.checkpoint import latest
    from rl.learner.inventory import inventory

    root = _folder_at(options.path, options.state)
    entries, newest = inventory(root), latest(root)
    if options.json:
        rows = [entry.model_dump(mode="json") for entry in entries]
        found = {"root": str(root), "latest": newest and str(newest), "checkpoints": rows}
        print(json.dumps(found, indent=2))
        return EXIT_OK
    if not entries:
        print(f"{root} holds no checkpoint")
        return EXIT_OK
    for entry in entries:
        print(_list_line(entry, newest))
    return EXIT_OK


def _list_line(entry: Listed, newest: Path | None) -> str:
    name = Path(entry.path).name
    if entry.state == "unfinished":
        return f"{name}  unfinished: its writer is at work, or has died; the next one removes it"
    if entry.saved_at is None or entry.state == "damaged":
        return f"{name}  damaged: {entry.problem}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.saved_at))
    mark = "  latest" if newest is not None and newest.name == name else ""
    return f"{name}  complete  {entry.bytes / MIB:8.1f} MiB  {when}{mark}"


def _verify(options: argparse.Namespace) -> int:
    from rl.learner.checkpoint import load

    path = checkpoint_at(options.path, options.state)
    manifest = load(path, _frozen_digest(path)).manifest
    if options.json:
        print(manifest.model_dump_json(indent=2))
        return EXIT_OK
    size = sum(entry.bytes for entry in manifest.files.values())
    print(
        f"{path}: whole; update {manifest.update}, {len(manifest.files)} files, "
        f"{size / MIB:.1f} MiB, configuration {manifest.config_digest[:12]}"
    )
    return EXIT_OK


def _probe(options: argparse.Namespace) -> int:
    from rl.checkpoint_probe import probe

    if options.deadline <= 0 or (options.tolerance is not None and not options.tolerance >= 0):
        raise ConfigurationError(
            "must be above 0", "--deadline or --tolerance", "give a greater number"
        )
    path = checkpoint_at(options.path, options.state)
    report = probe(
        path,
        campaign_of(path),
        options.state,
        engine=options.engine,
        model_dir=options.model,
        device=options.device,
        tolerance=options.tolerance,
        deadline_s=options.deadline,
        note=_note,
    )
    if options.json:
        print(report.model_dump_json(indent=2))
    else:
        _print_probe(report)
    return EXIT_OK if report.agrees else EXIT_DIFFERENT


def _print_probe(report: ProbeReport) -> None:
    print(f"{report.checkpoint}: update {report.update}, model {report.model}")
    print("largest difference of a token's logprob, nats:")
    print(f"{'prompt':24s} tokens  PEFT-recorded  PEFT-vLLM  PEFT's adapter-base")
    for row in report.prompts:
        print(
            f"{row.name:24s} {row.tokens:6d}  {_number(row.recorded):>13s}  "
            f"{_number(row.engine):>9s}  {row.change:19.2g}"
        )
    verdict = "in agreement" if report.agrees else "DIFFERENT"
    print(f"{verdict}: {report.largest:.2g} at most, tolerance {report.tolerance:g}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _diff(options: argparse.Namespace) -> int:
    from rl.learner.checkpoint import load
    from rl.learner.compare import compare

    a, b = (load(checkpoint_at(path, options.state)) for path in (options.a, options.b))
    comparison = compare(a, b)
    if options.json:
        print(comparison.model_dump_json(indent=2))
    else:
        _print_diff(comparison)
    return EXIT_OK if comparison.same else EXIT_DIFFERENT


def _print_diff(comparison: Comparison) -> None:
    print(f"A: {comparison.a}\nB: {comparison.b}")
    for entry in comparison.differences:
        print(f"{entry.part:14s} {entry.what}")
    if not comparison.same and comparison.largest_probe is not None:
        print(f"{'probe':14s} logprobs differ by {comparison.largest_probe:.3g} nats at most")
    for entry in comparison.notes:
        print(f"{entry.part:14s} {entry.what} (makes no difference)")
    print("different" if not comparison.same else "the same: training would go on from both alike")


def checkpoint_at(path: Path, state: Path) -> Path:
    """The checkpoint that a person means by `path`.

    Raises:
        ConfigurationError: there is nothing, or no checkpoint.
        EvidenceError: a campaign without a complete one.
    """
    from rl.learner.checkpoint import latest
    from rl.learner.manifest import MANIFEST, update_of

    if path.is_dir() and (update_of(path) is not None or (path / MANIFEST).exists()):
        return path
    root = _folder_at(path, state)
    newest = latest(root)
    if newest is None:
        raise EvidenceError(
            "holds no complete checkpoint",
            str(root),
            f"see what there is: python -m rl.checkpoint list {path}",
        )
    return newest


def campaign_of(path: Path) -> CampaignDir | None:
    """The campaign whose checkpoint lies at `path`; None if it lies elsewhere."""
    from rl.evidence.layout import CampaignDir

    campaign = CampaignDir(path.resolve().parent.parent)
    inside = campaign.checkpoints == path.resolve().parent
    return campaign if inside and campaign.frozen.is_file() else None


def _folder_at(path: Path, state: Path) -> Path:
    """The folder of checkpoints that a person means by `path`."""
    from rl.evidence.layout import CampaignDir
    from rl.learner.manifest import update_of

    named = state / "campaigns" / path
    place = named if not path.exists() and named.is_dir() else path
    remedy = "give a checkpoint's directory, a campaign's, or a run id (see state/campaigns)"
    if not place.is_dir():
        problem = "is a file, no checkpoint" if place.exists() else "no such directory or run id"
        raise ConfigurationError(problem, str(path), remedy)
    campaign = CampaignDir(place)
    if campaign.frozen.is_file() or campaign.checkpoints.is_dir():
        place = campaign.checkpoints
    if not place.is_dir():
        raise EvidenceError("the campaign has no checkpoints yet", str(place))
    if place.name != campaign.checkpoints.name and not any(map(update_of, place.iterdir())):
        raise ConfigurationError("holds no checkpoint", str(path), remedy)
    return place


def _frozen_digest(path: Path) -> str | None:
    """The configuration's digest of the campaign around a checkpoint."""
    from rl.evidence.frozen import load_frozen

    campaign = campaign_of(path)
    return None if campaign is None else load_frozen(campaign).config_digest


def _note(text: str) -> None:
    """Progress goes to standard error: standard output is the result's."""
    print(text, file=sys.stderr, flush=True)


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
