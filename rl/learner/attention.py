"""Attention over a token tree: what several sequences share is computed once.

Invariants:
- The result is that of the sequences computed one by one, up to rounding: same
  values, same gradients, a shared token's gradient being the sum over its sequences.
- Only pairs of positions that see each other are computed, and no mask is made: every
  segment attends to itself causally, and all that continues a segment attends to the
  whole of it. What a position gets from the segments along its path is put together by
  the log-sum-exp of each.
- Memory is that of the row: nothing of the size of queries times keys exists.
- Without `tree` the function is ordinary attention, so one loaded model serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl.learner.tree import Segment

ATTENTION = "token_tree"  # no mask function has this name, so transformers builds no mask
BLOCK = 128  # positions per side of a FlexAttention block, its default

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# SDPA's own kernels on CPU, which alone return the log-sum-exp that parts are joined by.
_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeAttention:
    """The tree of one micro-batch, as every layer's attention needs it."""

    def __init__(self, segments: tuple[Segment, ...], device: torch.device) -> None:
        """Of the row that `segments` lay out, on `device`."""
        self._segments = segments
        self._block_mask: BlockMask | None = None
        if device.type == "cuda":
            self._block_mask = block_mask(segments, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Output (1, N, H, D) from query (1, H, N, D), key and value (1, K, N, D)."""
        if self._block_mask is not None:
            output = _compiled_flex()(query, key, value, self._block_mask, scale)
        else:
            output = _TreeFunction.apply(query, key, value, self._segments, scale)
        return output.transpose(1, 2).contiguous()


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


def sees(ends: Tensor) -> MaskFunction:
    """FlexAttention's mask of the tree: whether query `q` sees key `k`; `ends` as in `tree`."""

    def mask(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (k <= q) & (q < ends[k])

    return mask


def block_mask(segments: tuple[Segment, ...], device: torch.device) -> BlockMask:
    """The blocks that FlexAttention computes, found one row of blocks at a time."""
    length = segments[-1].stop
    ends = torch.tensor(
        [segment.end for segment in segments for _ in range(segment.start, segment.stop)],
        device=device,
    )
    places = torch.arange(length, device=device)
    some: list[Tensor] = []
    every: list[Tensor] = []
    for queries in places.split(BLOCK):
        seen = (places <= queries[:, None]) & (queries[:, None] < ends)
        missing = -length % BLOCK
        blocks = pad(seen, (0, missing)).unflatten(1, (-1, BLOCK))  # (BLOCK, N / BLOCK, BLOCK)
        some.append(blocks.any(2).any(0))
        every.append(blocks.all(2).all(0))
    whole = torch.stack(every)
    return BlockMask.from_kv_blocks(
        *_indices(torch.stack(some) & ~whole),
        *_indices(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees(ends),
        seq_lengths=(length, length),
    )


def _indices(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block wants, and which, wanted ones first."""
    which = wanted.int().argsort(dim=1, descending=True, stable=True)
    return wanted.sum(1).int()[None, None], which.int()[None, None]


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """The tree's attention by FlexAttention; shapes as in `TreeAttention`, heads first."""
    output: Any = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )
    return output


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """`flex` compiled, lazily: uncompiled it would make the whole matrix."""
    return torch.compile(flex, dynamic=True)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; q (B, H, N, D), k and v (B, K, N, D)."""
    if tree is None:
        forward: Any = sdpa_attention_forward
        return forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return tree(query, key, value, scaling), None


def _parts(segments: tuple[Segment, ...]) -> list[tuple[slice, slice, bool]]:
    """Queries, keys and whether they are the same run, so that causality matters."""
    parts: list[tuple[slice, slice, bool]] = []
    for segment in segments:
        own = slice(segment.start, segment.stop)
        parts.append((own, own, True))
        if segment.end > segment.stop:
            parts.append((slice(segment.stop, segment.end), own, False))
    return parts


class _TreeFunction(torch.autograd.Function):
    """The tree's attention by SDPA's CPU kernels, heads before positions."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: tuple[Segment, ...],
        scale: float | None,
    ) -> Tensor:
        """(1, H, N, D), from query of that shape, key and value (1, K, N, D)."""
        _, heads, length, width = query.shape
        # Parts are joined unrounded, and positions lie together, as the next layer wants them.
        output = query.new_empty(1, length, heads, width, dtype=torch.float32).transpose(1, 2)
        total = query.new_empty(1, heads, length, dtype=torch.float32)  # log-sum-exp so far
        # The own parts cover every query once; the others are joined to them.
        for queries, keys, own in sorted(_parts(segments), key=lambda part: not part[2]):
            part, lse = _kernel(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, own, scale=scale
            )
            if own:
                output[:, :, queries], total[:, :, queries] = part, lse
            else:
                _join(output[:, :, queries], total[:, :, queries], part, lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.segments, ctx.scale = segments, scale
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Each part's share, exact because the kernels divide by the whole log-sum-exp."""
        query, key, value, output, total = ctx.saved_tensors
        to_query, to_key, to_value = (torch.zeros_like(t) for t in (query, key, value))
        for queries, keys, own in _parts(ctx.segments):
            shares = _kernel_backward(
                gradient[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                total[:, :, queries],
                0.0,
                own,
                scale=ctx.scale,
            )
            to_query[:, :, queries] += shares[0]
            to_key[:, :, keys] += shares[1]
            to_value[:, :, keys] += shares[2]
        return to_query, to_key, to_value, None, None


def _join(output: Tensor, total: Tensor, part: Tensor, lse: Tensor) -> None:
    """Put `part`, whose log-sum-exp is `lse`, into `output` of log-sum-exp `total`, in place."""
    output.lerp_(part.to(output.dtype), torch.sigmoid(lse - total).unsqueeze(-1))
    total.copy_(torch.logaddexp(total, lse))
