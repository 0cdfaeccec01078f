"""Evaluate a campaign's weights on its held-out tasks: `python -m rl.heldout CAMPAIGN`.

The same evaluation as a campaign's own last stage, in a run of its own: with more
attempts, of other updates, on another machine, or after the campaign.

Invariants:
- The tasks are the campaign's frozen held-out ones, by content; the weights come from
  its checkpoints, verified, and are kept in the evaluation's own directory.
- No task that the weights were trained on is attempted.
"""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING, NoReturn

from rl.errors import EXIT_OK, ConfigurationError, EvidenceError, Interrupted, run_command
from rl.evaluating import Wanted, frozen_tasks, resumed, run_evaluation, show_plan
from rl.running import (
    add_run_options,
    check_state,
    interrupt,
    overrides,
    refuse_with_resume,
)

if TYPE_CHECKING:
    from rl.config import CampaignConfig
    from rl.evidence.frozen import Frozen
    from rl.evidence.layout import CampaignDir
    from rl.records import AdapterBytes

MODULE = "rl.heldout"
_OF_CAMPAIGN = ("model", "tasks", "trainer", "schedule", "name")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Evaluate base and trained weights of a campaign on its held-out tasks, in "
        "disjoint shards, one replica each, arm after arm.",
    )
    parser.add_argument("campaign", nargs="?", help="run id, or directory, of the campaign")
    parser.add_argument(
        "--update",
        type=int,
        action="append",
        default=[],
        help="evaluate the checkpoint of this update; repeatable (default: the newest)",
    )
    parser.add_argument("--attempts", type=int, help="attempts per task and arm")
    parser.add_argument("--shards", type=int, help="disjoint sets of tasks, each on one replica")
    parser.add_argument("--tasks", type=int, help="only the first so many held-out tasks")
    parser.add_argument(
        "--shard",
        metavar="K/N",
        help="the campaign's own evaluation of shard K of N, to be taken in by rl.final --take-in",
    )
    add_run_options(parser, "evaluation")
    parser.add_argument("--json", action="store_true", help="print the plan or summary as JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    check_state(options.state)
    if (options.campaign is None) == (options.resume is None):
        parser.error("name either a campaign, or an evaluation to --resume")
    try:
        if options.resume is not None:
            refuse_with_resume(options, ["update", "attempts", "shards", "tasks", "shard"])
            wanted = resumed(options, "heldout")
        else:
            wanted = _wanted(options)
        if options.plan:
            show_plan(options, wanted)
        else:
            directory = run_evaluation(options, MODULE, wanted)
            if not options.json:
                print(f"evaluation: {directory.root}")
    except KeyboardInterrupt:
        raise Interrupted("stopped while preparing", remedy="run the same command again") from None
    return EXIT_OK


def _wanted(options: argparse.Namespace) -> Wanted:
    from rl.evidence.frozen import EvaluationPlan, load_frozen
    from rl.evidence.layout import find_run

    campaign = find_run(options.campaign, options.state / "campaigns")
    frozen = load_frozen(campaign)
    if options.shard is not None:
        return _shard(options, campaign, frozen)
    config = with_overrides(frozen, options)
    count = _bounded(options.tasks, config.heldout_tasks, "--tasks")
    if count > len(frozen.heldout):
        raise ConfigurationError(
            f"{count} tasks are wanted and {len(frozen.heldout)} are held out",
            "--tasks",
            "ask for fewer",
        )
    tasks = frozen.heldout[:count]
    plan = EvaluationPlan(
        attempts=_bounded(options.attempts, config.heldout.attempts, "--attempts"),
        shards=_bounded(options.shards, config.heldout.shards, "--shards"),
        retries=config.schedule.attempt_retries,
    )
    if plan.shards > min(len(tasks), config.engine.replicas):
        raise ConfigurationError(
            f"{plan.shards} shards for {len(tasks)} tasks and {config.engine.replicas} replicas",
            "--shards",
            "have at most one for each task and replica",
        )
    return Wanted(
        "heldout",
        config,
        plan,
        tasks,
        frozen_tasks(frozen, tasks, options.state),
        adapters=adapters_of(campaign, frozen, options.update),
        source=frozen.run_id,
        trained_on=frozen.train,
        model_files=frozen.model.files,
    )


def _shard(options: argparse.Namespace, campaign: CampaignDir, frozen: Frozen) -> Wanted:
    """One shard of the campaign's own evaluation, on one replica, under its own conditions.

    Raises:
        ConfigurationError: there is no such shard, or something else than how fast it goes is
            to differ.
        EvidenceError: the campaign is not trained, or a checkpoint is damaged.
    """
    from rl.evidence.rows import Arms
    from rl.evidence.shards import OWN_KEYS, shard_slots, shard_tasks
    from rl.evidence.summary import read_json

    given = [name for name in ("update", "attempts", "shards", "tasks") if getattr(options, name)]
    foreign = [key for key in overrides(options) if not key.startswith(OWN_KEYS)]
    if given or foreign:
        raise ConfigurationError(
            f"{', '.join([f'--{name}' for name in given] + foreign)} can't be combined with "
            "--shard: the campaign has decided what is measured",
            "--shard",
            f"set only {', '.join(OWN_KEYS)}",
        )
    whole = frozen.campaign_config()
    shard, shards = _numbered(options.shard, whole.heldout_tasks)
    arms = read_json(campaign.arms, Arms)
    if arms is None:
        raise EvidenceError(
            "its weights are not proven yet", str(campaign.root), "train it to its end first"
        )
    slots = shard_slots(whole.episodes.concurrency, shard, shards)
    workers = min(slots, max(1, whole.episodes.workers // shards))
    own = ["engine.replicas=1", "heldout.shards=1"]
    own += [f"episodes.concurrency={slots}", f"episodes.workers={workers}"]
    options.set = [*own, *options.set]
    tasks = shard_tasks(frozen.heldout[: whole.heldout_tasks], shard, shards)
    return Wanted(
        "heldout",
        with_overrides(frozen, options),
        frozen.evaluation.model_copy(update={"shards": 1}),
        tasks,
        frozen_tasks(frozen, tasks, options.state),
        adapters=adapters_of(campaign, frozen, [arms.final.version]),
        source=frozen.run_id,
        trained_on=frozen.train,
        model_files=frozen.model.files,
    )


def _numbered(text: str, most: int) -> tuple[int, int]:
    """K and N of K/N."""
    first, slash, second = text.partition("/")
    if not slash or not (first.isascii() and first.isdigit()):
        raise ConfigurationError("not of the form K/N", f"--shard {text}", "such as --shard 1/2")
    if not (second.isascii() and second.isdigit()) or not 1 <= int(first) <= int(second) <= most:
        raise ConfigurationError(
            f"there are shards 1 to N, N at most {most}: one task each",
            f"--shard {text}",
            "such as --shard 1/2",
        )
    return int(first), int(second)


def with_overrides(frozen: Frozen, options: argparse.Namespace) -> CampaignConfig:
    """The campaign's configuration, with what the command line replaces.

    Raises:
        ConfigurationError: a replaced value is wrong.
    """
    from rl.config_file import parse_config, replaced

    if frozen.kind != "campaign":
        raise ConfigurationError(
            f"is a {frozen.kind}, and no campaign", frozen.run_id, "name a run of rl.final"
        )
    frozen.campaign_config()  # damage is told as such
    frozen_keys = [key for key in overrides(options) if key.startswith(_OF_CAMPAIGN)]
    if frozen_keys:
        raise ConfigurationError(
            f"'{frozen_keys[0]}' is the campaign's own: its weights belong to its model and tasks",
            "--set",
            "set what serves them (engine, episodes, sandbox, limits, resources, agent)",
        )
    return parse_config(replaced(frozen.config, overrides(options)), "frozen.json and --set")


def adapters_of(
    campaign: CampaignDir, frozen: Frozen, updates: list[int]
) -> dict[str, AdapterBytes]:
    """The adapters of some checkpoints, verified; of the newest, if none is named.

    Raises:
        EvidenceError: there is no such checkpoint, or it is damaged.
    """
    from rl.learner.checkpoint import latest, load
    from rl.learner.manifest import directory_name, update_of

    newest = latest(campaign.checkpoints) if campaign.checkpoints.is_dir() else None
    if newest is None:
        raise EvidenceError(
            "holds no complete checkpoint", str(campaign.checkpoints), "train the campaign first"
        )
    found: dict[str, AdapterBytes] = {}
    for update in sorted(set(updates)) or [update_of(newest)]:
        path = campaign.checkpoints / directory_name(update or 0)
        if not path.is_dir():
            raise EvidenceError(
                f"no checkpoint of update {update}",
                str(campaign.checkpoints),
                f"see which there are: python -m rl.checkpoint list {campaign.root}",
            )
        found[f"step{update}"] = load(path, frozen.config_digest).learner.adapter
    return found


def _bounded(given: int | None, own: int, option: str) -> int:
    if given is None:
        return own
    if given < 1:
        raise ConfigurationError("must be at least 1", option, "give a greater number")
    return given


def cli() -> NoReturn:
    """The console script."""
    run_command(main)


if __name__ == "__main__":
    cli()
