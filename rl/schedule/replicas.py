"""The replicas as the scheduler sees them: what each serves, and how loaded it is.

Invariants:
- An attempt is placed only on a replica that serves its version and is not
  suspended, and on a least loaded one of those (lowest index first).
- A replica's generation rises whenever it is lost.  What was proven of an
  earlier generation says nothing about this one and is ignored, however late
  the news of it comes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Replica:
    versions: set[int] = field(default_factory=set[int])
    suspended: bool = False
    load: int = 0
    generation: int = 0


class ReplicaPool:
    """See the module's invariants; every operation is O(log replicas)."""

    def __init__(self, count: int) -> None:
        self._replicas = [_Replica() for _ in range(count)]
        # By version: (load, index) of replicas that serve it.  Entries are never
        # removed from the middle: one that is out of date is skipped when met.
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._serving: dict[int, int] = {}  # by version: replicas that serve it

    def generation(self, index: int) -> int:
        """How often the replica has been lost."""
        return self._replicas[index].generation

    def load(self, index: int) -> int:
        """Attempts that run on the replica."""
        return self._replicas[index].load

    def serves(self, version: int) -> bool:
        """Whether any replica serves `version`, suspended or not."""
        return version in self._serving

    def proven(self, index: int, version: int, generation: int) -> bool:
        """The replica has proven `version` in `generation`; False if that is past."""
        replica = self._replicas[index]
        if generation != replica.generation:
            return False
        if version not in replica.versions:
            replica.versions.add(version)
            self._serving[version] = self._serving.get(version, 0) + 1
            self._offer(index)
        return True

    def lost(self, index: int) -> int:
        """The replica left rotation and serves nothing; returns its new generation."""
        replica = self._replicas[index]
        for version in replica.versions:
            self._forget(version)
        replica.versions.clear()
        replica.suspended = False
        replica.generation += 1
        return replica.generation

    def retired(self, version: int) -> None:
        """The version is being unloaded everywhere."""
        for replica in self._replicas:
            replica.versions.discard(version)
        self._serving.pop(version, None)
        self._heaps.pop(version, None)

    def suspend(self, index: int) -> None:
        """Place nothing on the replica until it is resumed or lost."""
        self._replicas[index].suspended = True

    def resume(self, index: int) -> None:
        """The suspended replica answers."""
        self._replicas[index].suspended = False
        self._offer(index)

    def least_loaded(self, version: int) -> int | None:
        """The replica that the next attempt under `version` goes to, if any can take it."""
        heap = self._heaps.get(version)
        if heap is None:
            return None
        while heap:
            load, index = heap[0]
            replica = self._replicas[index]
            if replica.load == load and version in replica.versions and not replica.suspended:
                return index
            heapq.heappop(heap)
        return None

    def took(self, index: int) -> None:
        """An attempt was placed on the replica."""
        self._replicas[index].load += 1
        self._offer(index)

    def gave(self, index: int) -> None:
        """An attempt on the replica has ended."""
        self._replicas[index].load -= 1
        self._offer(index)

    def _offer(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.suspended:
            return
        for version in replica.versions:
            heap = self._heaps.setdefault(version, [])
            heapq.heappush(heap, (replica.load, index))
            if len(heap) > 8 * len(self._replicas) + 64:  # mostly out of date: build anew
                self._heaps[version] = self._fresh(version)

    def _fresh(self, version: int) -> list[tuple[int, int]]:
        heap = [
            (replica.load, index)
            for index, replica in enumerate(self._replicas)
            if version in replica.versions and not replica.suspended
        ]
        heapq.heapify(heap)
        return heap

    def _forget(self, version: int) -> None:
        self._serving[version] -= 1
        if not self._serving[version]:
            del self._serving[version]
