"""One run of prime-rl's trainer: its process, and the files that go to and fro.

Invariants:
- Before the process starts, its installation has answered for itself, what lies
  past the resume step is gone, and a checkpoint to resume from was found whole.
- Weights are taken the moment they are said to be whole, and count only when they
  are checked, in PEFT's form and have their probe.
- Version `t` exists exactly when step `t` has its completion manifest.
- A failure ends the process with everything below it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.prime_command import PrimeCommand
from actors.prime_process import PrimeProcess, ask
from rl.config import CampaignConfig
from rl.errors import EvidenceError
from rl.files import disk_errors, write_bytes
from rl.learner.prime.adapter import read_broadcast, to_peft
from rl.learner.prime.files import CheckpointRef, PrimeFiles, StepManifest
from rl.learner.prime.installation import check_answer, question
from rl.learner.prime.rows import MetricsRows, update_metrics
from rl.learner.prime.settings import METRICS_FILE, native_config, prime
from rl.learner.prime.wire import MicroBatch
from rl.learner.state import files_sha256
from rl.records import AdapterBytes, Group, Probe, UpdateMetrics

ASK_S = 300.0  # a first import of its packages from a cold disk
STOP_S = 20.0
# Of an update's limit, so that our own message comes before the caller's.
OWN_SHARE = 0.95


class Prober(Protocol):
    """What computes a probe; see `rl.learner.prime.probe.ProbeModel`."""

    def probe(self, files: dict[str, bytes]) -> Probe:
        """Logprobs under base and adapter."""
        ...


class PrimeRun:
    """See the module's invariants.

    Args:
        config: the campaign's.
        model_dir: base weights.
        files: prime-rl's output directory.
        log_path: of the process.
        command: how it is started.
        prober: computes probes of adapters in PEFT's form.
    """

    def __init__(
        self,
        config: CampaignConfig,
        model_dir: Path,
        files: PrimeFiles,
        log_path: Path,
        command: PrimeCommand,
        prober: Prober,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._files = files
        self._command = command
        self._prober = prober
        self._process = PrimeProcess(command, log_path)
        self._rows = MetricsRows(files.root / METRICS_FILE)
        self._checkpoint: CheckpointRef | None = None
        self._adapter: AdapterBytes | None = None

    @property
    def adapter(self) -> AdapterBytes:
        """The current version's, with its probe."""
        if self._adapter is None:
            raise EvidenceError("the trainer was not started", "prime-rl")
        return self._adapter

    @property
    def checkpoint(self) -> CheckpointRef | None:
        """prime-rl's checkpoint of the current version; None at version 0."""
        return self._checkpoint

    def start(self, resume: AdapterBytes | None, ref: CheckpointRef | None) -> None:
        """Start the process and take the weights that it starts from.

        Args:
            resume: the adapter of the version to go on from; None: afresh.
            ref: prime-rl's checkpoint of that version.

        Raises:
            EvidenceError: the checkpoint can't be resumed from, or the process starts
                from other weights than it holds.
            ConfigurationError: not the pinned prime-rl, or it refuses the configuration.
            TrainerError: it died, or broadcast something broken.
            DeadlineExceeded: no weights within `trainer.prime.start_timeout_s`.
        """
        deadline = time.monotonic() + prime(self._config).start_timeout_s
        step = 0 if ref is None else ref.step
        self._files.prepare()
        if ref is not None:
            self._files.require(ref)
        self._inspect(step)
        self._files.clear_past(step)
        self._rows = MetricsRows(self._files.root / METRICS_FILE)
        with disk_errors(self._process.log_path):
            self._process.start()
        try:
            adapter = self._take(step, deadline)
        except BaseException:
            self.stop()
            raise
        if resume is not None and adapter.sha256 != resume.sha256:
            self.stop()
            raise EvidenceError(
                f"prime-rl starts from other weights than the checkpoint of update {step} holds",
                str(self._files.broadcast(step)),
                "go on from an older checkpoint, or start a new campaign",
            )
        self._adapter, self._checkpoint = adapter, ref

    def step(self, groups: Sequence[Group], ranks: Sequence[Sequence[MicroBatch]]) -> UpdateMetrics:
        """Make the next version of this batch.

        Raises:
            TrainerError: the process died, or broke its contract.
            DeadlineExceeded: not done within `trainer.update_timeout_s`.
        """
        deadline = time.monotonic() + OWN_SHARE * self._config.trainer.update_timeout_s
        update = self.adapter.version + 1
        try:
            digests = self._files.write_batch(update, ranks)
            adapter = self._take(update, deadline)
            row = self._process.wait_for(
                lambda: self._rows.finished(update), deadline, f"the metrics of step {update}"
            )
            metrics = update_metrics(self._config, update, row, groups, ranks)
            checkpoint = self._files.checkpoint(update)
        except BaseException:
            self.stop()
            raise
        manifest = StepManifest(
            update=update,
            group_ids=sorted(group.group_id for group in groups),
            batch_sha256=digests,
            adapter_sha256=adapter.sha256,
            checkpoint=checkpoint,
        )
        self._files.complete(manifest)
        self._files.forget(update - 1)
        self._adapter, self._checkpoint = adapter, checkpoint
        return metrics

    def stop(self) -> None:
        """End the process."""
        self._process.stop(STOP_S)

    def processes(self) -> list[int]:
        """Ids of all its processes."""
        return self._process.processes()

    def _inspect(self, step: int) -> None:
        """Write prime-rl's configuration and have its installation answer for itself."""
        sent: dict[str, Any] = native_config(self._config, self._model_dir, self._files.root, step)
        write_bytes(self._files.config, json.dumps(sent, indent=2).encode() + b"\n")
        answer = ask(self._command, question(self._files.config), ASK_S)
        check_answer(answer, self._command.inspect[0], sent)

    def _take(self, step: int, deadline: float) -> AdapterBytes:
        """The weights of `step`, once they are whole, with their probe."""
        folder = self._files.broadcast(step)
        self._process.wait_for(
            lambda: self._files.is_stable(step) or None, deadline, f"the weights of step {step}"
        )
        raw = read_broadcast(folder)  # at once: it removes older ones by itself
        files = to_peft(raw, self._config, str(folder))
        return AdapterBytes(
            version=step,
            files=files,
            sha256=files_sha256(files),
            probe=self._prober.probe(files),
        )


def parse_ref(blob: bytes, where: str) -> CheckpointRef:
    """The reference that a checkpoint of ours holds in the optimizer's place.

    Raises:
        EvidenceError: it holds something else.
    """
    try:
        return CheckpointRef.model_validate_json(blob)
    except ValueError as error:
        raise EvidenceError(
            "holds no reference to a checkpoint of prime-rl",
            where,
            "resume with the backend that wrote it",
        ) from error
