"""Campaign configurations small enough for one replica of a tiny model."""

from __future__ import annotations

from typing import Any

from rl.config import CampaignConfig
from rl.config_file import parse_config


def engine_campaign(kind: str = "scripted", **engine: Any) -> CampaignConfig:
    """Return a campaign whose engine is of `kind`; keywords replace engine keys."""
    table: dict[str, Any] = {
        "kind": kind,
        "replicas": 1,
        "device": "cpu",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "kv_cache_mb": 64,
        "block_size": 32,
        "start_timeout_s": 240.0,
        "control_timeout_s": 60.0,
    }
    if kind == "scripted":
        table["scripted"] = {"replies": ["```bash\nmkdir alpha\n```", "no command"]}
    return parse_config(
        {
            "name": "engine-test",
            "seed": 5,
            "model": {"source": "path", "name": "tiny", "path": "/tiny", "dtype": "float32"},
            "tasks": {"train": 2, "heldout": 2},
            "agent": {"system_prompt": "s", "max_turns": 1, "max_new_tokens": 16},
            "episodes": {"concurrency": 4, "deadline_s": 300.0},
            "schedule": {"updates": 1, "batch_size": 4, "group_size": 2},
            "engine": table | engine,
            "trainer": {"device": "cpu", "optimizer": {"lr": 1e-3}},
            "heldout": {"attempts": 1, "shards": 1},
            "limits": {"watchdog_s": 100},
        },
        "tests/support/engine_config.py",
    )
