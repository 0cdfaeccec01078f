"""The learning rate of an update, the same for every backend."""

from __future__ import annotations


def learning_rate(peak: float, warmup_updates: int, update: int) -> float:
    """Learning rate of `update` (from 1): linear to `peak` over the warm-up, then constant."""
    return peak * min(1.0, update / warmup_updates) if warmup_updates else peak
