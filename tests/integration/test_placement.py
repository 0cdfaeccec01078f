"""Runs on clusters of several nodes: Ray's own test cluster, with logical GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util.placement_group import placement_group_table

from actors.engine_process import free_port
from actors.placement import Placement, acquire, bundles
from actors.ray_auth import use_tokens
from rl.config_file import load_config, parse_config
from rl.errors import InfrastructureError
from rl.evidence.layout import CampaignDir
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import (
    ROOT,
    SYSTEM,
    environment,
    processes_naming,
    run_final,
    small_config,
)
from tests.support.campaigns import write_config as write

REPLY = "```bash\ntouch a\n```"
SHORT_S = 3.0


@contextmanager
def cluster(*nodes: dict[str, Any], connect: bool = True) -> Generator[str]:
    """A cluster of these nodes; the first is the head."""
    use_tokens()
    made = RayCluster()
    try:
        for node in nodes:
            made.add_node(wait=False, include_dashboard=False, **node)
        made.wait_for_nodes()
        if connect:
            ray.init(made.address, namespace="test", log_to_driver=False)
        yield str(made.address)
    finally:
        ray.shutdown()
        made.shutdown()


def reserve(config, limit_s: float = 30.0, name: str = "run") -> Placement:
    return asyncio.run(acquire(bundles(config, trainer=True), name, limit_s))


def reference(**overrides: Any):
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(ROOT / "configs/final.toml", values)


@pytest.mark.timeout(120)
def test_a_node_that_can_hold_everything_does() -> None:
    with cluster({"num_cpus": 2}, {"num_cpus": 16, "num_gpus": 3}, {"num_cpus": 16, "num_gpus": 2}):
        placed = reserve(reference())
        assert len(set(placed.node.values())) == 1
        assert ray.available_resources()["GPU"] == 2
        # Whoever comes second is told who was first, and is not kept waiting.
        with pytest.raises(InfrastructureError, match=r"full.*needs 3 GPU.*held by run\)") as full:
            reserve(reference(), SHORT_S, "second")
        assert "ask for less in [resources]" in full.value.remedy
        placed.release()
        reserve(reference(), name="second").release()
        with pytest.raises(InfrastructureError, match="2 GPU missing"):
            reserve(reference(engine__replicas=6))
        table = placement_group_table()
        assert {row["state"] for row in table.values()} == {"REMOVED"}


@pytest.mark.timeout(120)
def test_five_nodes_of_eight_hold_a_trainer_of_eight_and_32_replicas() -> None:
    nodes = [{"num_cpus": 32, "num_gpus": 8, "labels": {"pool": "even"}} for _ in range(4)]
    nodes.append({"num_cpus": 32, "num_gpus": 8, "labels": {"pool": "train"}})
    with cluster(*nodes):
        config = reference(
            engine__replicas=32,
            resources__trainer_gpus=8.0,
            resources__replica_cpus=1.0,
            resources__trainer_labels={"pool": "train"},
            resources__worker_labels={"pool": "!train"},
        )
        placed = reserve(config)
        names = {n["NodeID"]: n["Labels"]["pool"] for n in ray.nodes()}
        assert names[placed.node["trainer"]] == "train"
        replicas = [placed.node[f"replica {n}"] for n in range(32)]
        assert sorted(Counter(replicas).values()) == [8, 8, 8, 8]
        workers = {placed.node[f"episode worker {n}"] for n in range(4)}
        assert {names[node] for node in workers} == {"even"}
        assert ray.available_resources().get("GPU", 0.0) == 0.0
        placed.release()


@pytest.mark.timeout(120)
def test_a_cluster_that_takes_anybody_is_refused() -> None:
    script = (
        "import asyncio, sys; from actors.ray_connection import connect; "
        "asyncio.run(connect(sys.argv[1], 'open', False))"
    )
    port = str(free_port())
    head = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--port", port]
    head += ["--num-cpus=1", "--include-dashboard=false"]
    with subprocess.Popen(head, env=environment(RAY_AUTH_MODE="disabled"), cwd="/") as opened:
        try:
            answers: dict[str, str] = {}
            for mode in ("disabled", "token"):
                limit = time.monotonic() + 60
                while time.monotonic() < limit:
                    done = subprocess.run(
                        [sys.executable, "-c", script, f"127.0.0.1:{port}"],
                        env=environment(RAY_AUTH_MODE=mode),
                        cwd=ROOT,
                        capture_output=True,
                        text=True,
                        timeout=100,
                    )
                    answers[mode] = done.stderr
                    if "no Ray head answers" not in done.stderr:
                        break
                    time.sleep(0.5)
        finally:
            opened.terminate()
    assert "Error" not in answers["disabled"]
    assert "takes whoever can reach it, and this process takes tokens only" in answers["token"]


@pytest.mark.timeout(300)
def test_three_nodes_of_one_gpu_that_share_no_files_make_a_whole_campaign(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", [SYSTEM, REPLY])
    settings = small_config(
        model,
        engine={"kind": "scripted", "scripted": {"replies": [REPLY], "latency_s": 0.1}},
        resources={
            "trainer_gpus": 1.0,
            "replica_gpus": 1.0,
            "worker_cpus": 1.0,
            "trainer_labels": {"role": "far"},
            "worker_labels": {"role": "far"},
        },
        checkpoints={"updates": [1]},
    )
    parse_config(settings, where="test")
    config = write(tmp_path / "small.toml", settings)
    head = {"num_cpus": 1, "num_gpus": 1}
    far = [
        {
            "num_cpus": 1,
            "num_gpus": 1,
            "labels": {"role": "far"},
            "env_vars": {"RL_NODE_ROOT": str(tmp_path / f"node-{n}")},
        }
        for n in range(2)
    ]
    arguments = ["--state", str(tmp_path / "state"), "--run-id", "spread"]
    with cluster(head, *far, connect=False) as address:
        done = run_final("--config", str(config), *arguments, "--address", address)
        assert done.returncode == 0, done.stdout + done.stderr
        assert processes_naming(str(tmp_path / "state" / "campaigns")) == []
    directory = CampaignDir(tmp_path / "state" / "campaigns" / "spread")
    assert json.loads(directory.audit.read_text())["findings"] == []
    # Evidence lies where the driver ran, whatever node it was made on.
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
        "update-0001",
        "update-0002",
    ]
    assert len(list(directory.logs.rglob("engine-1.log"))) == 2
    far_away = list(tmp_path.glob("node-*/runs/spread/checkpoints/update-*"))
    assert sorted(path.name for path in far_away) == ["update-0001", "update-0002"]
    # Each node has the model and the tasks by content, once, and only what it needs of them.
    for node in range(2):
        files = tmp_path / f"node-{node}" / "files"
        assert [path for path in files.iterdir() if path.name.startswith(".")] == []
        assert len(list(files.glob("*/config.json"))) == 1
    assert "sending model" in done.stdout
    assert os.environ.get("RL_NODE_ROOT") is None
