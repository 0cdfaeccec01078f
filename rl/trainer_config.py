"""The learner's part of `rl.config`'s tree."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl.loss_config import LossConfig
from rl.prime_config import PrimeConfig, check_supported
from rl.values import (
    Amount,
    Beta,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    PositiveAmount,
    Seconds,
    Section,
)


class LoraConfig(Section):
    """The adapter."""

    rank: Positive = Field(default=16, description="rank of every adapter matrix")
    alpha: PositiveAmount = Field(default=32.0, description="scale numerator (alpha / rank)")
    target: Literal["all-linear"] = Field(default="all-linear", description="layers adapted")


class OptimizerConfig(Section):
    """AdamW and the learning rate."""

    lr: Fraction = Field(description="peak learning rate")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.99), description="AdamW betas")
    eps: PositiveAmount = Field(default=1e-8, description="AdamW epsilon")
    weight_decay: Amount = Field(default=0.0, description="decoupled weight decay")
    warmup_updates: NonNegative = Field(default=0, description="updates of linear warm-up")
    clip_norm: PositiveAmount = Field(default=1.0, description="gradient norm clip")


class TrainerConfig(Section):
    """The learner."""

    backend: Literal["peft", "prime-rl"] = Field(
        default="peft", description="learner implementation; prime-rl: docs/prime-rl.md"
    )
    device: Literal["cpu", "cuda"] = Field(description="where the learner runs")
    threads: Positive = Field(default=1, description="cpu: torch threads of each rank")
    ranks: Positive = Field(
        default=1, description="processes that share an update's work; cuda: one on each GPU"
    )
    shard_base: Flag = Field(
        default=False, description="divide the base weights among the ranks, not a copy in each"
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="the adapter")
    optimizer: OptimizerConfig = Field(description="optimizer")
    loss: LossConfig = Field(default=LossConfig(), description="objective")
    micro_batch_tokens: Positive = Field(
        default=8192, description="tokens per forward pass, those that sequences share counted once"
    )
    gradient_checkpointing: Flag = Field(default=False, description="trade time for memory")
    streaming: Flag = Field(
        default=True,
        description="work on groups as they complete; false: on whole batches, in the order of "
        "their draws, so that the same episodes always give the same bits",
    )
    update_timeout_s: Seconds = Field(default=3600.0, description="limit of one update, s")
    prime: PrimeConfig | None = Field(default=None, description="backend = 'prime-rl': its own")

    @model_validator(mode="after")
    def _prime_rl_can_do_it(self) -> TrainerConfig:
        if (self.backend == "prime-rl") != (self.prime is not None):
            raise ValueError("prime is given exactly when backend = 'prime-rl'")
        if self.prime is not None:
            check_supported(self.device, self.loss, self.optimizer.eps)
        if self.prime is not None and self.ranks > 1:
            raise ValueError(
                "backend = 'prime-rl' makes a rank for each of resources.trainer_gpus; "
                "leave ranks out"
            )
        if self.shard_base and self.ranks == 1:
            raise ValueError("shard_base divides the base weights among ranks: set ranks above 1")
        return self

    @property
    def torch_device(self) -> str:
        """Where this project's own model of the policy lies, for gradients or only for probes."""
        return self.device if self.prime is None else self.prime.probe_device
