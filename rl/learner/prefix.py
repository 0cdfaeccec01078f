"""Attention that computes a group's common prompt once.

Invariants:
- Layout: one row, P prefix tokens, then S suffixes of L tokens each, every one
  at positions P, P+1, ...; a suffix token attends to the whole prefix and to its
  own suffix's past, never to another suffix.
- The result is that of S separate sequences, up to rounding: same values, same
  gradients, the prefix's gradient being the sum over the suffixes.
- Without `shared_rows` the function is ordinary causal attention, so one loaded
  model serves both layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "shared_prefix"  # no mask function has this name, so transformers builds no mask


def supports_sharing(config: Any) -> bool:
    """Whether every layer of a model with this configuration is plain causal attention."""
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    softcap = getattr(config, "attn_logit_softcapping", None)
    return all(layer == "full_attention" for layer in layers) and not windowed and not softcap


def register() -> None:
    """Make `ATTENTION` a name that transformers models can be loaded with; repeatable."""
    AttentionInterface.register(ATTENTION, _attention)


def position_ids(prefix: int, rows: int, length: int, device: torch.device) -> Tensor:
    """Positions of the layout, shape (1, prefix + rows * length)."""
    suffix = torch.arange(prefix, prefix + length, device=device).repeat(rows)
    return torch.cat([torch.arange(prefix, device=device), suffix]).unsqueeze(0)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    shared_rows: tuple[int, int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; q (B, H, N, D), k and v (B, K, N, D)."""
    if shared_rows is None:
        forward: Any = sdpa_attention_forward
        return forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return _shared(query, key, value, scaling, shared_rows), None


def _shared(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, shape: tuple[int, int]
) -> Tensor:
    """Output (1, N, H, D) of the layout; `shape` is (S, L)."""
    rows, length = shape
    heads, width = query.shape[1], query.shape[3]
    prefix = query.shape[2] - rows * length
    grouped = key.shape[1] != heads

    head = scaled_dot_product_attention(
        query[:, :, :prefix],
        key[:, :, :prefix],
        value[:, :, :prefix],
        is_causal=True,
        scale=scaling,
        enable_gqa=grouped,
    )
    tail = scaled_dot_product_attention(
        _rows(query[:, :, prefix:], rows, length),
        torch.cat([_repeat(key, prefix, rows), _rows(key[:, :, prefix:], rows, length)], dim=2),
        torch.cat([_repeat(value, prefix, rows), _rows(value[:, :, prefix:], rows, length)], dim=2),
        attn_mask=_suffix_mask(prefix, length, query.device),
        scale=scaling,
        enable_gqa=grouped,
    )
    flat = tail.transpose(1, 2).reshape(1, rows * length, heads, width)
    return torch.cat([head.transpose(1, 2), flat], dim=1).contiguous()


def _rows(states: Tensor, rows: int, length: int) -> Tensor:
    """(1, H, S*L, D) as (S, H, L, D)."""
    _, heads, _, width = states.shape
    return states.reshape(heads, rows, length, width).transpose(0, 1)


def _repeat(states: Tensor, prefix: int, rows: int) -> Tensor:
    """The prefix's part of (1, K, N, D), once per row: (S, K, P, D)."""
    return states[:, :, :prefix].expand(rows, -1, -1, -1)


def _suffix_mask(prefix: int, length: int, device: torch.device) -> Tensor:
    """True where a suffix query (L) may look at [prefix; own suffix] (P + L)."""
    # is_causal aligns unequal lengths at the top left, so the mask is explicit.
    own = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat([own.new_ones(length, prefix), own], dim=1)
