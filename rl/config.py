"""The configuration of a campaign: one typed tree, read from one TOML file.

Invariants:
- Unknown keys are refused; nothing is ever ignored.  `rl.config_file` reads the
  tree from a file and explains what is wrong with it.
- A loaded `CampaignConfig` is frozen and consistent: whatever can be checked
  without a model, a task or a cluster has been checked.
- `digest()` depends on values alone, so a campaign can prove that the
  configuration it resumes is the one it started with.
- Importing this module costs little: no Ray, no torch, no Harbor.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rl.modal_config import ModalConfig
from rl.serving_config import (
    EngineConfig,
    EpisodeConfig,
    ModelConfig,
    ResourcesConfig,
    SandboxConfig,
    ScriptedEngineConfig,
    ServingConfig,
    TasksConfig,
)
from rl.trainer_config import TrainerConfig
from rl.values import (
    AtLeastTwo,
    Flag,
    NonNegative,
    Positive,
    Section,
)

__all__ = [
    "CampaignConfig",
    "CheckpointConfig",
    "EngineConfig",
    "EpisodeConfig",
    "EvalConfig",
    "HeldoutConfig",
    "ModalConfig",
    "ModelConfig",
    "ResourcesConfig",
    "SandboxConfig",
    "ScheduleConfig",
    "ScriptedEngineConfig",
    "ServingConfig",
    "TasksConfig",
]


class ScheduleConfig(Section):
    """Updates, batches and staleness."""

    updates: Positive = Field(description="optimizer updates in the campaign")
    batch_size: Positive = Field(description="episodes per update, whole groups")
    group_size: AtLeastTwo = Field(description="attempts per task under one policy version")
    max_staleness: NonNegative = Field(
        default=1, description="bound on (t-1)-v for an episode of version v in update t"
    )
    refill_zero_variance: NonNegative = Field(
        default=0,
        description="groups per update whose rewards are all equal that are replaced by fresh "
        "ones; beyond it they are kept and contribute no gradient",
    )
    min_group: AtLeastTwo = Field(default=2, description="fewest graded attempts to train on")
    attempt_retries: NonNegative = Field(
        default=2,
        description="relaunches of a masked attempt; a group shares those of its attempts, so "
        "that a lost replica, which masks half of every group at once, costs no group its size",
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> ScheduleConfig:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}"
            )
        if self.min_group > self.group_size:
            raise ValueError("min_group may not exceed group_size")
        return self

    @property
    def group_retries(self) -> int:
        """Relaunches of masked attempts in one group."""
        return self.attempt_retries * self.group_size

    @property
    def groups_per_batch(self) -> int:
        """Groups in one batch."""
        return self.batch_size // self.group_size


class CheckpointConfig(Section):
    """Full checkpoints."""

    updates: tuple[Positive, ...] = Field(
        default=(), description="updates whose checkpoints are kept; the newest always is"
    )


class HeldoutConfig(Section):
    """Held-out evaluation of base and final weights."""

    attempts: Positive = Field(description="attempts per task and arm")
    shards: Positive = Field(default=2, description="disjoint sets of tasks, each on one replica")
    tasks: Positive | None = Field(
        default=None, description="evaluate only the first so many held-out tasks"
    )


class EvalConfig(Section):
    """Evaluations during training: of the version that every so many updates make.

    Their attempts take slots between those of training, ahead of it; they are never
    trained on, and the version stays served until they have ended.
    """

    interval: Positive = Field(description="updates from one evaluated version to the next")
    at_start: Flag = Field(default=False, description="evaluate version 0, before any update, too")
    attempts: Positive = Field(default=1, description="attempts per task and version")
    tasks: Positive | None = Field(
        default=None, description="the first so many held-out tasks; those of [heldout] if absent"
    )


class CampaignConfig(ServingConfig):
    """One RL campaign, whole."""

    schedule: ScheduleConfig = Field(description="updates, batches, staleness")
    trainer: TrainerConfig = Field(description="the learner")
    checkpoints: CheckpointConfig = Field(
        default=CheckpointConfig(), description="full checkpoints"
    )
    heldout: HeldoutConfig = Field(description="held-out evaluation")
    eval: EvalConfig | None = Field(
        default=None, description="evaluations during training; none if absent"
    )
    modal: ModalConfig | None = Field(
        default=None, description="what is rented on Modal; nothing if absent"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> CampaignConfig:
        self._training_fits()
        self._evaluation_fits()
        return self

    def _training_fits(self) -> None:
        if self.engine.max_loras < self.schedule.max_staleness + 1:
            raise ValueError(
                "engine.max_loras must be at least schedule.max_staleness + 1, or an episode "
                "of the older version waits for the newer one's to end"
            )
        prime = self.trainer.prime
        if prime is not None and self.limits.start_s <= prime.start_timeout_s:
            raise ValueError("limits.start_s must exceed trainer.prime.start_timeout_s")
        late = [t for t in self.checkpoints.updates if t > self.schedule.updates]
        if late:
            raise ValueError(f"checkpoints.updates names updates beyond the last: {late}")
        gpus = self.resources.trainer_gpus
        if self.trainer.backend == "prime-rl" and (gpus < 1 or gpus != int(gpus)):
            raise ValueError("backend = 'prime-rl' needs whole GPUs in resources.trainer_gpus")
        if self.trainer.device == "cuda" and 1 < self.trainer.ranks != gpus:
            raise ValueError("trainer.ranks needs as many GPUs in resources.trainer_gpus")

    def _evaluation_fits(self) -> None:
        if self.heldout.shards > self.engine.replicas:
            raise ValueError("heldout.shards may not exceed engine.replicas")
        if self.heldout.shards > (self.heldout.tasks or self.tasks.heldout):
            raise ValueError("heldout.shards may not exceed the number of held-out tasks")
        if self.eval is None:
            return
        if self.engine.max_loras < self.schedule.max_staleness + 2:
            raise ValueError(
                "engine.max_loras must be at least schedule.max_staleness + 2 with [eval]: a "
                "version under evaluation is served beside those that training needs"
            )
        if (self.eval.tasks or 0) > self.tasks.heldout:
            raise ValueError("eval.tasks may not exceed tasks.heldout")

    @property
    def lora_rank(self) -> int | None:
        """See `ServingConfig`."""
        return self.trainer.lora.rank

    @property
    def training_episodes(self) -> int:
        """Episodes trained on in the whole campaign."""
        return self.schedule.updates * self.schedule.batch_size

    @property
    def heldout_tasks(self) -> int:
        """Held-out tasks that are evaluated."""
        return min(self.heldout.tasks or self.tasks.heldout, self.tasks.heldout)

    @property
    def heldout_attempts(self) -> int:
        """Held-out attempts over both arms."""
        return 2 * self.heldout_tasks * self.heldout.attempts

    @property
    def eval_tasks(self) -> int:
        """Held-out tasks of each evaluation during training."""
        if self.eval is None:
            return 0
        return min(self.eval.tasks or self.heldout_tasks, self.tasks.heldout)

    @property
    def eval_cells(self) -> int:
        """Attempts of each evaluation during training."""
        return self.eval_tasks * self.eval.attempts if self.eval is not None else 0

    @property
    def eval_versions(self) -> tuple[int, ...]:
        """Versions that are evaluated during training, ascending.

        Not the last: the held-out evaluation measures it, by more attempts.
        """
        if self.eval is None:
            return ()
        first = 0 if self.eval.at_start else self.eval.interval
        return tuple(range(first, self.schedule.updates, self.eval.interval))
