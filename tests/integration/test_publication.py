"""Publications over two real engines in Ray actors, while they are at work.

The tests run in their order on one pair of engines: what one publishes, a later
one retires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import ray
from safetensors.torch import load, save

from actors.adapter_ref import AdapterRef
from actors.broadcaster import WeightBroadcaster
from actors.engine_command import REPOSITORY
from actors.ray_connection import start_here
from actors.replica import Replica
from rl.agent.client import EngineClient
from rl.errors import EngineError
from rl.learner.stand_in import make_tiny_model
from rl.records import AdapterBytes, Publication
from tests.support.engine_config import engine_campaign
from tests.support.streams import Stream, stream
from tests.support.tiny_adapter import make_adapter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CORPUS = ["Create a directory named alpha.", "```bash\nmkdir alpha\n```", "mv beta gamma"] * 5
PROMPT = [5 + (7 * position) % 250 for position in range(70)]
PROBE = [5 + (11 * position) % 250 for position in range(24)]
KEY = "key"
REPLICAS = 2
IN_FLIGHT = 32
TOKENS = 160
START_S = 240.0
CALL_S = 120.0
EXACT = 1e-3  # nats, float32
# A publication may lengthen a step, by the adapter's load; it may not wait for
# anything.  Steps without a publication vary by so much among themselves.
NOISE = 3.0


@dataclass
class Stage:
    """Two replicas, their broadcaster, and a client."""

    runner: asyncio.Runner
    replicas: list[Any]
    broadcaster: Any
    urls: list[str]
    adapters: dict[int, AdapterBytes]
    streams: list[Stream] = field(default_factory=list[Stream])

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def call(self, ref: Any, limit_s: float = CALL_S) -> Any:
        return ray.get(ref, timeout=limit_s)

    def publish(self, adapter: AdapterBytes) -> Publication:
        return self.call(self.broadcaster.publish.remote(AdapterRef.put(adapter)))

    def logprobs(self, model: str, replica: int = 0, token_ids: list[int] = PROMPT) -> list[float]:
        async def ask() -> list[float]:
            client = EngineClient(KEY)
            try:
                return await client.logprobs(self.urls[replica], model, token_ids, CALL_S)
            finally:
                await client.close()

        return self.run(ask())


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    scratch = tmp_path_factory.mktemp("publication")
    model_dir = make_tiny_model(scratch / "model", CORPUS)
    adapters = {v: make_adapter(model_dir, scratch, v, PROBE) for v in (1, 2, 3)}
    config = engine_campaign("vllm", replicas=REPLICAS, max_num_seqs=24, kv_cache_mb=256)
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        start_here("publication", dashboard=False)
        options: dict[str, Any] = {"max_restarts": 0, "num_cpus": 0, "max_concurrency": 8}
        actor: Any = ray.remote(**options)(Replica)
        replicas = [
            actor.remote(index, config, model_dir, scratch / "run", KEY)
            for index in range(REPLICAS)
        ]
        urls = ray.get([replica.start.remote() for replica in replicas], timeout=START_S)
        caster: Any = ray.remote(**options)(WeightBroadcaster)
        broadcaster = caster.remote(config, replicas)
        yield Stage(runner, replicas, broadcaster, urls, adapters)
        ray.get([replica.stop.remote() for replica in replicas], timeout=CALL_S)
        ray.shutdown()


def difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def in_flight(stage: Stage, publish: AdapterBytes) -> tuple[list[Stream], Publication, float]:
    """Sample under policy-v1, publish half-way; also the publication's begin."""

    async def run() -> tuple[list[Stream], Publication, float]:
        streams = [Stream() for _ in range(IN_FLIGHT)]
        async with aiohttp.ClientSession() as session:
            jobs = [
                asyncio.create_task(
                    stream(
                        session, stage.urls[i % REPLICAS], KEY, "policy-v1", PROMPT, TOKENS, i, into
                    )
                )
                for i, into in enumerate(streams)
            ]
            while min(len(into.times) for into in streams) < TOKENS // 3:
                assert not any(job.done() and job.exception() for job in jobs)
                await asyncio.sleep(0.01)
            began = time.monotonic()
            publication = await stage.broadcaster.publish.remote(AdapterRef.put(publish))
            assert not any(job.done() for job in jobs), "the publication met no request in flight"
            await asyncio.gather(*jobs)
        return streams, publication, began

    return stage.run(run())


