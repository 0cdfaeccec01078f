"""What a learner's owner and its ranks say to each other, pickled over a socket.

Invariants:
- Only processes that the owner started can connect: the socket lies in a folder that
  nobody else may enter.
- An owner has at most one call under way; every rank answers each call once.
- Nothing here needs torch.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from rl.config import CampaignConfig
from rl.errors import CampaignError

# Methods of `rl.learner.peft_learner.PeftLearner`.
Method = Literal[
    "accumulate", "accumulate_attempts", "drop", "step", "export", "state", "load_state"
]


@dataclass(frozen=True)
class Hello:
    """A rank's first word."""

    rank: int


@dataclass(frozen=True)
class Setup:
    """The owner's first: what to become a learner of. The answer has no value."""

    config: CampaignConfig
    model_dir: Path


@dataclass(frozen=True)
class Call:
    """A learner's method, to be called on every rank."""

    method: Method
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    version: int  # that the rank's weights are
    value: Any = None  # what the method returned, on rank 0
    error: CampaignError | None = None  # what it raised


def connection(end: socket.socket, timeout_s: float) -> Connection:
    """Messages over a connected socket, which must not be used otherwise any more.

    Args:
        end: this side's.
        timeout_s: after which a message that is stuck half-way raises BlockingIOError.
    """
    limit = struct.pack("ll", int(timeout_s), 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(end.detach())
