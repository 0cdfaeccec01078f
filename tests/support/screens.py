"""Screens with the scripted engine, which knows the packages' own solutions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.learner.stand_in import make_tiny_model
from rl.records import TaskRef
from tests.support.campaigns import ROOT, SYSTEM, environment

NOTHING = "```bash\ntrue\n```"


def solutions(root: Path, tasks: Iterable[TaskRef]) -> dict[str, str]:
    """A reply that solves each task, by its instruction."""
    found: dict[str, str] = {}
    for task in tasks:
        script = (root / task.path / "solution" / "solve.sh").read_text(encoding="utf-8")
        found[task.instruction] = f"```bash\n{script.rstrip()}\n```"
    return found


def screen_config(
    folder: Path, root: Path, tasks: list[TaskRef], **sections: dict[str, Any]
) -> dict[str, Any]:
    """A screen of `tasks`, in four shards on four scripted replicas; files go to `folder`."""
    oracle = solutions(root, tasks)
    model = make_tiny_model(folder / "model", [SYSTEM, NOTHING, *list(oracle)[:40]])
    path = folder / "oracle.json"
    path.write_text(json.dumps(oracle), encoding="utf-8")
    config: dict[str, Any] = {
        "name": "screened",
        "model": {
            "source": "path",
            "name": "tiny",
            "path": str(model),
            "renderer": "chatml",
            "dtype": "float32",
        },
        "tasks": {"source": "cohort", "cohort": "screen116", "train": 80, "heldout": 23},
        "agent": {
            "system_prompt": SYSTEM,
            "call_format": "fenced",
            "max_turns": 1,
            "max_new_tokens": 8192,
            "command_timeout_s": 30.0,
        },
        "sandbox": {"disk_mb": 64},
        "episodes": {
            "concurrency": 16,
            "workers": 2,
            "deadline_s": 240.0,
            "verifier_timeout_s": 60.0,
        },
        "engine": {
            "kind": "scripted",
            "scripted": {"replies": [NOTHING], "solve_rate": 0.5},
            "device": "cpu",
            "replicas": 4,
            "max_num_seqs": 64,
            "max_model_len": 32768,
            "extra_args": ["--oracle", str(path)],
        },
        "screen": {"attempts": 8, "shards": 4, "low": 0.1, "high": 0.9},
        "limits": {"watchdog_s": 1200.0, "stall_s": 300.0},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def run_command(
    module: str, *arguments: str, timeout: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
