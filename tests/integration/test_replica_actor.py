"""A `Replica` as a Ray actor: whatever ends the actor ends its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.engine_command import REPOSITORY
from actors.engine_guard import process_start
from actors.ray_connection import start_here
from actors.replica import Replica
from rl.errors import EngineError
from rl.learner.stand_in import make_tiny_tokenizer
from tests.support.engine_config import engine_campaign

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GONE_S = 30.0
CALL_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        start_here("replica-actor", dashboard=False)  # as a campaign does
        yield
        ray.shutdown()


def started(tmp_path: Path) -> tuple[Any, list[int]]:
    model_dir = make_tiny_tokenizer(tmp_path / "model", ["mkdir alpha"])
    actor: Any = ray.remote(max_restarts=0)(Replica)
    replica = actor.remote(0, engine_campaign(), model_dir, tmp_path / "run")
    ray.get(replica.start.remote(), timeout=CALL_S)
    tree: list[int] = ray.get(replica.processes.remote(), timeout=CALL_S)
    assert len(tree) == 3
    return replica, tree


def assert_gone(tree: list[int]) -> None:
    limit = time.monotonic() + GONE_S
    while left := [pid for pid in tree if process_start(pid) is not None]:
        assert time.monotonic() < limit, f"{left} outlived the actor"
        time.sleep(0.05)


def kill(replica: Any) -> None:
    ray.kill(replica)


def terminate(replica: Any) -> None:
    replica.__ray_terminate__.remote()


def stop(replica: Any) -> None:
    ray.get(replica.stop.remote(), timeout=CALL_S)


@pytest.mark.parametrize("end", [kill, terminate, stop])
def test_end_of_the_actor_ends_the_engine(
    cluster: None, tmp_path: Path, end: Callable[[Any], None]
) -> None:
    replica, tree = started(tmp_path)
    end(replica)
    assert_gone(tree)


def test_actor_out_of_scope_ends_the_engine(cluster: None, tmp_path: Path) -> None:
    replica, tree = started(tmp_path)
    del replica
    assert_gone(tree)


def test_errors_keep_their_type_across_the_boundary(cluster: None, tmp_path: Path) -> None:
    replica, _ = started(tmp_path)
    with pytest.raises(EngineError, match="not served"):
        ray.get(replica.unload.remote(3), timeout=CALL_S)
    ray.kill(replica)
