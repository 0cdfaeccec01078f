"""The trainer actor: owns the learner and its checkpoints.

Invariants:
- It is the only actor that imports torch, or that owns processes that do.
- Version `t` exists exactly when update `t` has finished; a failed update
  leaves weights, optimizer and version as they were.
- A group that breaks the staleness bound is refused before any arithmetic, and a
  step whose groups are not exactly those of its batch before any change.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.adapter_ref import AdapterRef
from rl.config import CampaignConfig
from rl.files import disk_errors
from rl.records import AdapterBytes, EpisodeRecord, Group, UpdateMetrics

if TYPE_CHECKING:
    from actors.ranked_learner import RankedLearner
    from rl.learner.peft_learner import PeftLearner

RANKS_LOG = "trainer-ranks.log"


class Trainer:
    """See the module's invariants.

    Args:
        config: the campaign's configuration.
        model_dir: base weights.
        checkpoints: directory of full checkpoints.
        resume: continue from this checkpoint.
    """

    def __init__(
        self,
        config: CampaignConfig,
        model_dir: Path,
        checkpoints: Path,
        resume: Path | None = None,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._learner = _learner(config, model_dir, checkpoints)
        self._state = "idle"
        self._streamed = 0
        self._stepped = time.monotonic()
        if resume is not None:
            from rl.learner.restore import restore

            restore(self._learner, resume, config.digest())

    def __repr__(self) -> str:
        done, updates = self._learner.version, self._config.schedule.updates
        return f"Trainer version {done}/{updates} {self._state}"

    def ready(self) -> int:
        """The version the learner stands at."""
        return self._learner.version

    def accumulate_attempts(self, update: int, group_id: str, episodes: list[EpisodeRecord]) -> int:
        """Work ahead on attempts of a group that is not complete; returns on how many."""
        self._state = f"update {update} attempts of {group_id}"
        return self._learner.accumulate_attempts(update, group_id, episodes)

    def accumulate(self, update: int, group: Group) -> None:
        """Add a complete group to the batch of `update`."""
        self._streamed += 1
        of = self._config.schedule.groups_per_batch
        self._state = f"update {update} streaming group {self._streamed}/{of}"
        self._learner.accumulate(update, group)

    def drop(self, group_id: str) -> None:
        """Forget the attempts of a group that will not be trained on."""
        self._learner.drop(group_id)

    def step(self, update: int, group_ids: list[str]) -> tuple[UpdateMetrics, AdapterRef]:
        """Make version `update` of exactly these groups; its metrics and its adapter.

        Raises:
            EvidenceError: other groups were accumulated; nothing was changed.
        """
        self._state = f"update {update} step"
        metrics = self._learner.step(update, group_ids)
        adapter = self.export()
        now = time.monotonic()
        metrics = metrics.model_copy(update={"wall_s": now - self._stepped})
        self._stepped, self._streamed, self._state = now, 0, "idle"
        return metrics, adapter

    def export(self) -> AdapterRef:
        """The adapter of the current version, with its probe, in the object store."""
        return AdapterRef.put(self._learner.export())

    def checkpoint(self, frontier: dict[str, Any], config_digest: str) -> str:
        """Write a full checkpoint of the current version; returns its path."""
        from rl.learner.checkpoint import prune, save_checkpoint

        self._state = "checkpoint"
        state = self._learner.state()
        with disk_errors(self._checkpoints):
            path = save_checkpoint(
                self._checkpoints, self._learner.version, state, dict(frontier), config_digest
            )
            prune(self._checkpoints, set(self._config.checkpoints.updates))
        self._state = "idle"
        return str(path)


def _learner(
    config: CampaignConfig, model_dir: Path, checkpoints: Path
) -> PeftLearner | RankedLearner:
    """The learner, in this process if it has no ranks to share the work with."""
    if config.trainer.ranks > 1:
        from actors.ranked_learner import RankedLearner

        log = Path(checkpoints).resolve().parent / "logs" / RANKS_LOG
        return RankedLearner(config, model_dir, log)
    from rl.learner.peft_learner import PeftLearner, seed_process

    seed_process(config.seed)
    return PeftLearner(config, model_dir)


def verify_checkpoint(
    path: Path, model_dir: Path, config: CampaignConfig
) -> tuple[AdapterBytes, float]:
    """Load a checkpoint afresh, in a process that did not write it.

    Returns:
        Its adapter, and the largest difference of the probe's
        logprobs between the loaded adapter and what the trainer recorded, nats.

    Raises:
        EvidenceError: a file is damaged, or the adapter does not reproduce its probe.
    """
    from rl.learner.checkpoint import load
    from rl.learner.fresh import verify_fresh

    difference = verify_fresh(path, model_dir, config)
    return load(path, config.digest()).learner.adapter, difference
