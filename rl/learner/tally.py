"""What an update's groups add up to.

Invariants:
- Every figure is a sum, a count, an extreme or an order statistic, so neither the order
  in which groups arrive nor how their tokens are divided among micro-batches changes
  more than its last digits. Only `computed_tokens` tells of that division.
- Means are over loss tokens or over episodes, never over groups or batches.
- Memory: one float32 per loss token of the update, for exact quantiles; the records that
  the tokens came in are an order of magnitude larger.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl.learner.losses import TokenLoss
from rl.loss_config import LossConfig
from rl.records import Group, Sample, UpdateMetrics

QUANTILES = {"p01": 0.01, "p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}

# What micro-batches add to, as plain sums.
SUMMED = (
    "loss",
    "loss_tokens",
    "sequences",
    "computed_tokens",
    "entropy",
    "clipped",
    "ratio_sum",
    "ratio_squares",
)


@dataclass
class Tally:
    """Running figures of the update being accumulated."""

    objective: LossConfig
    loss: float = 0.0
    loss_tokens: int = 0
    sequences: int = 0
    computed_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens: int = 0
    tool_tokens: int = 0
    entropy: float = 0.0
    clipped: int = 0
    ratio_sum: float = 0.0
    ratio_squares: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    log_ratios: list[Tensor] = field(default_factory=list[Tensor])  # float32, on CPU
    mismatch: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens_by_staleness: Counter[int] = field(default_factory=Counter[int])
    rewards: list[float] = field(default_factory=list[float])
    staleness: Counter[int] = field(default_factory=Counter[int])
    zero_variance_groups: int = 0
    groups: set[str] = field(default_factory=set[str])
    seconds: float = 0.0

    @property
    def normaliser(self) -> float:
        """What the update's summed loss and gradient are divided by."""
        return self.objective.normaliser(self.loss_tokens, self.sequences)

    def add_batch(
        self, staleness: int, computed_tokens: int, result: TokenLoss, entropy: Tensor
    ) -> None:
        """Count one micro-batch of whole sequences, all of whose targets are loss tokens.

        Args:
            staleness: of the group that the batch is of, updates.
            computed_tokens: token positions that the model computed.
            result: the loss, and what it did, at the true advantages.
            entropy: of the targets' distributions, nats.
        """
        log_ratio = result.log_ratio.double()
        ratio = log_ratio.exp()
        figures = [
            result.loss.detach(),
            result.sequences,
            result.clipped.sum(),
            (torch.expm1(log_ratio) - log_ratio).sum(),
            entropy.double().sum(),
            ratio.sum(),
            ratio.square().sum(),
            ratio.min(),
            ratio.max(),
        ]
        # One transfer from the device instead of one for each.
        loss, sequences, clipped, mismatch, entropies, ratios, squares, least, most = torch.stack(
            [figure.double() for figure in figures]
        ).tolist()
        self.loss += loss
        self.sequences += int(sequences)
        self.clipped += int(clipped)
        self.entropy += entropies
        self.ratio_sum += ratios
        self.ratio_squares += squares
        self.ratio_min = min(self.ratio_min, least)
        self.ratio_max = max(self.ratio_max, most)
        self.mismatch[staleness] += mismatch
        self.tokens_by_staleness[staleness] += entropy.numel()
        self.loss_tokens += entropy.numel()
        self.computed_tokens += computed_tokens
        self.log_ratios.append(result.log_ratio.float().cpu())

    def add_group(self, group: Group, staleness: int) -> None:
        """Count one group, after all its micro-batches."""
        self.groups.add(group.group_id)
        self.rewards.extend(group.rewards)
        self.staleness[staleness] += len(group.episodes)
        self.zero_variance_groups += group.zero_variance
        for episode in group.episodes:
            for sample in episode.samples:
                prompt = _prompt_tokens(sample)
                self.total_tokens += len(sample.token_ids)
                self.prompt_tokens += prompt
                self.tool_tokens += len(sample.token_ids) - prompt - sample.sampled_tokens

    def metrics(self, update: int, grad_norm: float, lr: float) -> UpdateMetrics:
        """The record of the update; needs at least one loss token."""
        mean = math.fsum(self.rewards) / len(self.rewards)
        squares = math.fsum((reward - mean) ** 2 for reward in self.rewards)
        return UpdateMetrics(
            update=update,
            loss=self.loss / self.normaliser,
            grad_norm=grad_norm,
            lr=lr,
            reward_mean=mean,
            reward_std=math.sqrt(squares / len(self.rewards)),
            episodes=len(self.rewards),
            zero_variance_groups=self.zero_variance_groups,
            sequences=self.sequences,
            sampled_tokens=self.loss_tokens,
            prompt_tokens=self.prompt_tokens,
            tool_tokens=self.tool_tokens,
            total_tokens=self.total_tokens,
            computed_tokens=self.computed_tokens,
            mismatch_kl=math.fsum(self.mismatch.values()) / self.loss_tokens,
            mismatch_kl_by_staleness={
                staleness: self.mismatch[staleness] / tokens
                for staleness, tokens in sorted(self.tokens_by_staleness.items())
            },
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            ratio_quantiles=ratio_quantiles(self.log_ratios),
            effective_sample_size=self.ratio_sum**2 / self.ratio_squares / self.loss_tokens,
            clipped_fraction=self.clipped / self.loss_tokens,
            entropy=self.entropy / self.loss_tokens,
            staleness=dict(sorted(self.staleness.items())),
            seconds=self.seconds,
        )


def merged(ranks: Sequence[Tally], own: int) -> Tally:
    """The figures of an update whose micro-batches were divided among ranks.

    Args:
        ranks: the figures of each; those of groups stand in all of them.
        own: the rank whose time counts.
    """
    return replace(
        ranks[own],
        **{name: sum(getattr(tally, name) for tally in ranks) for name in SUMMED},
        ratio_min=min(tally.ratio_min for tally in ranks),
        ratio_max=max(tally.ratio_max for tally in ranks),
        log_ratios=[part for tally in ranks for part in tally.log_ratios],
        mismatch=_added(tally.mismatch for tally in ranks),
        tokens_by_staleness=sum((tally.tokens_by_staleness for tally in ranks), Counter[int]()),
    )


def _added(parts: Iterable[defaultdict[int, float]]) -> defaultdict[int, float]:
    total: defaultdict[int, float] = defaultdict(float)
    for part in parts:
        for staleness, value in part.items():
            total[staleness] += value
    return total


def ratio_quantiles(log_ratios: Sequence[Tensor]) -> dict[str, float]:
    """Quantiles of r over all tokens: the least r that the given share doesn't exceed.

    They are ratios that occur, none in between, so those of ln r give those of r.

    Args:
        log_ratios: ln r in parts of any shape (n,), on CPU, at least one token in all.
    """
    every = torch.cat(list(log_ratios)).numpy()
    found = np.quantile(every, list(QUANTILES.values()), method="inverted_cdf")
    return {name: math.exp(value) for name, value in zip(QUANTILES, found, strict=True)}


def _prompt_tokens(sample: Sample) -> int:
    """Tokens before the first sampled one, all of them if there is none."""
    return sample.sampled.index(True) if any(sample.sampled) else len(sample.sampled)
