"""What must hold before anything that costs is asked for.

Invariants:
- A guard starts nothing and asks no provider to make anything.
- All guards are walked before a launch is refused, so that one refusal names everything.
- Each refusal says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.config import CampaignConfig
from rl.errors import CampaignError, ConfigurationError
from rl.evidence.code_pin import CodePin
from rl.evidence.frozen import require_disjoint, require_distinct
from rl.evidence.receipts import Ledger
from rl.evidence.rehearsals import require_rehearsed
from rl.records import TaskRef
from sandboxes.gates import load_report, require_gate
from sandboxes.modal_image import PINNED
from sandboxes.tasks import load_package

_PINNED_BASE = re.compile(r"^FROM[ \t]+\S+@sha256:[0-9a-f]{64}[ \t]*$", re.MULTILINE)
_ANY_BASE = re.compile(r"^FROM\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Guard:
    """One thing that must hold.

    Attributes:
        name: what it is about.
        check: returns what was found, or raises a `CampaignError`.
    """

    name: str
    check: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Walked:
    """What a guard said.

    Attributes:
        refusal: None if it holds.
    """

    name: str
    found: str
    refusal: CampaignError | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be launched.

    Attributes:
        config: of the campaign.
        origin: the file that it was read from, for remedies.
        train: training tasks.
        heldout: held-out tasks.
        task_root: folder of their packages.
        code: the program.
        state: where gates, rehearsals and receipts are kept.
    """

    config: CampaignConfig
    origin: str
    train: Sequence[TaskRef]
    heldout: Sequence[TaskRef]
    task_root: Path
    code: CodePin
    state: Path


def launch_guards(launch: Launch) -> list[Guard]:
    """The guards of every launch, but for those of a provider and of a run id."""
    return [
        Guard("model revision", lambda: _model(launch.config)),
        Guard("task sets are disjoint", lambda: _disjoint(launch)),
        Guard("every task has passed its gate", lambda: _gated(launch)),
        Guard("base images are pinned by digest", _images),
        Guard("code revision", lambda: _code(launch.code)),
    ]


def rehearsal_guard(launch: Launch) -> Guard:
    """That this very configuration and code have been rehearsed: training and evaluation."""
    command = f"python -m rl.final --config {launch.origin} --rehearse"

    def check() -> str:
        root = launch.state / "rehearsals"
        found = require_rehearsed(root, launch.config.digest(), launch.code, command)
        runs = ", ".join(run.name for run in found.dry_runs)
        return f"{len(found.steps)} steps and the dry runs {runs}"

    return Guard("train and evaluation dry runs", check)


def receipt_guard(ledger: Ledger, run_id: str) -> Guard:
    """That nothing was ever submitted under a run id."""

    def check() -> str:
        ledger.require_settled(run_id)
        entries = ledger.entries(run_id)
        if entries:
            raise ConfigurationError(
                f"run '{run_id}' was submitted before ({entries[-1].intent.submission_id})",
                str(ledger.root / run_id),
                f"continue it with --resume {run_id}, or choose another --run-id",
            )
        return f"nothing was submitted as '{run_id}'"

    return Guard("no receipt or intent of this run id", check)


def walk(guards: Sequence[Guard]) -> list[Walked]:
    """Walk all guards, also after one has refused."""
    walked: list[Walked] = []
    for guard in guards:
        try:
            walked.append(Walked(guard.name, guard.check()))
        except CampaignError as refusal:
            walked.append(Walked(guard.name, refusal.what, refusal))
    return walked


def require(guards: Sequence[Guard]) -> list[Walked]:
    """Walk all guards; refuse if one does; what several say alike is told once.

    Raises:
        CampaignError: the refusal, or all of them in one `ConfigurationError`.
    """
    walked = walk(guards)
    refusing = [one.refusal for one in walked if one.refusal is not None]
    refusals = list({str(refusal): refusal for refusal in refusing}.values())
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        listed = [str(refusal).replace("\n", "\n    ") for refusal in refusals]
        raise ConfigurationError(
            "\n  - ".join([f"{len(refusing)} guards refuse the launch:", *listed]), "launch"
        )
    return walked


def require_launch(launch: Launch, ledger: Ledger, run_id: str) -> list[Walked]:
    """All guards of a launch that costs.

    Raises:
        CampaignError: as for `require`.
    """
    guards = [*launch_guards(launch), rehearsal_guard(launch), receipt_guard(ledger, run_id)]
    return require(guards)


def rents(config: CampaignConfig) -> bool:
    """Whether a run of this configuration costs by the second."""
    return config.sandbox.provider == "modal"


def _model(config: CampaignConfig) -> str:
    model = config.model
    if model.source == "path":
        return f"{model.name}: local files, pinned by content when the run is frozen"
    return f"{model.name} at {model.revision or model.sha256}"


def _disjoint(launch: Launch) -> str:
    require_disjoint(launch.train, launch.heldout)
    require_distinct(launch.train, launch.heldout, launch.config.tasks.near_duplicate)
    return f"{len(launch.train)} training and {len(launch.heldout)} held-out tasks"


def _gated(launch: Launch) -> str:
    tasks = [*launch.train, *launch.heldout]
    packages = [load_package(launch.task_root / task.path, task.name) for task in tasks]
    report = launch.state / "gates" / "report.json"
    command = f"python -m rl.gate {launch.task_root} --report {report}"
    require_gate(load_report(report), packages, command)
    return f"all {len(packages)}"


def _images() -> str:
    """The base of every image that packages are built from.

    Raises:
        ConfigurationError: one is named by a tag, which can move.
    """
    files = sorted(PINNED.parent.glob("*.Dockerfile"))
    for path in files:
        text = path.read_text(encoding="utf-8")
        if len(_ANY_BASE.findall(text)) != len(_PINNED_BASE.findall(text)):
            raise ConfigurationError(
                "a base image is not pinned by digest", str(path), "write FROM NAME@sha256:DIGEST"
            )
    return ", ".join(path.name for path in files)


def _code(code: CodePin) -> str:
    """The code's commit, or a difference that is kept.

    Raises:
        ConfigurationError: it is not known what the code is.
    """
    if code.commit is None:
        raise ConfigurationError(
            "the code is in no git checkout, so its revision is not known",
            "code",
            "launch from a checkout",
        )
    if code.dirty:
        return (
            f"commit {code.commit[:12]} with changes (sha256 {str(code.diff_sha256)[:12]}), "
            "which the run keeps whole in source.tar.zst"
        )
    return f"commit {code.commit[:12]}, unchanged"
