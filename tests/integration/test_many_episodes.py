"""128 episodes in flight at once: real sandboxes, real actors, the scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import ray

from actors.attempts import run_on_worker
from actors.calls import call
from actors.cluster import Cluster
from actors.episodes import attempt_seed
from actors.nodes import Site
from actors.ray_connection import connect
from actors.starting import reserve, start_serving
from rl.config_file import parse_config
from rl.learner.stand_in import make_tiny_tokenizer
from rl.prepare import prepare_tasks
from rl.records import AttemptSpec, EpisodeRecord
from tests.support.campaigns import SYSTEM, processes_naming, small_config

EPISODES = 128


@pytest.mark.timeout(600)
def test_128_episodes_are_in_flight_at_once_and_each_ends_once(tmp_path: Path) -> None:
    model_dir = make_tiny_tokenizer(tmp_path / "model", [SYSTEM, "```bash\ntouch a\n```"])
    config = parse_config(
        small_config(
            model_dir,
            episodes={"concurrency": EPISODES, "workers": 2, "deadline_s": 400.0},
            schedule={"updates": 1, "batch_size": EPISODES, "group_size": 8},
            checkpoints={"updates": []},
            engine={
                "kind": "scripted",
                "max_num_seqs": 64,
                # Long enough that the last sandbox is up before the first reply is sent.
                "scripted": {"replies": ["```bash\ntouch a\n```"], "latency_s": 40.0},
            },
        ),
        where="test",
    )
    tasks = prepare_tasks(config.tasks, tmp_path)
    try:
        records, most_running = asyncio.run(_run_all(config, tasks.root, tasks.train, tmp_path))
    finally:
        ray.shutdown()
    assert most_running == EPISODES
    assert Counter(record.outcome for record in records) == {"graded": EPISODES}
    assert len({record.attempt_id for record in records}) == EPISODES
    assert Counter(record.replica for record in records) == {0: 64, 1: 64}
    assert all(len(record.samples) == 1 for record in records)
    assert processes_naming(str(tmp_path)) == []


async def _run_all(config, root, train, tmp_path) -> tuple[list[EpisodeRecord], int]:
    await connect(None, "many", dashboard=False)
    cluster = Cluster(config)
    try:
        await reserve(cluster, "many", Site(None, tmp_path / "model", root, tmp_path))
        await start_serving(cluster, "many")
        attempts = [
            asyncio.ensure_future(
                run_on_worker(cluster, _spec(cluster, train, number), config.episodes.deadline_s)
            )
            for number in range(EPISODES)
        ]
        most = 0
        while not all(attempt.done() for attempt in attempts):
            metrics = await asyncio.gather(
                *(call(r.metrics.remote(), 60.0, "metrics") for r in cluster.replicas)
            )
            most = max(most, int(sum(m["num_requests_running"] for m in metrics)))
            await asyncio.sleep(0.5)
        return [attempt.result() for attempt in attempts], most
    finally:
        await cluster.stop()


def _spec(cluster: Cluster, train, number: int) -> AttemptSpec:
    return AttemptSpec(
        attempt_id=f"a{number}",
        group_id=f"g{number // 8}",
        task=train[(number // 8) % len(train)],
        version=0,
        served_model="base",
        replica=number % 2,
        base_url=cluster.base_urls[number % 2],
        seed=attempt_seed(0, f"a{number}"),
    )
