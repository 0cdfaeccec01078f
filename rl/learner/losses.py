"""Policy-gradient objectives and advantages, as pure functions.

Formulas, sources and how to add one: docs/learner.md.

Invariants:
- A masked token cannot influence anything: whatever stands there (NaN, infinity, 1e89)
  is replaced before the first arithmetic, and no objective sees anything else, so loss
  and gradient keep every bit.
- Losses are sums over the unmasked tokens, or over sequences (`LossConfig.normalisation`);
  whoever steps the optimizer divides, so sums over parts of a batch add up to the batch's.
- Nothing reaches beyond a sequence: all that a token's loss depends on is in it.
- Log-ratios are clamped to +-`LOG_RATIO_LIMIT` before they are exponentiated.
- Clip decisions are constants for the gradient.
- Every objective declares beside itself how it depends on the advantage (`AdvantageForm`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Literal

import torch
from torch import Tensor

from rl.loss_config import AdvantageKind, LossConfig

LOG_RATIO_LIMIT = 20.0  # nats; exp(89) overflows fp32, exp(20) squared does not
DEVIATION_FLOOR = 1e-6  # added to a group's deviation, reward units

# How a batch's loss L and its gradient depend on the size of the advantages A, all else fixed:
#   linear          L(A) = L(0) + A (L(1) - L(0)) for every A;
#   linear_by_sign  L(A) = L(0) + |A| (L(s) - L(0)), s = 1 or -1 being the sign of A: what is
#                   clipped may depend on the sign, never on the size;
#   other           anything else.
# With the first two a gradient can be computed before the size of A is known (see `early`).
AdvantageForm = Literal["linear", "linear_by_sign", "other"]


@dataclass(frozen=True)
class Tokens:
    """What an objective sees: n tokens, with zeros in place of all that is masked."""

    logprobs: Tensor  # (n,) ln pi, of the policy in training, nats, differentiable
    sampler_logprobs: Tensor  # (n,) ln mu, of the sampler, nats
    log_ratio: Tensor  # (n,) ln pi - ln mu, clamped, differentiable
    advantages: Tensor  # (n,) reward units
    mask: Tensor  # (n,) bool: trained on
    sequences: Tensor  # (n,) int64: the sequence that a token is of, 0 <= id < n
    sizes: Tensor  # (n,) by sequence id: its unmasked tokens

    @property
    def ratio(self) -> Tensor:
        """r = pi / mu, (n,)."""
        return torch.exp(self.log_ratio)

    def sequence_means(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` over its sequence's unmasked tokens, (n,)."""
        kept = torch.where(self.mask, values, torch.zeros_like(values))
        sums = torch.zeros_like(values).index_add(0, self.sequences, kept)
        # An id without an unmasked token must not bring a NaN into the gradient.
        return (sums / self.sizes.clamp(min=1)).index_select(0, self.sequences)


@dataclass(frozen=True)
class Terms:
    """What an objective says of each token; what it says of a masked one is not used."""

    loss: Tensor  # (n,) nats x advantage
    clipped: Tensor  # (n,) bool, see `TokenLoss`


@dataclass(frozen=True)
class TokenLoss:
    """A summed loss and what it did token by token."""

    loss: Tensor  # scalar, nats x advantage, differentiable in the logprobs
    clipped: Tensor  # (n,) bool: the policy-gradient term was switched off, or its weight cut
    log_ratio: Tensor  # (n,) ln pi - ln mu, clamped and detached; 0 where masked
    sequences: Tensor  # scalar: sequences with an unmasked token


@dataclass(frozen=True)
class _Objective:
    """An objective and what it declares."""

    terms: Callable[..., Terms]
    form: AdvantageForm
    level: str | None


_OBJECTIVES: dict[str, _Objective] = {}  # by the name in the configuration


def _declares[**P](
    form: AdvantageForm, level: str | None = None
) -> Callable[[Callable[Concatenate[Tokens, P], Terms]], Callable[Concatenate[Tokens, P], Terms]]:
    """Enter the objective below under its name, which is the one in the configuration.

    Args:
        form: how it depends on the advantage.
        level: the knob that scales L(0), the loss without advantage. None: L(0) has no
            gradient, whatever the knobs.
    """

    def enter(
        terms: Callable[Concatenate[Tokens, P], Terms],
    ) -> Callable[Concatenate[Tokens, P], Terms]:
        _OBJECTIVES[terms.__name__] = _Objective(terms, form, level)
        return terms

    return enter


@_declares("linear_by_sign", level="kl_weight")  # k asks for the sign of A
def trust_region(t: Tokens, *, clip_low: float, clip_high: float, kl_weight: float) -> Terms:
    """-k A r + kl_weight (ln r)^2.

    k is 0 where A > 0 and pi - mu > clip_high, or A <= 0 and pi - mu < -clip_low,
    otherwise 1.

    Source: prime-rl 0.8.0, trainer/rl/loss.py, default loss.
    """
    moved = (torch.exp(t.logprobs) - torch.exp(t.sampler_logprobs)).detach()
    rising = t.advantages > 0
    clipped = torch.where(rising, moved > clip_high, moved < -clip_low)
    gain = torch.where(clipped, torch.zeros_like(moved), t.advantages * t.ratio)
    return Terms(kl_weight * t.log_ratio.square() - gain, clipped)


