"""The proof that a checkpoint's adapter is what was trained.

Invariant: nothing of the learner that wrote the checkpoint is used; the base is
loaded anew and the adapter through PEFT's own loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft

from rl.config import CampaignConfig
from rl.errors import EvidenceError
from rl.learner import checkpoint
from rl.learner.policy import load_base, token_logprobs

FRESH_TOLERANCE = 1e-4  # nats: fp32 rounding between two runs of the same forward


def verify_fresh(path: Path, model_dir: Path, config: CampaignConfig) -> float:
    """Load the checkpoint at `path` into a fresh base and compare its probe.

    Returns:
        The largest difference of the probe's logprobs, nats.

    Raises:
        EvidenceError: the checkpoint is damaged, or the difference exceeds
            `FRESH_TOLERANCE`.
        ConfigurationError: the base can't be loaded.
    """
    manifest = checkpoint.verify(path, config.digest())
    base = load_base(model_dir, config, share_prefix=False)
    model: Any = peft.PeftModel.from_pretrained(base, str(path / checkpoint.ADAPTER)).eval()
    found = token_logprobs(model, manifest.probe.token_ids)
    largest = max(abs(a - b) for a, b in zip(found, manifest.probe.logprobs, strict=True))
    if not largest <= FRESH_TOLERANCE:
        raise EvidenceError(
            f"loaded afresh, the probe's logprobs differ by {largest:.3g} nats "
            f"(allowed: {FRESH_TOLERANCE})",
            str(path),
            "do not use this checkpoint; check that the model directory is the campaign's",
        )
    return largest
