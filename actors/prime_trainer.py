"""The trainer actor of the prime-rl backend: owns prime-rl's process on its GPUs.

Invariants:
- It has the methods of `actors.trainer.Trainer` and keeps the same promises: a
  version exists exactly when its update has finished, and what breaks the
  staleness bound, or is not the batch asked for, is refused before anything is
  handed over.
- Groups are only collected as they arrive: prime-rl takes a batch whole.
- A checkpoint of ours names prime-rl's own of the same update, which is there for
  as long as ours is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from actors.adapter_ref import AdapterRef
from actors.prime_command import PrimeCommand, prime_command
from actors.prime_run import PrimeRun, parse_ref
from rl.config import CampaignConfig
from rl.files import disk_errors
from rl.learner.prime.files import PrimeFiles
from rl.learner.prime.settings import ranks, token_budget
from rl.records import AdapterBytes, EpisodeRecord, Group, UpdateMetrics

PRIME_FOLDER = "prime-rl"
LOG_FILE = "prime-rl.log"


class PrimeTrainer:
    """See the module's invariants.

    Args:
        config: the campaign's configuration.
        model_dir: base weights.
        checkpoints: directory of full checkpoints; prime-rl's own lie beside it.
        resume: continue from this checkpoint.
        command: how prime-rl is started; None: as the environment says.
    """

    def __init__(
        self,
        config: CampaignConfig,
        model_dir: Path,
        checkpoints: Path,
        resume: Path | None = None,
        command: PrimeCommand | None = None,
    ) -> None:
        self._config = config
        self._model_dir = Path(model_dir).resolve()
        self._checkpoints = checkpoints
        self._resume = resume
        home = Path(checkpoints).resolve().parent
        self._files = PrimeFiles(home / PRIME_FOLDER)
        self._log = home / "logs" / LOG_FILE
        self._command = command
        self._run: PrimeRun | None = None
        self._state = "starting"
        self._stepped = time.monotonic()
        self._batch = self._empty_batch()

    def __repr__(self) -> str:
        done = "?" if self._run is None else self._run.adapter.version
        return f"PrimeTrainer version {done}/{self._config.schedule.updates} {self._state}"

    def ready(self) -> int:
        """Start prime-rl unless it runs; the version it stands at.

        Raises:
            CampaignError: as `PrimeRun.start`.
        """
        if self._run is None:
            self._run = self._started()
            self._state, self._stepped = "idle", time.monotonic()
        return self._run.adapter.version

    def accumulate_attempts(self, update: int, group_id: str, episodes: list[EpisodeRecord]) -> int:
        """Nothing is worked on ahead: prime-rl takes a batch whole."""
        del update, group_id, episodes
        return 0

    def accumulate(self, update: int, group: Group) -> None:
        """Add a complete group to the batch of `update`."""
        self._batch.add(update, self.ready(), group)
        of = self._config.schedule.groups_per_batch
        self._state = f"update {update} has {len(self._batch.groups)} of {of} groups"

    def drop(self, group_id: str) -> None:
        """Forget early work on a group: there never is any."""
        del group_id

    def step(self, update: int, group_ids: list[str]) -> tuple[UpdateMetrics, AdapterRef]:
        """Make version `update` of exactly these groups; its metrics and its adapter.

        Raises:
            EvidenceError: other groups were accumulated; nothing was changed.
            CampaignError: as `PrimeRun.step`.
        """
        version = self.ready()
        run = self._running()
        self._batch.check_next(update, version)
        share = self._batch.ranks_of(update, group_ids)
        self._state = f"update {update} step"
        metrics = run.step(self._batch.groups, share)
        self._batch = self._empty_batch()
        adapter = self.export()
        now = time.monotonic()
        metrics = metrics.model_copy(update={"wall_s": now - self._stepped})
        self._stepped, self._state = now, "idle"
        return metrics, adapter

    def export(self) -> AdapterRef:
        """The adapter of the current version, with its probe, in the object store."""
        self.ready()
        return AdapterRef.put(self._running().adapter)

    def checkpoint(self, frontier: dict[str, Any], config_digest: str) -> str:
        """Write a full checkpoint of the current version; returns its path."""
        from rl.learner.checkpoint import prune, save_checkpoint
        from rl.learner.state import LearnerState

        self._state = "checkpoint"
        adapter, ref = self._running().adapter, self._running().checkpoint
        blob = b"" if ref is None else ref.model_dump_json().encode()
        keep = set(self._config.checkpoints.updates)
        with disk_errors(self._checkpoints):
            path = save_checkpoint(
                self._checkpoints,
                adapter.version,
                LearnerState(adapter=adapter, optimizer=blob),
                dict(frontier),
                config_digest,
            )
            prune(self._checkpoints, keep)
        self._files.keep_checkpoints(keep | {adapter.version})
        self._state = "idle"
        return str(path)

    def _running(self) -> PrimeRun:
        if self._run is None:
            raise RuntimeError("`ready` was not called")
        return self._run

    def _started(self) -> PrimeRun:
        from rl.learner.prime.probe import ProbeModel

        command = self._command or prime_command(self._config, self._files.config, os.environ)
        resume, ref = self._resumed()
        run = PrimeRun(
            self._config,
            self._model_dir,
            self._files,
            self._log,
            command,
            ProbeModel(self._config, self._model_dir),
        )
        run.start(resume, ref)
        return run

    def _resumed(self) -> tuple[AdapterBytes | None, Any]:
        """The adapter and prime-rl's checkpoint to go on from."""
        if self._resume is None:
            return None, None
        from rl.learner.checkpoint import load

        state = load(self._resume, self._config.digest()).learner
        if state.adapter.version == 0:
            return None, None
        return state.adapter, parse_ref(state.optimizer, str(self._resume))

    def _empty_batch(self) -> Any:
        from rl.learner.prime.batches import PendingBatch

        return PendingBatch(self._config, token_budget(self._config), ranks(self._config))
