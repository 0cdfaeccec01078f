"""The configuration of the prime-rl backend, a table of `rl.config`'s tree."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl.loss_config import LossConfig
from rl.values import Flag, Seconds, Section

# PyTorch's own, which prime-rl's configuration can't change.
ADAMW_EPS = 1e-8


class PrimeConfig(Section):
    """prime-rl's trainer process."""

    attention: Literal["auto", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto", description="attention kernels; auto: by the GPU's generation"
    )
    compile: Flag = Field(default=True, description="compile the model's blocks")
    start_timeout_s: Seconds = Field(
        default=1200.0, description="limit until it has broadcast the weights it starts from, s"
    )
    probe_device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="where the actor holds base and adapter to compute the probe's logprobs; "
        "cuda shares the trainer's GPU",
    )


def check_supported(device: str, loss: LossConfig, eps: float) -> None:
    """Raise `ValueError` for what is asked of the trainer that prime-rl has not."""
    if device != "cuda":
        raise ValueError("backend = 'prime-rl' runs on device = 'cuda' only")
    if loss.name != "trust_region" or loss.normalisation != "tokens":
        raise ValueError(
            "backend = 'prime-rl' has only loss.name = 'trust_region' with "
            "loss.normalisation = 'tokens'"
        )
    if eps != ADAMW_EPS:
        raise ValueError(f"backend = 'prime-rl' has only optimizer.eps = {ADAMW_EPS:g}")
