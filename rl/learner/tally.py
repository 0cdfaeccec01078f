"""What an update's groups add up to.

Invariants:
- Every figure is a sum, a count or an extreme, so the order in which groups
  arrive changes nothing but the last digits.
- Means are over trained tokens or over episodes, never over groups or batches.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.learner.losses import TokenLoss
from rl.records import Group, UpdateMetrics


@dataclass
class Tally:
    """Running figures of the update being accumulated."""

    loss: float = 0.0
    loss_tokens: int = 0
    computed_tokens: int = 0
    total_tokens: int = 0
    mismatch: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    rewards: list[float] = field(default_factory=list[float])
    staleness: Counter[int] = field(default_factory=Counter[int])
    zero_variance_groups: int = 0
    groups: set[str] = field(default_factory=set[str])
    seconds: float = 0.0

    def add_batch(self, padded_tokens: int, result: TokenLoss, entropy: Tensor) -> None:
        """Count one micro-batch, all of whose targets are loss tokens.

        Args:
            padded_tokens: token positions that the model computed.
            result: the loss, and what it did, at the true advantages.
            entropy: of the targets' distributions, nats.
        """
        log_ratio = result.log_ratio.double()
        ratio = log_ratio.exp()
        self.loss += float(result.loss.detach())
        self.loss_tokens += entropy.numel()
        self.computed_tokens += padded_tokens
        self.mismatch += float((torch.expm1(log_ratio) - log_ratio).sum())
        self.entropy += float(entropy.double().sum())
        self.clipped += int(result.clipped.sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))

    def add_group(self, group: Group, staleness: int) -> None:
        """Count one group, after all its micro-batches."""
        self.groups.add(group.group_id)
        self.rewards.extend(group.rewards)
        self.staleness[staleness] += len(group.episodes)
        self.zero_variance_groups += group.zero_variance
        self.total_tokens += sum(
            len(sample.token_ids) for episode in group.episodes for sample in episode.samples
        )

    def metrics(self, update: int, grad_norm: float, lr: float) -> UpdateMetrics:
        """The record of the update; needs at least one loss token."""
        mean = math.fsum(self.rewards) / len(self.rewards)
        squares = math.fsum((reward - mean) ** 2 for reward in self.rewards)
        return UpdateMetrics(
            update=update,
            loss=self.loss / self.loss_tokens,
            grad_norm=grad_norm,
            lr=lr,
            reward_mean=mean,
            reward_std=math.sqrt(squares / len(self.rewards)),
            episodes=len(self.rewards),
            zero_variance_groups=self.zero_variance_groups,
            sampled_tokens=self.loss_tokens,
            total_tokens=self.total_tokens,
            mismatch_kl=self.mismatch / self.loss_tokens,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            clipped_fraction=self.clipped / self.loss_tokens,
            entropy=self.entropy / self.loss_tokens,
            staleness=dict(sorted(self.staleness.items())),
            seconds=self.seconds,
        )
