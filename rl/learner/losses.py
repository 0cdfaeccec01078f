"""Policy-gradient objectives and advantages, as pure functions.

Invariants:
- A masked token cannot influence anything: whatever stands there (NaN, infinity,
  1e89) is replaced before the first arithmetic, so loss and gradient keep every bit.
- Losses are sums over the unmasked tokens; whoever steps the optimizer divides.
- Log-ratios are clamped to +-`LOG_RATIO_LIMIT` before they are exponentiated.
- `k` of the trust region and the clip decisions are constants for the gradient.
- Every loss declares beside itself how it depends on the advantage (`AdvantageForm`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl.config import LossConfig

LOG_RATIO_LIMIT = 20.0  # nats; exp(89) overflows fp32, exp(20) squared does not
DEVIATION_FLOOR = 1e-6  # added to a group's deviation, reward units

AdvantageKind = Literal["mean", "mean_std"]

# How a token's loss L and its gradient depend on the advantage A, all else fixed:
#   linear          L(A) = L(0) + A (L(1) - L(0)) for every A;
#   linear_by_sign  L(A) = L(0) + |A| (L(s) - L(0)), s = 1 or -1 being the sign of A: what is
#                   clipped may depend on the sign, never on the size;
#   other           anything else, and every loss that declares nothing.
# With the first two a gradient can be computed before the size of A is known (see `early`).
AdvantageForm = Literal["linear", "linear_by_sign", "other"]
_FORMS: dict[str, AdvantageForm] = {}


@dataclass(frozen=True)
class TokenLoss:
    """A summed loss and what it did token by token."""

    loss: Tensor  # scalar, nats x advantage, differentiable in the logprobs
    clipped: Tensor  # bool per token: the policy-gradient term was switched off
    log_ratio: Tensor  # per token, ln pi - ln mu, clamped and detached; 0 where masked


@dataclass(frozen=True)
class _Terms:
    """The inputs with every masked entry replaced by a harmless one."""

    mask: Tensor
    logprobs: Tensor
    sampler: Tensor
    advantages: Tensor
    log_ratio: Tensor

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.log_ratio)

    def summed(self, per_token: Tensor, clipped: Tensor) -> TokenLoss:
        return TokenLoss(
            loss=torch.where(self.mask, per_token, torch.zeros_like(per_token)).sum(),
            clipped=clipped & self.mask,
            log_ratio=self.log_ratio.detach(),
        )


def _terms(logprobs: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor) -> _Terms:
    keep = mask != 0
    safe = [
        torch.where(keep, values, torch.zeros_like(values))
        for values in (logprobs, sampler, advantages)
    ]
    log_ratio = torch.clamp(safe[0] - safe[1], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _Terms(keep, safe[0], safe[1], safe[2], log_ratio)


def _declares[**P](
    form: AdvantageForm,
) -> Callable[[Callable[P, TokenLoss]], Callable[P, TokenLoss]]:
    """Note the form of the loss below, whose name is the one in the configuration."""

    def note(loss: Callable[P, TokenLoss]) -> Callable[P, TokenLoss]:
        _FORMS[loss.__name__] = form
        return loss

    return note


@_declares("linear_by_sign")  # k asks for the sign of A; the squared log-ratio is L(0)
def trust_region(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
) -> TokenLoss:
    """prime-rl's default: -k A r + kl_weight (ln r)^2, with r = pi / mu.

    k is 0 where A > 0 and pi - mu > clip_high, or A <= 0 and pi - mu < -clip_low,
    otherwise 1.

    Args:
        logprobs: of the tokens under the policy in training, nats, shape (n,).
        sampler_logprobs: of the same tokens under the sampler, nats, shape (n,).
        advantages: per token, reward units, shape (n,).
        mask: nonzero where the token is trained on, shape (n,).
        clip_low: largest decrease of a token's probability that is still pushed.
        clip_high: largest increase of it that is still pushed.
        kl_weight: weight of the squared log-ratio.

    Source: prime-rl 0.8.0, trainer/rl/loss.py, default loss.
    """
    t = _terms(logprobs, sampler_logprobs, advantages, mask)
    moved = (torch.exp(t.logprobs) - torch.exp(t.sampler)).detach()
    rising = t.advantages > 0
    clipped = torch.where(rising, moved > clip_high, moved < -clip_low)
    gain = torch.where(clipped, torch.zeros_like(moved), t.advantages * t.ratio)
    return t.summed(kl_weight * t.log_ratio.square() - gain, clipped)


@_declares("linear_by_sign")  # min(r A, c A) is A min(r, c) or A max(r, c), by the sign
def ppo_clip(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); arguments as in `trust_region`.

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7.
    """
    t = _terms(logprobs, sampler_logprobs, advantages, mask)
    ratio = t.ratio
    high, low = ratio.detach() > 1 + clip_high, ratio.detach() < 1 - clip_low
    clipped = torch.where(t.advantages > 0, high, low & (t.advantages < 0))
    bound = torch.clamp(ratio.detach(), 1 - clip_low, 1 + clip_high)
    return t.summed(-t.advantages * torch.where(clipped, bound, ratio), clipped)


@_declares("linear")
def importance_sampling(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> TokenLoss:
    """-r A without any clip; arguments as in `trust_region`."""
    t = _terms(logprobs, sampler_logprobs, advantages, mask)
    return t.summed(-t.advantages * t.ratio, torch.zeros_like(t.mask))


def token_loss(
    config: LossConfig, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> TokenLoss:
    """The objective that `config` names; arguments as in `trust_region`."""
    tensors = (logprobs, sampler_logprobs, advantages, mask)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.name == "trust_region":
        return trust_region(*tensors, **clips, kl_weight=config.kl_weight)
    if config.name == "ppo_clip":
        return ppo_clip(*tensors, **clips)
    return importance_sampling(*tensors)


def vanishes_without_advantage(config: LossConfig) -> bool:
    """Whether a token of advantage 0 has no gradient at all: L(0) is constant.

    A loss that isn't named here is taken to have one, which costs time but is never wrong.
    """
    if config.name == "trust_region":
        return config.kl_weight == 0
    return config.name in ("ppo_clip", "importance_sampling")


def advantage_form(config: LossConfig) -> AdvantageForm:
    """What the objective that `config` names declares; `other` if it declares nothing."""
    return _FORMS.get(config.name, "other")


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
