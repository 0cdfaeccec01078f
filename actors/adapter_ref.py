"""An adapter in Ray's object store: what travels between actors instead of its bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rl.errors import InfrastructureError
from rl.records import AdapterBytes


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Names an adapter; whoever needs its files fetches them from the object store.

    Attributes:
        version: policy version of the adapter.
        sha256: over its files.
        ref: Ray's reference to the `AdapterBytes`; the object lives as long as this.
        put_s: time that it took to put it into the store, s.
    """

    version: int
    sha256: str
    ref: Any
    put_s: float

    @classmethod
    def put(cls, adapter: AdapterBytes) -> AdapterRef:
        """Put `adapter` into the object store of this process's node."""
        import ray

        began = time.monotonic()
        ref = ray.put(adapter)
        return cls(adapter.version, adapter.sha256, ref, time.monotonic() - began)

    async def fetch(self) -> AdapterBytes:
        """The adapter, brought to this node if it is not here yet.

        Raises:
            InfrastructureError: its owner or every copy of it is gone.
        """
        from ray.exceptions import RayError

        try:
            adapter: AdapterBytes = await self.ref
        except RayError as error:
            raise InfrastructureError(
                f"the adapter of version {self.version} is lost: {type(error).__name__}",
                "object store",
            ) from error
        return adapter
