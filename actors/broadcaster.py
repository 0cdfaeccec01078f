"""The weight broadcaster: the one authority on policy versions.

Invariants (kept by `rl.schedule.ledger.VersionLedger`):
- A version is current only once every live replica has loaded and proven it.
- A replica that fails or exceeds the deadline leaves rotation; it never stalls
  the others, and it returns only after proving the current version.
- A proof counts for the generation of the replica in which it was begun.
- Requests in flight are never paused by a publication.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from actors.adapter_ref import AdapterRef
from actors.calls import call
from rl.errors import EngineError, InfrastructureError
from rl.records import Publication, ReplicaFailure
from rl.schedule.ledger import VersionLedger
from rl.serving_config import ServingConfig


class WeightBroadcaster:
    """Publishes and retires versions on all replicas.

    Args:
        config: the campaign's configuration.
        replicas: handles of the Replica actors, by index.
    """

    def __init__(self, config: ServingConfig, replicas: list[Any]) -> None:
        self._replicas = replicas
        self._ledger = VersionLedger(len(replicas))
        self._adapter: AdapterRef | None = None
        self._deadline_s = config.engine.publish_timeout_s
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"WeightBroadcaster current {self._ledger.current} live {self._ledger.live}"

    async def publish(self, adapter: AdapterRef) -> Publication:
        """Make `adapter.version` current on every live replica.

        A publication without replicas made nothing current: none is live, or none
        could load and prove it; the same version may be published again.  One that
        is current already is not loaded twice.
        """
        async with self._lock:
            start = time.monotonic()
            version = adapter.version
            current = self._ledger.current
            fresh = current is None or version > current
            targets = self._ledger.begin(version) if fresh else {}
            results = await asyncio.gather(*(self._load(index, adapter) for index in targets))
            parts: dict[int, dict[str, float]] = {}
            failed: dict[int, ReplicaFailure] = {}
            for (index, generation), result in zip(targets.items(), results, strict=True):
                if isinstance(result, str):
                    self._ledger.failed(index)
                    failed[index] = ReplicaFailure(generation=generation, why=result)
                elif self._ledger.proven(version, index, generation):
                    parts[index] = result
            if fresh and self._ledger.serving(version):
                self._ledger.commit()
                self._adapter = adapter
            return Publication(
                version=version,
                replicas=self._ledger.serving(version),
                failed=failed,
                seconds=time.monotonic() - start,
                parts=parts,
            )

    async def lost(self, replica: int, generation: int) -> None:
        """Take a dead replica out of rotation; it is in this generation from now on."""
        self._ledger.lost(replica, generation)

    async def rejoin(self, replica: int) -> tuple[int | None, int]:
        """Load and prove the current version on a restarted replica.

        Returns:
            The version, None if there is none yet, and the replica's generation.

        Raises:
            EngineError: it could not.
        """
        async with self._lock:
            generation = self._ledger.generation(replica)
            if self._adapter is None:
                if not self._ledger.restarted(replica, generation):
                    raise EngineError("it was lost again", f"replica {replica}")
                return None, generation
            result = await self._load(replica, self._adapter)
            if isinstance(result, str):
                raise EngineError(result, f"replica {replica}")
            if not self._ledger.proven(self._adapter.version, replica, generation):
                raise EngineError("it was lost again", f"replica {replica}")
            return self._adapter.version, generation

    async def retire(self, version: int) -> dict[int, ReplicaFailure]:
        """Unload a version that no lease holds; returns the replicas that failed."""
        async with self._lock:
            failed: dict[int, ReplicaFailure] = {}
            for index in self._ledger.retire(version):
                try:
                    await self._call(index, "unload", version)
                except InfrastructureError as error:
                    generation = self._ledger.generation(index)
                    self._ledger.failed(index)
                    failed[index] = ReplicaFailure(generation=generation, why=str(error))
            return failed

    async def _load(self, index: int, adapter: AdapterRef) -> dict[str, float] | str:
        """Load and prove on one replica: its timings, or why it failed."""
        try:
            return await self._call(index, "receive", adapter)
        except InfrastructureError as error:
            return str(error)

    async def _call(self, index: int, method: str, argument: Any) -> Any:
        handle = getattr(self._replicas[index], method)
        return await call(handle.remote(argument), self._deadline_s, f"replica {index} {method}")
