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
- Of several ranks each works on its share of a group's sequences, and their gradients
  are added up once, at the step. All else happens on every rank alike: what is refused
  or dropped is refused or dropped by all, and all of them become the same version.
"""

from __future__ import annotations

import io
import math
import resource
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl.config import CampaignConfig
from rl.errors import CampaignError, EvidenceError
from rl.learner.admission import check_next, staleness_of
from rl.learner.early import EarlyWork, advantage_by_reward, backward_passes, early_sequences
from rl.learner.losses import token_loss, vanishes_without_advantage
from rl.learner.packing import (
    MicroBatch,
    TrainingSequence,
    pack,
    training_sequences,
)
from rl.learner.policy import Policy
from rl.learner.ranks import Alone, Ranks
from rl.learner.rate import learning_rate
from rl.learner.restore import read_optimizer
from rl.learner.shares import shares
from rl.learner.state import LearnerState, files_sha256
from rl.learner.tally import Tally, merged
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
    """LoRA training of one model on one device, alone or as one of several ranks."""

    def __init__(self, config: CampaignConfig, model_dir: Path, ranks: Ranks | None = None) -> None:
        """Version 0: the base in `model_dir` with a fresh adapter.

        Args:
            config: the campaign's.
            model_dir: base weights.
            ranks: the processes that share the work, this one included; None: it alone.

        Raises:
            ConfigurationError: the model can't be loaded or can't be trained by this learner.
        """
        if config.trainer.device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._ranks = ranks or Alone()
        self._policy = Policy(config, model_dir, shard=config.trainer.shard_base)
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
        losses = [] if work is None else self._settle(work, group, staleness)
        for batch, differentiable in self._passes(batches):
            losses += self._backward(batch, differentiable, staleness)
        self._check_finite(losses, group.group_id)
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
        losses: list[Tensor] = []
        for reward, sequences in by_reward.items():
            for batch, _ in self._passes(self._pack(sequences), early=True):
                losses += self._backward_early(batch, reward, work)
        self._check_finite(losses, group_id)
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
        check_next(self._version, update, "step")
        tally, settings = self._check_whole(update, group_ids), self._config.trainer.optimizer
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

    def _admit(
        self, update: int, group_id: str, version: int, episodes: Sequence[EpisodeRecord]
    ) -> int:
        """As `staleness_of`; a group that was accumulated already is refused, too."""
        check_next(self._version, update, f"group {group_id}")
        if group_id in self._tally.groups:
            raise EvidenceError(
                "the group was accumulated already", f"update {update}, group {group_id}"
            )
        bound = self._config.schedule.max_staleness
        return staleness_of(update, group_id, version, episodes, bound)

    def _check_whole(self, update: int, group_ids: Sequence[str] | None) -> Tally:
        """The figures of all ranks; `EvidenceError` unless they are all that a step needs."""
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
        tally = merged(self._ranks.gather(self._tally), self._ranks.rank)
        if tally.loss_tokens == 0:
            raise EvidenceError("no sampled token to train on", where)
        return tally

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        """Of this rank's share of `sequences`."""
        budget, shared = self._config.trainer.micro_batch_tokens, self._policy.shares_prefixes
        mine = shares(sequences, self._ranks.size, shared=shared)[self._ranks.rank]
        return pack(mine, budget, shared)

    def _passes(
        self, batches: list[MicroBatch], *, early: bool = False
    ) -> list[tuple[MicroBatch | None, bool]]:
        """The passes that this rank makes, each with whether it is differentiated.

        One without a batch is made because other ranks make one.
        """
        always = early or not vanishes_without_advantage(self._config.trainer.loss)
        busy = [always or bool(batch.advantages.any()) for batch in batches]
        passes = self._ranks.align(busy)
        return [*zip_longest(batches, passes)]

    def _backward(
        self, batch: MicroBatch | None, differentiable: bool, staleness: int
    ) -> list[Tensor]:
        """Add the gradient of a micro-batch, if there is one; its loss, detached."""
        if batch is None:
            self._policy.keep_step(int(differentiable))
            return []
        batch = batch.to(self._policy.device)
        with torch.set_grad_enabled(differentiable):
            scores = self._policy.scores(batch, self._config.agent.temperature)
            result = token_loss(
                self._config.trainer.loss,
                scores.logprobs,
                batch.sampler_logprobs,
                batch.advantages,
                torch.ones_like(batch.advantages),
                batch.sequences,
            )
        if differentiable:
            result.loss.backward()
        self._tally.add_batch(staleness, batch.computed_tokens, result, scores.entropy)
        return [result.loss.detach()]

    def _backward_early(
        self, batch: MicroBatch | None, reward: float, work: EarlyWork
    ) -> list[Tensor]:
        loss_config = self._config.trainer.loss
        if batch is None:
            self._policy.keep_step(backward_passes(loss_config))
            return []
        batch = batch.to(self._policy.device)
        scores = self._policy.scores(batch, self._config.agent.temperature)
        return [work.backward(loss_config, reward, batch, scores, self._policy.parameters)]

    def _settle(self, work: EarlyWork, group: Group, staleness: int) -> list[Tensor]:
        """Count early work, now that the advantages of its group are known; its losses."""
        loss_config = self._config.trainer.loss
        by_reward = advantage_by_reward(group, loss_config.advantage)
        work.add_to(self._policy.parameters, loss_config, by_reward)
        losses: list[Tensor] = []
        for part in work.scored:
            result = part.loss(loss_config, by_reward[part.reward])
            self._tally.add_batch(staleness, part.computed_tokens, result, part.entropy)
            losses.append(result.loss)
        return losses

    def _check_finite(self, losses: list[Tensor], group_id: str) -> None:
        """Drop everything, on all ranks, if a loss of one rank is not finite."""
        own = [float(loss) for loss in losses if not bool(torch.isfinite(loss))]
        bad = [value for values in self._ranks.gather(own) for value in values]
        if not bad:
            return
        update = self._version + 1
        self.discard()
        raise NonFiniteError(
            f"the loss is {bad[0]}",
            f"update {update}, group {group_id}",
            "look at the group's logprobs and at the learning rate",
        )

    def _mean_gradients(self, normaliser: float) -> list[Tensor]:
        """The gradients of all ranks, divided in place; zeros where no group left any."""
        gradients: list[Tensor] = []
        for weight in self._policy.parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
        self._ranks.add_up(gradients)
        return [gradient.div_(normaliser) for gradient in gradients]
