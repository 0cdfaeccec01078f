"""The base weights in pieces, one on each rank (FSDP2).

Invariants:
- A layer's weights are whole only while it computes, forwards or backwards, so every
  pass through the model is one of all ranks together.
- The adapter is whole on every rank: it is small, and so it is exported, checkpointed
  and stepped as without pieces. Embeddings and head are whole, too: the head is used
  in chunks, outside the model's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard_layers(decoder: Any, device: torch.device) -> None:
    """Keep this rank's piece of every layer's frozen weights, on `device`.

    Args:
        decoder: with its layers in `layers`; its trained weights stay whole.
        device: of this rank; a layer is moved there whole before its pieces are cut.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inside: set[torch.nn.Parameter] = set()
    for layer in decoder.layers:
        whole = {weight for weight in layer.parameters() if weight.requires_grad}
        inside.update(layer.parameters())
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    # The decoder holds none itself: it is where FSDP2 sees the layers' order from.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))
