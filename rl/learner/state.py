"""A learner between two updates, as bytes.

Invariants:
- Nothing here needs torch, so checkpoints can be written and checked without it.
- The adapter's version is the learner's version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rl.records import AdapterBytes


@dataclass(frozen=True)
class LearnerState:
    """Everything a learner needs to go on."""

    adapter: AdapterBytes
    optimizer: bytes  # torch.save of optimizer and random state, loads with weights_only


def files_sha256(files: dict[str, bytes]) -> str:
    """sha256 over the sorted names and contents, each with its length before it, hex."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()
