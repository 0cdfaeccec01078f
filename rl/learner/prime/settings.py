"""prime-rl's own trainer configuration, from ours.

Invariants:
- A pure function of the campaign's configuration and of paths: the same campaign
  gives the same file.
- Every value that decides what is learned is written out, so that a default over
  there changes nothing here.
- What prime-rl can't do as asked is refused by `rl.config`; here nothing is bent.
- It never ends by itself: the owner ends it, so every exit is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rl.config import CampaignConfig
from rl.errors import ConfigurationError
from rl.prime_config import PrimeConfig
from rl.trainer_config import OptimizerConfig

# What PEFT's "all-linear" comes to in Llama, Qwen and Mistral blocks.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
METRICS_FILE = "metrics.jsonl"


def prime(config: CampaignConfig) -> PrimeConfig:
    """The section of this backend.

    Raises:
        ConfigurationError: the campaign has another backend.
    """
    section = config.trainer.prime
    if section is None:
        raise ConfigurationError("another backend is configured", "trainer.backend")
    return section


def token_budget(config: CampaignConfig) -> int:
    """Tokens of one micro-batch: any sequence that an engine can make fits in."""
    return max(config.trainer.micro_batch_tokens, config.engine.max_model_len)


def ranks(config: CampaignConfig) -> int:
    """Data-parallel ranks: one per GPU of the trainer."""
    return int(config.resources.trainer_gpus)


def native_config(
    config: CampaignConfig, model_dir: Path, root: Path, resume_step: int
) -> dict[str, Any]:
    """The values of prime-rl's `TrainerConfig` that this backend decides.

    Args:
        config: the campaign's.
        model_dir: base weights.
        root: prime-rl's output directory.
        resume_step: continue after this update; 0 starts afresh.
    """
    trainer, section = config.trainer, prime(config)
    knobs = trainer.loss.knobs
    return {
        "output_dir": str(root),
        "model": {
            "name": str(model_dir),
            # By default it would convert weights within the model's directory.
            "conversion_dir": str(root / "converted"),
            "trust_remote_code": False,
            "seq_len": token_budget(config),
            "attn": section.attention,
            "compile": {"fullgraph": False} if section.compile else None,
            "ac": {"mode": "full", "freq": 1} if trainer.gradient_checkpointing else None,
            "ac_offloading": None,
            "fsdp_cpu_offload": False,
            "optim_cpu_offload": False,
            "dp_replicate": 1,
            "cp": 1,
            # Masters of the adapter: in bfloat16 small updates would round away.
            "optimization_dtype": "float32",
            "reduce_dtype": "float32",
            "lora": {
                "rank": trainer.lora.rank,
                "alpha": trainer.lora.alpha,
                "dropout": 0.0,
                "target_modules": list(LINEAR_LAYERS),
                "modules_to_save": [],
            },
        },
        "loss": {
            "type": "default",
            "dppo_mask_low": knobs["clip_low"],
            "dppo_mask_high": knobs["clip_high"],
            "adv_tau": 1.0,
            "kl_tau": knobs["kl_weight"],
        },
        "optim": {
            "type": "adamw",
            "lr": trainer.optimizer.lr,
            "weight_decay": trainer.optimizer.weight_decay,
            "max_norm": trainer.optimizer.clip_norm,
            "betas1": trainer.optimizer.betas[0],
            "betas2": trainer.optimizer.betas[1],
        },
        "scheduler": _scheduler(trainer.optimizer),
        # Every step, so that each checkpoint of ours has its counterpart; what to
        # keep is decided here, not by age over there.
        "ckpt": {"interval": 1, "keep_last": None, "keep_interval": None},
        "resume": {"step": resume_step} if resume_step else None,
        "weight_broadcast": {"type": "filesystem"},
        "rollout_transport": {"type": "filesystem"},
        "monitors": {"wandb": None, "file": {"path": METRICS_FILE}},
        "max_steps": None,
        "dist_timeout_seconds": max(1, int(trainer.update_timeout_s)),
        "enable_router_replay": False,
        "enable_token_export": False,
    }


def _scheduler(optimizer: OptimizerConfig) -> dict[str, Any]:
    """The schedule whose update t has the rate `rl.learner.rate.learning_rate` of t.

    Over there a warm-up begins at its lowest rate, and that at update 1 is ours
    of update 1: one share of the peak.
    """
    warmup = optimizer.warmup_updates
    if warmup <= 1:
        return {"type": "constant"}
    return {
        "type": "linear",
        "warmup_steps": warmup - 1,
        "decay_steps": 0,
        "min_lr": optimizer.lr / warmup,
    }


def first_difference(wanted: Mapping[str, Any], resolved: Mapping[str, Any]) -> str | None:
    """The first key of `wanted` that `resolved` holds differently, and how; None if none."""
    for key, value in wanted.items():
        if key not in resolved:
            return f"{key} is missing"
        found = resolved[key]
        if isinstance(value, dict) and isinstance(found, dict):
            inner = first_difference(cast(dict[str, Any], value), cast(dict[str, Any], found))
            if inner is not None:
                return f"{key}.{inner}"
        elif value != found:
            return f"{key} is {found!r} instead of {value!r}"
    return None
