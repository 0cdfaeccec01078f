"""The proof that a checkpoint's adapter is what was trained.

Invariant: nothing of the learner that wrote the checkpoint is used; the base is
loaded anew and the adapter through PEFT's own loader.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError

from rl.config import CampaignConfig
from rl.errors import EvidenceError
from rl.learner import checkpoint
from rl.learner.policy import load_base, token_logprobs

FRESH_TOLERANCE = 1e-4  # nats: fp32 rounding between two runs of the same forward


@dataclass(frozen=True)
class FreshLogprobs:
    """What PEFT makes of prompts: logprobs of all tokens but each prompt's first, nats."""

    adapted: list[list[float]]
    base: list[list[float]]


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
    model = _load(path, model_dir, config)
    found = token_logprobs(model, manifest.probe.token_ids)
    largest = largest_difference(found, manifest.probe.logprobs)
    if not largest <= FRESH_TOLERANCE:
        raise EvidenceError(
            f"loaded afresh, the probe's logprobs differ by {largest:.3g} nats "
            f"(allowed: {FRESH_TOLERANCE})",
            str(path),
            "do not use this checkpoint; check that the model directory is the campaign's",
        )
    return largest


def fresh_logprobs(
    path: Path, model_dir: Path, config: CampaignConfig, prompts: Sequence[Sequence[int]]
) -> FreshLogprobs:
    """Logprobs of `prompts` under the adapter of a verified checkpoint, and without it.

    The device's memory is free again on return.

    Raises:
        EvidenceError: the adapter does not fit the base.
        ConfigurationError: the base can't be loaded.
    """
    model = _load(path, model_dir, config)
    adapted = [token_logprobs(model, list(prompt)) for prompt in prompts]
    with model.disable_adapter():
        base = [token_logprobs(model, list(prompt)) for prompt in prompts]
    del model
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return FreshLogprobs(adapted, base)


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest absolute difference of two lists of equal length, NaN if one is in them."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    broken = [value for value in differences if math.isnan(value)]
    return broken[0] if broken else max(differences, default=0.0)


def _load(path: Path, model_dir: Path, config: CampaignConfig) -> Any:
    # A base that is kept in pieces may not fit into one device: layer by layer on all.
    device = "auto" if config.trainer.shard_base else None
    base = load_base(model_dir, config, share_prefix=False, device=device)
    folder = path / checkpoint.ADAPTER
    try:
        model: Any = peft.PeftModel.from_pretrained(base, str(folder))
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"PEFT can't load it over this model: {str(error).splitlines()[0]}",
            str(folder),
            "give the model that the checkpoint was trained from",
        ) from error
    return model.eval()
