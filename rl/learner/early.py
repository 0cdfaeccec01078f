"""Work on a group's attempts before the group is complete.

Until the last reward is known no advantage is. But a loss that is affine in the
advantage's size (`losses.advantage_form`) has the gradient

    grad L(A) = grad L(0) + A s grad(L(s) - L(0)),    s the sign of A,

and s follows from the reward alone where rewards are 0 and 1. So both gradients on
the right are computed early, the second one summed apart for each reward, and A(reward)
is put in when it is known.

Invariants:
- The weights' own gradients are touched by `add_to` alone: work that is forgotten
  instead leaves no trace in them, not in the last bit.
- No sign is taken on trust: `holds_for` says no unless every one that was assumed
  is right, or its advantage 0.
- Figures that depend on the advantage (loss, clipped tokens) are evaluated with the
  true one, by the loss itself, from the logprobs kept of each token.
- Memory: for each open group one buffer of the adapter's size per distinct reward
  seen, one more if L(0) has a gradient, and four numbers per sampled token. No graph
  outlives `backward`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.errors import EvidenceError
from rl.learner.losses import (
    AdvantageKind,
    TokenLoss,
    advantage_form,
    advantages,
    token_loss,
    vanishes_without_advantage,
)
from rl.learner.packing import MicroBatch, TrainingSequence, episode_sequences
from rl.learner.policy import TokenScores
from rl.loss_config import LossConfig
from rl.records import EpisodeRecord, Group

# A verifier's usual rewards are 0 and 1; no group of such has a mean below 0 or above 1.
SIGN_OF_REWARD = {0.0: -1.0, 1.0: 1.0}


def assumed_sign(config: LossConfig, reward: float) -> float | None:
    """1 or -1 if an attempt with this reward may be worked on early, else None.

    Under a linear loss the sign doesn't matter, and 1 stands for both.
    """
    form = advantage_form(config)
    if form == "linear":
        return 1.0
    return SIGN_OF_REWARD.get(reward) if form == "linear_by_sign" else None


def early_sequences(
    episodes: Iterable[EpisodeRecord], config: LossConfig
) -> tuple[list[EpisodeRecord], dict[float, list[TrainingSequence]]]:
    """The episodes that may be worked on early, and their sequences by reward.

    Their advantages aren't known; 0 stands there. Raises as `training_sequences`, also
    for an episode that may not.
    """
    taken: list[EpisodeRecord] = []
    by_reward: dict[float, list[TrainingSequence]] = {}
    for episode in episodes:
        sequences = episode_sequences(episode, advantage=0.0)
        reward = episode.reward
        if reward is not None and assumed_sign(config, reward) is not None:
            taken.append(episode)
            by_reward.setdefault(reward, []).extend(sequences)
    return taken, by_reward


def advantage_by_reward(group: Group, kind: AdvantageKind) -> dict[float, float]:
    """The advantage of each reward that occurs in the complete `group`."""
    return dict(zip(group.rewards, advantages(group.rewards, kind), strict=True))


def backward_passes(config: LossConfig) -> int:
    """How often `EarlyWork.backward` goes back through a micro-batch's graph."""
    return 1 if vanishes_without_advantage(config) else 2


@dataclass(frozen=True)
class ScoredTokens:
    """What the figures of one micro-batch, all of one reward, are made of."""

    reward: float
    logprobs: Tensor  # (n,) float32, nats, detached
    sampler_logprobs: Tensor  # (n,) float32, nats
    sequences: Tensor  # (n,) int64, as in the micro-batch
    entropy: Tensor  # (n,) float32, nats
    computed_tokens: int

    def loss(self, config: LossConfig, advantage: float) -> TokenLoss:
        """The objective at the true advantage."""
        return _loss_at(advantage, config, self.logprobs, self.sampler_logprobs, self.sequences)


