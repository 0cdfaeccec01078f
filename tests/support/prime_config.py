"""A campaign of the prime-rl backend, and how its stand-in is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from actors.prime_command import PrimeCommand
from rl.config import CampaignConfig
from rl.config_file import parse_config
from rl.records import EpisodeRecord, Group, Sample
from tests.support import prime_trainer_process

TEMPERATURE = 0.7
STAND_IN = str(Path(prime_trainer_process.__file__))


def prime_campaign(gpus: float = 1.0, dtype: str = "float32", **trainer: Any) -> CampaignConfig:
    """A campaign whose trainer section is completed by `trainer`."""
    return parse_config(
        {
            "name": "prime",
            "seed": 5,
            "model": {"source": "path", "name": "tiny-llama", "path": "x", "dtype": dtype},
            "tasks": {"train": 4, "heldout": 2},
            "agent": {
                "system_prompt": "x",
                "max_turns": 1,
                "max_new_tokens": 8,
                "temperature": TEMPERATURE,
            },
            "episodes": {"concurrency": 8, "deadline_s": 300.0},
            "schedule": {"updates": 4, "batch_size": 8, "group_size": 4},
            "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 64},
            "trainer": {
                "backend": "prime-rl",
                "device": "cuda",
                "lora": {"rank": 4, "alpha": 8.0},
                "optimizer": {"lr": 1e-2, "warmup_updates": 4},
                "micro_batch_tokens": 64,
                "update_timeout_s": 60.0,
                "prime": {"start_timeout_s": 60.0},
                **trainer,
            },
            "heldout": {"attempts": 1},
            "limits": {"watchdog_s": 1000},
            "resources": {"trainer_gpus": gpus},
        },
        "test",
    )


def stand_in(
    config_file: Path, fault: str = "", inspect_fault: str = "", ranks: int = 1
) -> PrimeCommand:
    """The stand-in's commands; `fault` is NAME@STEP."""
    return PrimeCommand(
        inspect=(sys.executable, STAND_IN, "inspect", *([inspect_fault] if inspect_fault else [])),
        train=(
            *(sys.executable, STAND_IN, "train"),
            *([fault] if fault else []),
            *("@", str(config_file)),
        ),
        environment={**os.environ, "FAKE_RANKS": str(ranks)},
    )


def write_shape(path: Path) -> Path:
    """The shape of a tiny model, without weights."""
    path.mkdir(parents=True)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    (path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return path


def sampled_group(group_id: str, version: int = 0, attempts: int = 4, prompt: int = 6) -> Group:
    """Attempts of growing length whose rewards alternate."""
    episodes: list[EpisodeRecord] = []
    for index in range(attempts):
        length = 2 + index
        sample = Sample(
            token_ids=[*range(1, prompt + 1), *range(20, 20 + length)],
            sampled=[False] * prompt + [True] * length,
            logprobs=[0.0] * prompt + [-0.5 - 0.25 * position for position in range(length)],
        )
        episodes.append(
            EpisodeRecord(
                attempt_id=f"{group_id}-{index}",
                group_id=group_id,
                task_name="task",
                task_digest="0" * 64,
                version=version,
                replica=0,
                outcome="graded",
                reward=float(index % 2),
                stop_reason="completed",
                samples=[sample],
                started_at=0.0,
            )
        )
    return Group(group_id=group_id, task_name="task", version=version, episodes=episodes)
