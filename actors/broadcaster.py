"""The weight broadcaster: the one authority on policy versions.

Invariants (kept by `rl.schedule.ledger.VersionLedger`):
- A version is current only once every live replica has loaded and proven it.
- A replica that fails or exceeds the deadline leaves rotation; it never stalls
  the others, and it returns only after proving the current version.
- Requests in flight are never paused by a publication.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from actors.calls import call
from rl.config import CampaignConfig
from rl.errors import EngineError, InfrastructureError
from rl.records import AdapterBytes, Publication
from rl.schedule.ledger import VersionLedger

# A load may wait behind another on the replica, and its probe behind a batch.
LOAD_DEADLINE_FACTOR = 3.0


class WeightBroadcaster:
    """Publishes and retires versions on all replicas.

    Args:
        config: the campaign's configuration.
        replicas: handles of the Replica actors, by index.
    """

    def __init__(self, config: CampaignConfig, replicas: list[Any]) -> None:
        self._replicas = replicas
        self._ledger = VersionLedger(len(replicas))
        self._adapter: AdapterBytes | None = None
        self._deadline_s = config.engine.control_timeout_s * LOAD_DEADLINE_FACTOR
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"WeightBroadcaster current {self._ledger.current} live {self._ledger.live}"

    async def publish(self, adapter: AdapterBytes) -> Publication:
        """Make `adapter.version` current on every live replica.

        A publication without replicas made nothing current: none is live, or none
        could load and prove it; the same version may be published again.
        """
        async with self._lock:
            start = time.monotonic()
            targets = self._ledger.begin(adapter.version)
            results = await asyncio.gather(*(self._load(i, adapter) for i in targets))
            parts: dict[int, dict[str, float]] = {}
            failed: dict[int, str] = {}
            for index, result in zip(targets, results, strict=True):
                if isinstance(result, str):
                    self._ledger.failed(index)
                    failed[index] = result
                else:
                    self._ledger.proven(adapter.version, index)
                    parts[index] = result
            if self._ledger.serving(adapter.version):
                self._ledger.commit()
                self._adapter = adapter
            return Publication(
                version=adapter.version,
                replicas=list(self._ledger.serving(adapter.version)),
                failed=failed,
                seconds=time.monotonic() - start,
                parts=parts,
            )

    async def lost(self, replica: int) -> None:
        """Take a dead replica out of rotation."""
        self._ledger.failed(replica)

    async def rejoin(self, replica: int) -> int:
        """Load and prove the current version on a restarted replica; returns it.

        Raises:
            EngineError: it could not.
        """
        async with self._lock:
            if self._adapter is None:
                raise EngineError("no version has been published yet", f"replica {replica}")
            result = await self._load(replica, self._adapter)
            if isinstance(result, str):
                raise EngineError(result, f"replica {replica}")
            self._ledger.proven(self._adapter.version, replica)
            return self._adapter.version

    async def retire(self, version: int) -> dict[int, str]:
        """Unload a version that no lease holds; returns the replicas that failed, and why."""
        async with self._lock:
            failed: dict[int, str] = {}
            for index in self._ledger.retire(version):
                try:
                    await self._call(index, "unload", version)
                except InfrastructureError as error:
                    self._ledger.failed(index)
                    failed[index] = str(error)
            return failed

    async def _load(self, index: int, adapter: AdapterBytes) -> dict[str, float] | str:
        """Load and prove on one replica: its timings, or why it failed."""
        try:
            return await self._call(index, "load", adapter)
        except InfrastructureError as error:
            return str(error)

    async def _call(self, index: int, method: str, argument: Any) -> Any:
        handle = getattr(self._replicas[index], method)
        return await call(handle.remote(argument), self._deadline_s, f"replica {index} {method}")
