"""Logprobs and entropies from hidden states, without keeping anything vocabulary-sized.

Invariants:
- Vocabulary-sized tensors exist for `HEAD_CHUNK` positions at a time, in the forward
  pass alone: a logprob's derivative in its hidden state is one row of the state's width,
  computed there and kept, so the backward pass only scales it.
- The entropy is a figure, without gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HEAD_CHUNK = 256  # positions per logits tensor: 150 MB of fp32 at a vocabulary of 150,000


def score(
    states: Tensor, targets: Tensor, head: torch.nn.Linear, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets and entropies of their distributions, nats, float32.

    Args:
        states: (n, width), the decoder's output where the targets are predicted.
        targets: (n,) token ids.
        head: frozen; its output is divided by `temperature`.
        temperature: of the sampler.
    """
    logprobs, entropies = _Score.apply(states, targets, head.weight, head.bias, temperature)
    return logprobs, entropies


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """As `score`; `weight` is (vocabulary, width)."""
        logprobs = states.new_empty(len(states), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states), HEAD_CHUNK):
            rows = slice(start, start + HEAD_CHUNK)
            wanted = targets[rows].unsqueeze(-1)
            logits = torch.nn.functional.linear(states[rows], weight, bias).float()
            if temperature != 1.0:
                logits.div_(temperature)
            every = torch.log_softmax(logits, dim=-1)
            del logits
            chances = every.exp()
            logprobs[rows] = every.gather(-1, wanted).squeeze(-1)
            entropies[rows] = _entropy(chances, every)
            if slopes is not None:
                # d logprob / d logits: 1 at the target, less the probabilities.
                ones = torch.ones_like(wanted, dtype=torch.float32)
                chances.neg_().scatter_add_(-1, wanted, ones)
                slopes[rows] = chances.to(weight.dtype) @ weight / temperature
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient.unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None


def _entropy(chances: Tensor, logprobs: Tensor) -> Tensor:
    """Of each row, nats; an impossible token adds nothing."""
    entropy = -torch.linalg.vecdot(chances, logprobs)
    if bool(entropy.isnan().any()):  # 0 times -infinity
        entropy = -(chances * logprobs).nansum(dim=-1)
    return entropy