@dataclass
class EarlyWork:
    """What was computed of one group whose attempts are all of one version."""

    version: int
    digests: dict[str, str] = field(default_factory=dict[str, str])  # of records, by attempt
    rewards: set[float] = field(default_factory=set[float])  # of all of them, on every rank
    slopes: dict[float, list[Tensor]] = field(default_factory=dict[float, list[Tensor]])
    offset: list[Tensor] = field(default_factory=list[Tensor])
    scored: list[ScoredTokens] = field(default_factory=list[ScoredTokens])

    def backward(
        self,
        config: LossConfig,
        reward: float,
        batch: MicroBatch,
        scores: TokenScores,
        weights: Sequence[torch.nn.Parameter],
    ) -> Tensor:
        """Add a micro-batch of attempts that all have `reward`; returns its summed L(s).

        A second pass through the graph is needed where L(0) has a gradient of its own.

        Args:
            config: the objective.
            reward: of all the attempts.
            batch: whose advantages don't count.
            scores: of the batch, differentiable.
            weights: that are trained, always in the same order.
        """
        sampler, sequences = batch.sampler_logprobs, batch.sequences
        logprobs = scores.logprobs.detach().requires_grad_()
        unit = _loss_at(_sign(config, reward), config, logprobs, sampler, sequences).loss
        (slope,) = torch.autograd.grad(unit, logprobs)
        if not vanishes_without_advantage(config):
            rest = _loss_at(0.0, config, logprobs, sampler, sequences).loss
            (level,) = torch.autograd.grad(rest, logprobs)
            slope = slope - level
            gradients = _through(scores.logprobs, level, weights, retain_graph=True)
            self.offset = _sum(self.offset, gradients)
        gradients = _through(scores.logprobs, slope, weights, retain_graph=False)
        self.slopes[reward] = _sum(self.slopes.get(reward, []), gradients)
        kept = (logprobs.detach(), sampler, sequences, scores.entropy)
        self.scored.append(ScoredTokens(reward, *kept, batch.computed_tokens))
        return unit.detach()

    def check_new(self, group_id: str, episodes: Iterable[EpisodeRecord]) -> None:
        """Raise `EvidenceError` unless the episodes are of the group, and new to this work."""
        where = f"group {group_id}"
        for episode in episodes:
            if episode.group_id != group_id:
                raise EvidenceError(f"attempt {episode.attempt_id} is of another group", where)
            if episode.attempt_id in self.digests:
                raise EvidenceError(f"attempt {episode.attempt_id} was worked on already", where)

    def note(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Remember whose work this is."""
        for episode in episodes:
            self.digests[episode.attempt_id] = _digest(episode)
            if episode.reward is not None:
                self.rewards.add(episode.reward)

    def holds_for(self, group: Group, config: LossConfig) -> bool:
        """Whether this work can stand for its attempts in the complete `group`.

        Raises:
            EvidenceError: an attempt worked on is not in the group, or has another
                record in it.
        """
        done = [episode for episode in group.episodes if episode.attempt_id in self.digests]
        if {episode.attempt_id: _digest(episode) for episode in done} != self.digests:
            raise EvidenceError(
                f"not all of the attempts {sorted(self.digests)}, which were worked on early, "
                "are in the group as they were",
                f"group {group.group_id}",
            )
        by_reward = advantage_by_reward(group, config.advantage)
        return advantage_form(config) == "linear" or all(
            by_reward[reward] * _sign(config, reward) >= 0 for reward in self.rewards
        )

    def add_to(
        self,
        weights: Sequence[torch.nn.Parameter],
        config: LossConfig,
        by_reward: dict[float, float],
    ) -> None:
        """Add the gradient of the attempts worked on to that of `weights`."""
        parts = [
            (by_reward[reward] * _sign(config, reward), slope)
            for reward, slope in self.slopes.items()
        ]
        for scale, gradients in [*parts, (1.0, self.offset)]:
            # An advantage of 0 takes no part at all, as in `vanishes_without_advantage`.
            if scale == 0 or not gradients:
                continue
            for weight, gradient in zip(weights, gradients, strict=True):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad.add_(gradient, alpha=scale)


def _loss_at(
    advantage: float, config: LossConfig, logprobs: Tensor, sampler: Tensor, sequences: Tensor
) -> TokenLoss:
    """The objective with one advantage for all tokens, none of them masked."""
    every = torch.full_like(sampler, advantage)
    return token_loss(config, logprobs, sampler, every, torch.ones_like(sampler), sequences)


def _sign(config: LossConfig, reward: float) -> float:
    sign = assumed_sign(config, reward)
    if sign is None:
        raise ValueError(f"reward {reward} is never worked on early")
    return sign


def _through(
    logprobs: Tensor, slope: Tensor, weights: Sequence[torch.nn.Parameter], *, retain_graph: bool
) -> tuple[Tensor, ...]:
    """Gradients of the weights, `slope` being the loss's derivatives in the logprobs."""
    return torch.autograd.grad(
        logprobs, weights, slope, retain_graph=retain_graph, materialize_grads=True
    )


def _sum(total: list[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """`total`, which is empty or changed in place, plus `more`."""
    if not total:
        return list(more)
    for held, gradient in zip(total, more, strict=True):
        held.add_(gradient)
    return total


def _digest(episode: EpisodeRecord) -> str:
    """sha256 of the record, hex: a NaN on a token that wasn't sampled equals itself in it."""
    return hashlib.sha256(episode.model_dump_json().encode()).hexdigest()
