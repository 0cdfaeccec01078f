"""The weight broadcaster over small replicas that can be told to fail."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.broadcaster import WeightBroadcaster
from rl.errors import EngineError
from rl.records import AdapterBytes, Probe
from tests.support.engine_config import engine_campaign


class Method:
    """An actor's method: `.remote()` gives something to await."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class FakeReplica:
    """Loads and unloads, unless it is told to fail."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.broken = False
        self.load = Method(self._load)
        self.unload = Method(self._unload)

    async def _load(self, adapter: AdapterBytes) -> dict[str, float]:
        if self.broken:
            raise EngineError("broken")
        self.loaded.append(adapter.version)
        return {"total": 0.0}

    async def _unload(self, version: int) -> None:
        if self.broken:
            raise EngineError("broken")
        self.loaded.remove(version)


def adapter(version: int) -> AdapterBytes:
    return AdapterBytes(
        version=version, files={}, sha256="", probe=Probe(token_ids=[1, 2], logprobs=[-1.0])
    )


def make() -> tuple[WeightBroadcaster, list[FakeReplica]]:
    replicas = [FakeReplica(), FakeReplica()]
    return WeightBroadcaster(engine_campaign("scripted"), replicas), replicas


def test_a_version_is_published_to_all_and_an_old_one_retired() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        assert (await broadcaster.publish(adapter(0))).replicas == [0, 1]
        assert (await broadcaster.publish(adapter(1))).replicas == [0, 1]
        assert await broadcaster.retire(0) == {}
        assert [replica.loaded for replica in replicas] == [[1], [1]]

    asyncio.run(run())


def test_a_replica_that_fails_a_load_leaves_rotation_and_returns_by_proving() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        replicas[1].broken = True
        publication = await broadcaster.publish(adapter(1))
        assert publication.replicas == [0]
        assert "broken" in publication.failed[1]
        replicas[1].broken = False
        assert await broadcaster.rejoin(1) == 1
        assert (await broadcaster.publish(adapter(2))).replicas == [0, 1]

    asyncio.run(run())


def test_a_version_that_no_replica_could_load_is_not_current_and_can_be_tried_again() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        for replica in replicas:
            replica.broken = True
        assert (await broadcaster.publish(adapter(1))).replicas == []
        for index, replica in enumerate(replicas):
            replica.broken = False
            assert await broadcaster.rejoin(index) == 0
        assert (await broadcaster.publish(adapter(1))).replicas == [0, 1]

    asyncio.run(run())


def test_a_failed_unload_is_reported_so_that_the_replica_is_restarted() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        await broadcaster.publish(adapter(1))
        replicas[1].broken = True
        failed = await broadcaster.retire(0)
        assert list(failed) == [1]
        assert "broken" in failed[1]

    asyncio.run(run())
