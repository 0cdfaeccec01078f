"""Checkpoints of a learner that only has bytes: nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl.learner.checkpoint import save_checkpoint
from rl.learner.manifest import CheckpointManifest
from rl.learner.state import LearnerState, files_sha256
from rl.records import AdapterBytes, Probe

DIGEST = "a" * 64
FILES = [
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "optimizer.pt",
    "scheduler.json",
    "manifest.json",
]


def make_state(version: int, salt: str = "") -> LearnerState:
    """A learner's state at `version`; another `salt` gives other weights."""
    files = {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": f"weights {version}{salt}".encode() * 50,
    }
    return LearnerState(
        adapter=AdapterBytes(
            version=version,
            files=files,
            sha256=files_sha256(files),
            probe=Probe(token_ids=[1, 2], logprobs=[-0.1 * version]),
        ),
        optimizer=f"moments {version}".encode() * 100,
    )


def save(root: Path, update: int, salt: str = "") -> Path:
    """Write the checkpoint of `update`."""
    return save_checkpoint(root, update, make_state(update, salt), {"frontier": [update]}, DIGEST)


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Change a manifest as its writer would have written it, seal and all."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["seal"]
    content = CheckpointManifest.model_validate(manifest).sealed().content()
    (path / "manifest.json").write_bytes(content)
