"""The weight broadcaster over small replicas that can be told to fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.adapter_ref import AdapterRef
from actors.broadcaster import WeightBroadcaster
from rl.errors import EngineError
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
        self.hold: asyncio.Event | None = None
        self.receive = Method(self._receive)
        self.unload = Method(self._unload)

    async def _receive(self, adapter: AdapterRef) -> dict[str, float]:
        if self.hold is not None:
            await self.hold.wait()
        if self.broken:
            raise EngineError("broken")
        self.loaded.append(adapter.version)
        return {"total": 0.0}

    async def _unload(self, version: int) -> None:
        if self.broken:
            raise EngineError("broken")
        self.loaded.remove(version)


def adapter(version: int) -> AdapterRef:
    return AdapterRef(version, sha256="", ref=None, put_s=0.0)


def make(**engine: Any) -> tuple[WeightBroadcaster, list[FakeReplica]]:
    replicas = [FakeReplica(), FakeReplica()]
    config = engine_campaign("scripted")
    config = config.model_copy(update={"engine": config.engine.model_copy(update=engine)})
    return WeightBroadcaster(config, replicas), replicas


def test_a_version_is_published_to_all_and_an_old_one_retired() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        assert (await broadcaster.publish(adapter(0))).replicas == {0: 0, 1: 0}
        assert (await broadcaster.publish(adapter(1))).replicas == {0: 0, 1: 0}
        assert await broadcaster.retire(0) == {}
        assert [replica.loaded for replica in replicas] == [[1], [1]]

    asyncio.run(run())


def test_a_replica_that_fails_a_load_leaves_rotation_and_returns_by_proving() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        replicas[1].broken = True
        publication = await broadcaster.publish(adapter(1))
        assert publication.replicas == {0: 0}
        assert "broken" in publication.failed[1].why
        replicas[1].broken = False
        assert await broadcaster.rejoin(1) == (1, 0)
        assert (await broadcaster.publish(adapter(2))).replicas == {0: 0, 1: 0}

    asyncio.run(run())


def test_a_version_that_no_replica_could_load_is_not_current_and_can_be_tried_again() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        for replica in replicas:
            replica.broken = True
        assert (await broadcaster.publish(adapter(1))).replicas == {}
        for index, replica in enumerate(replicas):
            replica.broken = False
            assert await broadcaster.rejoin(index) == (0, 0)
        assert (await broadcaster.publish(adapter(1))).replicas == {0: 0, 1: 0}

    asyncio.run(run())


def test_a_failed_unload_is_reported_so_that_the_replica_is_restarted() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        await broadcaster.publish(adapter(1))
        replicas[1].broken = True
        failed = await broadcaster.retire(0)
        assert list(failed) == [1]
        assert "broken" in failed[1].why

    asyncio.run(run())


def test_a_hung_replica_leaves_rotation_at_the_deadline_and_stalls_nobody() -> None:
    async def run() -> None:
        broadcaster, replicas = make(publish_timeout_s=0.05)
        await broadcaster.publish(adapter(0))
        replicas[1].hold = asyncio.Event()
        publication = await broadcaster.publish(adapter(1))
        assert publication.replicas == {0: 0}
        assert "no answer" in publication.failed[1].why

    asyncio.run(run())


def test_a_proof_from_before_a_replica_was_lost_counts_for_nothing() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        replicas[1].hold = asyncio.Event()
        publishing = asyncio.create_task(broadcaster.publish(adapter(1)))
        await asyncio.sleep(0)
        await broadcaster.lost(1, 1)
        replicas[1].hold.set()
        assert (await publishing).replicas == {0: 0}
        assert await broadcaster.rejoin(1) == (1, 1)
        assert (await broadcaster.publish(adapter(2))).replicas == {0: 0, 1: 1}

    asyncio.run(run())


def test_a_replica_lost_during_its_rejoin_is_not_back() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        await broadcaster.lost(1, 1)
        replicas[1].hold = asyncio.Event()
        rejoining = asyncio.create_task(broadcaster.rejoin(1))
        await asyncio.sleep(0)
        await broadcaster.lost(1, 2)
        replicas[1].hold.set()
        with pytest.raises(EngineError, match="lost again"):
            await rejoining

    asyncio.run(run())


def test_a_version_that_is_current_is_not_loaded_twice() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        await broadcaster.publish(adapter(0))
        assert (await broadcaster.publish(adapter(0))).replicas == {0: 0, 1: 0}
        assert [replica.loaded for replica in replicas] == [[0], [0]]

    asyncio.run(run())


def test_replicas_that_all_failed_the_first_version_are_published_to_again() -> None:
    async def run() -> None:
        broadcaster, replicas = make()
        for replica in replicas:
            replica.broken = True
        assert set((await broadcaster.publish(adapter(0))).failed) == {0, 1}
        for index, replica in enumerate(replicas):
            replica.broken = False
            await broadcaster.lost(index, 1)
            assert await broadcaster.rejoin(index) == (None, 1)
        assert (await broadcaster.publish(adapter(0))).replicas == {0: 1, 1: 1}

    asyncio.run(run())
