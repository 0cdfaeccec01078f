"""The PEFT learner: gradients that accumulate as groups arrive, and the step.

Invariants:
- Gradients are summed over tokens; the division by the update's loss tokens
  happens once, at the step, so groups may come one by one and in any order.
- A group is refused, before any arithmetic, unless it is for the next update,
  of one version, and within the staleness bound.
- A non-finite loss or gradient never reaches the optimizer: weights, moments and
  version stay as they were, and the update's gradients so far are dropped.
- `state` and `load_state` lose nothing: on CPU a resumed learner goes on bit for bit.
"""

from __future__ import annotations

import io
import math
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl.config import CampaignConfig
from rl.errors import CampaignError, EvidenceError, StalenessViolation
from rl.learner.losses import token_loss, vanishes_without_advantage
from rl.learner.packing import MicroBatch, pack, training_sequences
from rl.learner.policy import Policy
from rl.learner.state import LearnerState, files_sha256
from rl.learner.tally import Tally
from rl.records import AdapterBytes, Group, Probe, UpdateMetrics


class NonFiniteError(CampaignError):
    """A loss or gradient was NaN or infinite; the update's gradients were dropped."""


class PeftLearner:
    """LoRA training of one model on one device."""

    def __init__(self, config: CampaignConfig, model_dir: Path) -> None:
        """Version 0: the base in `model_dir` with a fresh adapter.

        Raises:
            ConfigurationError: the model can't be loaded or can't be trained by this learner.
        """
        if config.trainer.device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._policy = Policy(config, model_dir)
        settings = config.trainer.optimizer
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._version = 0
        self._tally = Tally()

    @property
    def version(self) -> int:
        """The policy version that the weights are."""
        return self._version

    def accumulate(self, update: int, group: Group) -> None:
        """Add one group's gradient to those of `update`, which must be the next one.

        Raises:
            StalenessViolation: wrong update, mixed versions, a version beyond the
                bound or from the future; nothing is changed.
            EvidenceError: a group twice, or an episode that is not graded.
            EngineError: a sampler's logprob that is none.
            NonFiniteError: the loss is not finite; all gradients of `update` are
                dropped, and all its groups must be accumulated again to go on.
        """
        started = time.perf_counter()
        staleness = self._admit(update, group)
        trainer = self._config.trainer
        sequences = training_sequences(group, trainer.loss.advantage)
        batches = pack(sequences, trainer.micro_batch_tokens, self._policy.shares_prefixes)
        for batch in batches:
            self._backward(batch.to(self._policy.device), group)
        self._tally.add_group(group, staleness)
        self._tally.seconds += time.perf_counter() - started

    def step(self, update: int) -> UpdateMetrics:
        """Turn the accumulated gradients into version `update`.

        `seconds` of the result is the time spent in `accumulate` and `step`,
        without the waits for groups in between.

        Raises:
            StalenessViolation: `update` is not the next one.
            EvidenceError: no sampled token was accumulated.
            NonFiniteError: the gradient is not finite; no step was made and the
                gradients are dropped.
        """
        started = time.perf_counter()
        self._check_next(update, "step")
        tally, settings = self._tally, self._config.trainer.optimizer
        if tally.loss_tokens == 0:
            raise EvidenceError("no sampled token to train on", f"update {update}")
        gradients = self._mean_gradients(tally.loss_tokens)
        norm = get_total_norm(gradients)
        if not math.isfinite(float(norm)):
            self.discard()
            raise NonFiniteError(f"the gradient's norm is {float(norm)}", f"update {update}")
        clip_grads_with_norm_(self._policy.parameters, settings.clip_norm, norm)
        lr = learning_rate(settings.lr, settings.warmup_updates, update)
        for options in self._optimizer.param_groups:
            options["lr"] = lr
        self._optimizer.step()
        self._version = update
        self.discard()
        tally.seconds += time.perf_counter() - started
        return tally.metrics(update, float(norm), lr)

    def discard(self) -> None:
        """Drop the gradients and figures accumulated since the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._tally = Tally()

    def export(self) -> AdapterBytes:
        """The current adapter in PEFT's files, with its probe."""
        files = self._policy.adapter_files()
        return AdapterBytes(
            version=self._version,
            files=files,
            sha256=files_sha256(files),
            probe=self._policy.probe(),
        )

    def probe_base(self) -> Probe:
        """The probe of the base model, adapter disabled."""
        return self._policy.probe_base()

    def state(self) -> LearnerState:
        """Everything needed to go on after this update.

        Raises:
            EvidenceError: groups of the next update were accumulated already; they
                would be lost.
        """
        if self._tally.groups:
            raise EvidenceError(
                f"groups of update {self._version + 1} are accumulated already",
                "learner state",
                "take the state right after the step",
            )
        cuda = self._policy.device.type == "cuda"
        buffer = io.BytesIO()
        torch.save(
            {
                "version": self._version,
                "optimizer": self._optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if cuda else [],
            },
            buffer,
        )
        return LearnerState(adapter=self.export(), optimizer=buffer.getvalue())

    def load_state(self, state: LearnerState) -> None:
        """Become the learner that `state` was taken from.

        Raises:
            EvidenceError: the state's parts are of different versions, or of
                another adapter.
        """
        saved: dict[str, Any] = torch.load(
            io.BytesIO(state.optimizer), map_location="cpu", weights_only=True
        )
        if saved["version"] != state.adapter.version:
            raise EvidenceError(
                f"adapter of version {state.adapter.version}, optimizer of {saved['version']}",
                "learner state",
            )
        self._policy.load_adapter(state.adapter.files)
        self._optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        if saved["cuda_rng"] and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["cuda_rng"])
        self._version = state.adapter.version
        self.discard()

    def peak_memory_bytes(self) -> int:
        """Most memory held so far: the device's on cuda, else the process's."""
        if self._policy.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._policy.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

    def _check_next(self, update: int, action: str) -> None:
        if update != self._version + 1:
            raise StalenessViolation(
                f"{action} for update {update}, but version {self._version} comes before "
                f"update {self._version + 1}",
                "learner",
            )

    def _admit(self, update: int, group: Group) -> int:
        """The group's staleness, if it may be trained on."""
        where = f"update {update}, group {group.group_id}"
        self._check_next(update, f"group {group.group_id}")
        staleness = (update - 1) - group.version
        bound = self._config.schedule.max_staleness
        if not 0 <= staleness <= bound:
            raise StalenessViolation(
                f"version {group.version} is {staleness} updates stale, the bound is {bound}", where
            )
        mixed = sorted({episode.version for episode in group.episodes} - {group.version})
        if mixed:
            raise StalenessViolation(
                f"group of version {group.version} holds episodes of {mixed}", where
            )
        if group.group_id in self._tally.groups:
            raise EvidenceError("the group was accumulated already", where)
        return staleness

    def _backward(self, batch: MicroBatch, group: Group) -> None:
        loss_config = self._config.trainer.loss
        idle = vanishes_without_advantage(loss_config) and not bool(batch.advantages.any())
        with torch.set_grad_enabled(not idle):
            scores = self._policy.scores(batch, self._config.agent.temperature)
            result = token_loss(
                loss_config,
                scores.logprobs,
                batch.sampler_logprobs,
                batch.advantages,
                torch.ones_like(batch.advantages),
            )
        if not bool(torch.isfinite(result.loss)):
            update = self._version + 1
            self.discard()
            raise NonFiniteError(
                f"the loss is {float(result.loss.detach())}",
                f"update {update}, group {group.group_id}",
                "look at the group's logprobs and at the learning rate",
            )
        if not idle:
            result.loss.backward()
        self._tally.add_batch(batch, result, scores.entropy)

    def _mean_gradients(self, tokens: int) -> list[torch.Tensor]:
        """The gradients, divided in place; zeros where no group left any."""
        gradients: list[torch.Tensor] = []
        for weight in self._policy.parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad.div_(tokens))
        return gradients


def learning_rate(peak: float, warmup_updates: int, update: int) -> float:
    """Learning rate of `update` (from 1): linear to `peak` over the warm-up, then constant."""
    return peak * min(1.0, update / warmup_updates) if warmup_updates else peak
