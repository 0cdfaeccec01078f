"""The trainer actor: owns the learner and its checkpoints.

Invariants:
- It is the only actor that imports torch.
- Version `t` exists exactly when update `t` has finished; a failed update
  leaves weights, optimizer and version as they were.
- A batch is refused whole if any group in it breaks the staleness bound.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rl.config import CampaignConfig
from rl.errors import StalenessViolation
from rl.files import disk_errors
from rl.records import AdapterBytes, Group, UpdateMetrics


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
        from rl.learner.peft_learner import PeftLearner

        self._config = config
        self._checkpoints = checkpoints
        self._learner = PeftLearner(config, model_dir)
        self._exported: AdapterBytes | None = None
        self._state = "idle"
        if resume is not None:
            from rl.learner.checkpoint import load

            self._learner.load_state(load(resume, config.digest()).learner)

    def __repr__(self) -> str:
        done, updates = self._learner.version, self._config.schedule.updates
        return f"Trainer update {done}/{updates} {self._state}"

    def ready(self) -> int:
        """The version the learner stands at."""
        return self._learner.version

    def update(self, update: int, groups: list[Group]) -> tuple[UpdateMetrics, str]:
        """Train one batch; returns its metrics and the new adapter's sha256."""
        if update != self._learner.version + 1:
            raise StalenessViolation(
                f"update {update} can't follow version {self._learner.version}", "trainer"
            )
        start = time.monotonic()
        for index, group in enumerate(groups, start=1):
            self._state = f"group {index}/{len(groups)}"
            self._learner.accumulate(update, group)
        self._state = "step"
        metrics = self._learner.step(update)
        self._exported = None
        adapter = self.export()
        self._state = "idle"
        return metrics.model_copy(update={"seconds": time.monotonic() - start}), adapter.sha256

    def export(self) -> AdapterBytes:
        """The adapter of the current version, with its probe."""
        if self._exported is None:
            self._exported = self._learner.export()
        return self._exported

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
