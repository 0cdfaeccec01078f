"""The processes that share an update, as each of them sees the others.

Invariants:
- All ranks make the same calls in the same order; a call ends when all have made it,
  or raises at the group's deadline.
- What comes of a call is the same on every rank, to the last bit, so whatever ranks
  decide or compute from it they decide and compute alike.
- Nothing but gradients and figures passes between them: adapter and optimizer stand
  in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """What a learner asks of the others."""

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def align(self, busy: list[bool]) -> list[bool]:
        """Which passes through the model this rank makes: more than its own work if it
        must keep step with the others, each differentiable if any rank's is.

        Args:
            busy: for each micro-batch of this rank, whether it is differentiated.
        """
        ...

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of the same shapes on all ranks, by their sums over them."""
        ...

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        ...


class Alone:
    """The ranks of a learner that has all the work."""

    rank = 0
    size = 1

    def align(self, busy: list[bool]) -> list[bool]:
        """Its own passes, no others."""
        return busy

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def gather[T](self, value: T) -> list[T]:
        """Its own value."""
        return [value]


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks of `torch.distributed`'s default group, which has a backend for CPU tensors.

    Attributes:
        in_step: whether every pass through the model is one of all ranks, as it is where
            they hold the base weights in pieces.
    """

    in_step: bool

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    def align(self, busy: list[bool]) -> list[bool]:
        """As `Ranks.align`."""
        if not self.in_step:
            return busy
        every = self.gather(busy)
        passes = max(len(flags) for flags in every)
        return [any(flags[turn : turn + 1] == [True] for flags in every) for turn in range(passes)]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """One transfer for all of them."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, pickled on the way."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return every
