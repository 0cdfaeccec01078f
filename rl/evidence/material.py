"""What the checks of an audit work on.

Invariant: it is read once and never changed; what could not be read is None or
empty, and the reading has made a finding of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.config import CampaignConfig, ServingConfig
from rl.evidence.events import Event
from rl.evidence.frozen import EvaluationPlan, Frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import LifecycleRow
from rl.evidence.rows import Arms, Gates, UpdateRow
from rl.records import EpisodeRecord, TaskRef, UpdateMetrics


@dataclass(frozen=True, slots=True)
class Material:
    """All that could be read; episodes are without tokens and turns."""

    directory: CampaignDir
    frozen: Frozen
    config: CampaignConfig | None  # of a campaign
    serving: ServingConfig | None  # of any run
    plan: EvaluationPlan | None
    train: list[EpisodeRecord]
    evals: list[EpisodeRecord]
    heldout: list[EpisodeRecord]
    lines: dict[str, str]  # sha256 of an attempt's line in its trace
    metrics: list[UpdateMetrics]
    updates: list[UpdateRow]
    events: list[Event]
    lifecycle: list[LifecycleRow]
    arms: Arms | None
    gates: Gates | None
    superseded: set[str]  # adapters of updates that were made again
    shards: list[EpisodeRecord]  # held-out episodes of shards that other runs have evaluated

    @property
    def records(self) -> list[EpisodeRecord]:
        """Every record of every stage that the run itself has dispatched."""
        return [*self.train, *self.evals, *self.heldout]

    @property
    def measured(self) -> list[EpisodeRecord]:
        """Every held-out record, whichever run has dispatched it."""
        return [*self.heldout, *self.shards]

    @property
    def evaluated(self) -> list[TaskRef]:
        """The tasks on which arms are evaluated."""
        count = self.config.heldout_tasks if self.config else len(self.frozen.heldout)
        return self.frozen.heldout[:count]

    @property
    def eval_tasks(self) -> list[TaskRef]:
        """The tasks of evaluations during training."""
        return self.frozen.heldout[: self.config.eval_tasks] if self.config else []

    @property
    def campaign(self) -> bool:
        """Whether the run trains, or only evaluates."""
        return self.frozen.kind == "campaign"
