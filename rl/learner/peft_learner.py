"""The PEFT learner: gradients that accumulate as groups arrive, and the step.

Invariants:
- Gradients are summed as the loss is (`losses`); the division by the update's
  normaliser happens once, at the step, so groups may come one by one and in any order.
- An attempt may be worked on before its group is complete. That changes when the
  work is done, never what comes of it, and until the group is accumulated it
  counts for nothing; a step is refused while such work is left.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl.config import CampaignConfig
from rl.errors import CampaignError, EvidenceError, StalenessViolation
from rl.learner.early import EarlyWork, advantage_by_reward, early_sequences
from rl.learner.losses import token_loss, vanishes_without_advantage
from rl.learner.packing import (
    MicroBatch,
    TrainingSequence,
    pack,
    training_sequences,
)
from rl.learner.policy import Policy
from rl.learner.rate import learning_rate
from rl.learner.restore import read_optimizer
from rl.learner.state import LearnerState, files_sha256
from rl.learner.tally import Tally
from rl.records import AdapterBytes, EpisodeRecord, Group, Probe, UpdateMetrics


class NonFiniteError(CampaignError):
    """A loss or gradient was NaN or infinite; the update's gradients were dropped."""


def seed_process(seed: int) -> None:
    """Make this process's random state a function of `seed`; torch begins with a random one.

    Nothing of the learner draws from it today.  A model that does would go on, after a
    resume, where its checkpoint left off, and begin the same in every run.
    """
    torch.manual_seed(seed)


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
        self._tally = Tally(config.trainer.loss)
        self._early: dict[str, EarlyWork] = {}  # by group; none of it is in the gradients

    @property
    def version(self) -> int:
        """The policy version that the weights are."""
        return self._version

    def accumulate(self, update: int, group: Group) -> None:
        """Add one group's gradient to those of `update`, which must be the next one.

        What was worked on early of the group is used, or computed again where it
        turns out that it can't be.

        Raises:
            StalenessViolation: wrong update, mixed versions, a version beyond the
                bound or from the future; nothing is changed.
            EvidenceError: a group or an attempt twice, an episode that is not graded,
                or attempts worked on early that the group does not hold as they were.
            EngineError: a sampler's logprob that is none.
            NonFiniteError: the loss is not finite; all gradients of `update`, and all
                early work, are dropped; its groups must be accumulated again to go on.
        """
        started = time.perf_counter()
        loss = self._config.trainer.loss
        staleness = self._admit(update, group.group_id, group.version, group.episodes)
        work = self._early.get(group.group_id)
        if work is not None and not work.holds_for(group, loss):
            work = None
        done = work.digests if work is not None else ()
        batches = self._pack(training_sequences(group, loss.advantage, skip=done))
        self.drop(group.group_id)
        if work is not None:
            self._settle(work, group, staleness)
        for batch in batches:
            self._backward(batch, group.group_id, staleness)
        self._tally.add_group(group, staleness)
        self._tally.seconds += time.perf_counter() - started

    def accumulate_attempts(self, update: int, group_id: str, episodes: list[EpisodeRecord]) -> int:
        """Work on attempts of a group of `update` that isn't complete yet.

        Attempts whose part in the gradient needs the whole group are left for
        `accumulate`; calling this at all, and how often, is up to the caller.

        Returns:
            How many of `episodes` were worked on.

        Raises:
            StalenessViolation, EngineError, NonFiniteError: as `accumulate`.
            EvidenceError: a group that was accumulated already or that an episode is
                not of, an attempt twice, or an episode that is not graded.
        """
        started = time.perf_counter()
        if not episodes:
            return 0
        work = self._early.get(group_id) or EarlyWork(episodes[0].version)
        self._admit(update, group_id, work.version, episodes)
        work.check_new(group_id, episodes)
        taken, by_reward = early_sequences(episodes, self._config.trainer.loss)
        if not taken:
            return 0
        # Whatever is raised below, half-done work is forgotten: `accumulate` then does it all.
        self.drop(group_id)
        for reward, sequences in by_reward.items():
            for batch in self._pack(sequences):
                self._backward_early(batch, reward, work, group_id)
        work.note(taken)
        self._early[group_id] = work
        self._tally.seconds += time.perf_counter() - started
        return len(taken)

    def drop(self, group_id: str) -> None:
        """Forget what was worked on early of a group, if anything was."""
        self._early.pop(group_id, None)

    def step(self, update: int, group_ids: Sequence[str] | None = None) -> UpdateMetrics:
        """Turn the accumulated gradients into version `update`.

        `seconds` of the result is the time spent accumulating and stepping, work that
        was dropped included, without the waits in between.

        Args:
            update: the next one.
            group_ids: the groups that must have been accumulated, no more and no fewer.

        Raises:
            StalenessViolation: `update` is not the next one.
            EvidenceError: other groups than `group_ids`, early work of a group that
                wasn't accumulated, or no sampled token; nothing is changed.
            NonFiniteError: the gradient is not finite; no step was made and the
                gradients are dropped.
        """
        started = time.perf_counter()
        self._check_next(update, "step")
        self._check_whole(update, group_ids)
        tally, settings = self._tally, self._config.trainer.optimizer
        gradients = self._mean_gradients(tally.normaliser)
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
        """Drop the gradients, early work and figures since the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._tally = Tally(self._config.trainer.loss)
        self._early = {}

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
            EvidenceError: groups or attempts of the next update were accumulated
                already; they would be lost.
        """
        if self._tally.groups or self._early:
            raise EvidenceError(
                f"parts of update {self._version + 1} are accumulated already",
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
            EvidenceError: the state's parts are of different versions, of another
                adapter, or no state at all; nothing is changed.
        """
        shapes = [tuple(weight.shape) for weight in self._policy.parameters]
        saved = read_optimizer(state.optimizer, state.adapter.version, shapes)
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

    def _admit(
        self, update: int, group_id: str, version: int, episodes: Sequence[EpisodeRecord]
    ) -> int:
        """The staleness of a group of `version`, if these of its episodes may be trained on."""
        where = f"update {update}, group {group_id}"
        self._check_next(update, f"group {group_id}")
        staleness = (update - 1) - version
        bound = self._config.schedule.max_staleness
        if not 0 <= staleness <= bound:
            raise StalenessViolation(
                f"version {version} is {staleness} updates stale, the bound is {bound}", where
            )
        mixed = sorted({episode.version for episode in episodes} - {version})
        if mixed:
            raise StalenessViolation(f"group of version {version} holds episodes of {mixed}", where)
        if group_id in self._tally.groups:
            raise EvidenceError("the group was accumulated already", where)
        times = Counter(episode.attempt_id for episode in episodes)
        repeated = sorted(attempt for attempt, count in times.items() if count > 1)
        if repeated:
            raise EvidenceError(f"attempts {repeated} occur more than once", where)
        return staleness

    def _check_whole(self, update: int, group_ids: Sequence[str] | None) -> None:
        """Raise `EvidenceError` unless what was accumulated is all that a step needs."""
        where, groups = f"update {update}", sorted(self._tally.groups)
        if self._early:
            raise EvidenceError(
                f"groups {sorted(self._early)} were worked on early and never accumulated",
                where,
                "accumulate or drop them before the step",
            )
        if group_ids is not None and sorted(group_ids) != groups:
            raise EvidenceError(
                f"a step with groups {sorted(group_ids)}, but {groups} were accumulated", where
            )
        if self._tally.loss_tokens == 0:
            raise EvidenceError("no sampled token to train on", where)

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        budget = self._config.trainer.micro_batch_tokens
        return pack(sequences, budget, self._policy.shares_prefixes)

    def _backward(self, batch: MicroBatch, group_id: str, staleness: int) -> None:
        loss_config = self._config.trainer.loss
        batch = batch.to(self._policy.device)
        idle = vanishes_without_advantage(loss_config) and not bool(batch.advantages.any())
        with torch.set_grad_enabled(not idle):
            scores = self._policy.scores(batch, self._config.agent.temperature)
            result = token_loss(
                loss_config,
                scores.logprobs,
                batch.sampler_logprobs,
                batch.advantages,
                torch.ones_like(batch.advantages),
                batch.sequences,
            )
        self._check_finite(result.loss, group_id)
        if not idle:
            result.loss.backward()
        self._tally.add_batch(staleness, batch.computed_tokens, result, scores.entropy)

    def _backward_early(
        self, batch: MicroBatch, reward: float, work: EarlyWork, group_id: str
    ) -> None:
        batch = batch.to(self._policy.device)
        scores = self._policy.scores(batch, self._config.agent.temperature)
        loss = work.backward(
            self._config.trainer.loss, reward, batch, scores, self._policy.parameters
        )
        self._check_finite(loss, group_id)

    def _settle(self, work: EarlyWork, group: Group, staleness: int) -> None:
        """Count early work, now that the advantages of its group are known."""
        loss_config = self._config.trainer.loss
        by_reward = advantage_by_reward(group, loss_config.advantage)
        work.add_to(self._policy.parameters, loss_config, by_reward)
        for part in work.scored:
            result = part.loss(loss_config, by_reward[part.reward])
            self._check_finite(result.loss, group.group_id)
            self._tally.add_batch(staleness, part.computed_tokens, result, part.entropy)

    def _check_finite(self, loss: torch.Tensor, group_id: str) -> None:
        if bool(torch.isfinite(loss)):
            return
        update = self._version + 1
        self.discard()
        raise NonFiniteError(
            f"the loss is {float(loss.detach())}",
            f"update {update}, group {group_id}",
            "look at the group's logprobs and at the learning rate",
        )

    def _mean_gradients(self, normaliser: float) -> list[torch.Tensor]:
        """The gradients, divided in place; zeros where no group left any."""
        gradients: list[torch.Tensor] = []
        for weight in self._policy.parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad.div_(normaliser))
        return gradients