@_declares("linear")
def importance_sampling(t: Tokens) -> Terms:
    """-r A without any clip."""
    return Terms(-t.advantages * t.ratio, torch.zeros_like(t.mask))


@_declares("linear_by_sign")  # min(r A, c A) is A min(r, c) or A max(r, c), by the sign
def ppo_clip(t: Tokens, *, clip_low: float, clip_high: float) -> Terms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7.
    """
    return _clipped_surrogate(t.ratio, t.advantages, clip_low, clip_high)


@_declares("linear")
def cispo(t: Tokens, *, ratio_cap: float) -> Terms:
    """-sg(min(r, ratio_cap)) A ln pi: no token loses its gradient.

    Source: MiniMax-M1, arXiv 2506.13585; the ratio has no lower bound but 0, as in prime-rl.
    """
    return _weighted(t, t.ratio.clamp(max=ratio_cap), t.ratio > ratio_cap)


@_declares("linear")
def icepop(t: Tokens, *, clip_low: float, clip_high: float) -> Terms:
    """-sg(r) A ln pi where 1 - clip_low < r < 1 + clip_high, otherwise 0.

    Source: Ring-1T, arXiv 2510.18855 (IcePop), with the band around 1 as in prime-rl.
    """
    outside = (t.ratio <= 1 - clip_low) | (t.ratio >= 1 + clip_high)
    return _weighted(t, torch.where(outside, torch.zeros_like(t.ratio), t.ratio), outside)


@_declares("linear")
def tis(t: Tokens, *, ratio_cap: float) -> Terms:
    """-sg(min(r, ratio_cap)) A ln pi: `cispo`'s formula with the cap of a sampler's mismatch.

    Source: Yao et al. 2025, fengyao.notion.site/off-policy-rl; truncation is Ionides 2008.
    """
    return _weighted(t, t.ratio.clamp(max=ratio_cap), t.ratio > ratio_cap)


@_declares("linear_by_sign")
def gspo(t: Tokens, *, clip_low: float, clip_high: float) -> Terms:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s one ratio for the whole sequence.

    ln s is the mean of ln r over the sequence's unmasked tokens. The gradient goes through
    s into all of them.

    Source: Zheng et al. 2025, arXiv 2507.18071.
    """
    ratio = torch.exp(t.sequence_means(t.log_ratio))
    return _clipped_surrogate(ratio, t.advantages, clip_low, clip_high)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Terms:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    held = ratio.detach()
    above, below = held > 1 + high, held < 1 - low
    clipped = torch.where(advantages > 0, above, below & (advantages < 0))
    bound = torch.clamp(held, 1 - low, 1 + high)
    return Terms(-advantages * torch.where(clipped, bound, ratio), clipped)


def _weighted(t: Tokens, weight: Tensor, clipped: Tensor) -> Terms:
    """-sg(weight) A ln pi."""
    return Terms(-weight.detach() * t.advantages * t.logprobs, clipped)


def token_loss(
    config: LossConfig,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Tensor,
) -> TokenLoss:
    """The objective that `config` names, summed as it says.

    Args:
        config: the objective and its knobs.
        logprobs: of the tokens under the policy in training, nats, shape (n,).
        sampler_logprobs: of the same tokens under the sampler, nats, shape (n,).
        advantages: per token, reward units, shape (n,).
        mask: nonzero where the token is trained on, shape (n,).
        sequences: int64, the sequence that a token is of, 0 <= id < n, shape (n,); all
            unmasked tokens of a sequence must be here.
    """
    t = _tokens(logprobs, sampler_logprobs, advantages, mask, sequences)
    terms = _OBJECTIVES[config.name].terms(t, **config.knobs)
    kept = torch.where(t.mask, terms.loss, torch.zeros_like(terms.loss))
    if config.normalisation == "sequences":
        kept = kept / t.sizes.clamp(min=1).index_select(0, t.sequences)
    return TokenLoss(
        loss=kept.sum(),
        clipped=terms.clipped & t.mask,
        log_ratio=t.log_ratio.detach(),
        sequences=(t.sizes > 0).sum(),
    )


def _tokens(
    logprobs: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor
) -> Tokens:
    keep = mask != 0
    logprobs, sampler, advantages, sequences = (
        torch.where(keep, values, torch.zeros_like(values))
        for values in (logprobs, sampler, advantages, sequences)
    )
    return Tokens(
        logprobs=logprobs,
        sampler_logprobs=sampler,
        log_ratio=torch.clamp(logprobs - sampler, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        advantages=advantages,
        mask=keep,
        sequences=sequences,
        sizes=torch.zeros_like(sampler).index_add(0, sequences, keep.to(sampler.dtype)),
    )


def vanishes_without_advantage(config: LossConfig) -> bool:
    """Whether a token of advantage 0 has no gradient at all: L(0) is constant."""
    level = _OBJECTIVES[config.name].level
    return level is None or config.knobs[level] == 0


def advantage_form(config: LossConfig) -> AdvantageForm:
    """What the objective that `config` names declares."""
    return _OBJECTIVES[config.name].form


def advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Advantages of a group's attempts, in their order.

    Args:
        rewards: finite rewards of one group.
        kind: mean: reward minus the group's mean; mean_std: that, divided by the
            group's population deviation plus `DEVIATION_FLOOR`.

    Equal rewards give exactly 0.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + DEVIATION_FLOOR) for value in centred]
