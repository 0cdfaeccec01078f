"""The functions that Modal calls, by name: each takes an order and returns an answer, as text.

They are plain functions: `rl.provision.build` says what each of them is given.
"""

from __future__ import annotations

from rl.provision.container import (
    evaluate_shard,
    prepare,
    train_campaign,
    train_on_cluster,
)
from rl.provision.continuation import continue_campaign


def prepare_account(order: str) -> str:
    """Model and task packages into the volumes; no GPU, no model call."""
    return prepare(order)


def train(order: str) -> str:
    """The short run, whole."""
    return train_campaign(order, whole=True)


def final_train(order: str) -> str:
    """The campaign's training, on one container."""
    return train_campaign(order)


def final_cluster(order: str) -> str:
    """The same on all GPUs of several machines; called in each of them."""
    return train_on_cluster(order)


def heldout_worker(order: str, shard: int, shards: int) -> str:
    """One shard of the held-out evaluation."""
    return evaluate_shard(order, shard, shards)


def final_continue(order: str, training: str, shards: int) -> str:
    """What comes after the call `training`: the held-out evaluation and the report."""
    return continue_campaign(order, training, shards)