def test_requests_in_flight_survive_a_publication_without_error_or_pause(stage: Stage) -> None:
    assert list(stage.publish(stage.adapters[1]).replicas) == [0, 1]
    streams, publication, began = in_flight(stage, stage.adapters[2])
    ended = began + publication.seconds
    assert list(publication.replicas) == [0, 1]
    for parts in publication.parts.values():
        assert set(parts) == {"put", "transfer", "write", "load", "probe", "total"}
    assert all(len(into.token_ids) == TOKENS for into in streams)
    during = max(into.longest_gap(began, ended) for into in streams)
    # After the first tokens, whose step holds the prompts.
    normal = max(into.longest_gap(into.times[8], began) for into in streams)
    print(f"\nlongest wait for a token: {during * 1e3:.0f} ms during the publication of")
    print(f"{publication.seconds * 1e3:.0f} ms, {normal * 1e3:.0f} ms before it")
    print("parts", publication.parts)
    assert during <= NOISE * normal
    stage.streams = streams


def test_what_was_in_flight_was_sampled_by_the_old_version_from_start_to_end(stage: Stage) -> None:
    for index in (0, 1, IN_FLIGHT - 1):
        into = stage.streams[index]
        whole = PROMPT + into.token_ids
        old, new = (
            stage.logprobs(f"policy-v{version}", index % REPLICAS, whole)[-TOKENS:]
            for version in (1, 2)
        )
        assert difference(into.logprobs, old) < EXACT
        assert difference(into.logprobs[-TOKENS // 3 :], new[-TOKENS // 3 :]) > 0.1


def test_the_new_version_answers_otherwise_and_the_old_one_still_does(stage: Stage) -> None:
    old, new = stage.logprobs("policy-v1"), stage.logprobs("policy-v2")
    assert difference(old, new) > 0.1
    assert difference(stage.logprobs("policy-v1", 1), old) < EXACT
    assert difference(stage.logprobs("policy-v2", 1), new) < EXACT


def test_a_fresh_engine_says_the_same_of_the_version_that_it_rejoins_with(stage: Stage) -> None:
    before = stage.logprobs("policy-v2", 1)
    stage.call(stage.broadcaster.lost.remote(1, 1))
    stage.urls[1] = stage.call(stage.replicas[1].restart.remote(), START_S)
    assert stage.call(stage.broadcaster.rejoin.remote(1)) == (2, 1)
    assert stage.call(stage.replicas[1].served.remote()) == ["policy-v2"]
    assert difference(stage.logprobs("policy-v2", 1), before) < EXACT


def test_a_retired_version_is_gone_and_the_current_one_stays(stage: Stage) -> None:
    expected = stage.logprobs("policy-v2")
    assert stage.call(stage.broadcaster.retire.remote(1)) == {}
    with pytest.raises(EngineError, match="HTTP 404"):
        stage.logprobs("policy-v1")
    assert difference(stage.logprobs("policy-v2"), expected) < EXACT


def test_an_adapter_with_wrong_key_prefixes_is_refused_by_the_probe(stage: Stage) -> None:
    adapter = stage.adapters[3]
    weights = load(adapter.files["adapter_model.safetensors"])
    renamed = {key.replace("model.layers", "encoder.blocks"): w for key, w in weights.items()}
    files = adapter.files | {"adapter_model.safetensors": save(renamed)}
    publication = stage.publish(adapter.model_copy(update={"files": files}))
    assert publication.replicas == {}
    assert all("from the trainer's" in failure.why for failure in publication.failed.values())
    assert set(publication.failed) == {0, 1}
