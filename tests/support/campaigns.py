"""Small campaigns for tests: configurations, models and a way to run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "Reply with one bash code block."
SMALL_TASKS = 10  # that `small_config` draws on, training and held out
FAMILIES = ["mkdir", "touch", "rm", "mv", "chmod", "movein"]


def small_config(model_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A two-update campaign of eight-episode batches; `sections` replace values."""
    config: dict[str, Any] = {
        "name": "small",
        "model": {
            "source": "path",
            "name": "tiny",
            "path": str(model_dir),
            "renderer": "chatml",
            "dtype": "float32",
        },
        "tasks": {"train": 6, "heldout": SMALL_TASKS - 6, "families": FAMILIES},
        "agent": {
            "system_prompt": SYSTEM,
            "call_format": "fenced",
            "max_turns": 1,
            "max_new_tokens": 24,
            "max_recoveries": 0,
            "command_timeout_s": 10.0,
        },
        "sandbox": {"disk_mb": 16},
        "episodes": {
            "concurrency": 8,
            "workers": 2,
            "deadline_s": 180.0,
            "verifier_timeout_s": 30.0,
        },
        "schedule": {"updates": 2, "batch_size": 8, "group_size": 4},
        "engine": {
            "device": "cpu",
            "replicas": 2,
            "max_num_seqs": 8,
            "max_model_len": 512,
            "kv_cache_mb": 64,
            "block_size": 32,
            "probe_tolerance": 0.005,
        },
        "trainer": {"device": "cpu", "optimizer": {"lr": 4e-3}},
        "checkpoints": {"updates": [1, 2]},
        "heldout": {"attempts": 2, "shards": 2},
        "limits": {"watchdog_s": 1200.0, "stall_s": 300.0},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """Write a configuration as TOML."""
    path.write_text("\n".join(_toml(config)) + "\n", encoding="utf-8")
    return path


def _toml(table: dict[str, Any], prefix: str = "") -> list[str]:
    """TOML lines of a tree: scalars and lists are written as JSON writes them."""
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    lines = [f"[{prefix}]"] * bool(prefix and plain)
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _toml(value, f"{prefix}.{key}" if prefix else key)
    return lines


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command under test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RL_CHAOS"))}
    return {**kept, "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0", **extra}


def run_final(*arguments: str, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    """Run `python -m rl.final` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "rl.final", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_final(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m rl.final`; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rl.final", *arguments],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_scripted(tmp_path: Path, state: Path, run_id: str, updates: int) -> Scripted:
    """Start a scripted campaign and wait for its first checkpoint."""
    from rl.learner.stand_in import make_tiny_model

    reply = "```bash\ntouch a\n```"
    settings = small_config(
        make_tiny_model(tmp_path / "model", [SYSTEM, reply]),
        engine={"kind": "scripted", "scripted": {"replies": [reply], "latency_s": 0.5}},
        schedule={"updates": updates},
        checkpoints={"updates": []},
    )
    config = write_config(tmp_path / "small.toml", settings)
    log = tmp_path / "log"
    arguments = ("--config", str(config), "--state", str(state), "--run-id", run_id)
    process = start_final(*arguments, "--no-dashboard", log=log)
    campaign = state / "campaigns" / run_id
    limit = time.monotonic() + 300
    while not any(row["kind"] == "checkpoint" for row in events(campaign)):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < limit, log.read_text(encoding="utf-8")
        time.sleep(0.05)
    return Scripted(process, campaign, log)


@dataclass(frozen=True)
class Scripted:
    """A campaign that is running."""

    process: subprocess.Popen[bytes]
    campaign: Path
    log: Path


def events(campaign: Path) -> list[dict[str, Any]]:
    """A campaign's event rows."""
    path = campaign / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def processes_naming(text: str) -> list[int]:
    """Ids of living processes whose command line names `text`, apart from this one's."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if text in line:
            found.append(int(entry.name))
    return found
