"""The version ledger: which replica serves which policy version, proven.

A pure state machine.

Invariants:
- Versions are begun in order, one at a time; `current` never goes back.
- A version becomes current only when every live replica has proven it and at
  least one is live.
- A replica that failed, or has just restarted, serves nothing until it has
  proven the current version again.
- Only a version behind the current one can be retired, and only once.
"""

from __future__ import annotations

from rl.errors import StalenessViolation


class VersionLedger:
    """See the module's invariants.

    Args:
        replicas: number of replicas; all start live and empty.
    """

    def __init__(self, replicas: int) -> None:
        self._proven: dict[int, set[int]] = {index: set() for index in range(replicas)}
        self._live = set(range(replicas))
        self._begun: int | None = None
        self._current: int | None = None
        self._retired: set[int] = set()

    @property
    def current(self) -> int | None:
        """The version that new groups are dispatched under."""
        return self._current

    @property
    def live(self) -> tuple[int, ...]:
        """Replicas in rotation."""
        return tuple(sorted(self._live))

    def serving(self, version: int) -> tuple[int, ...]:
        """Live replicas that have proven `version`."""
        return tuple(sorted(i for i in self._live if version in self._proven[i]))

    def begin(self, version: int) -> tuple[int, ...]:
        """Start publishing; returns the replicas that must load it.

        A version that no replica could load may be begun again.
        """
        unfinished = self._begun if self._begun != self._current else None
        if unfinished is not None and version != unfinished:
            raise StalenessViolation(f"version {unfinished} is still being published", "ledger")
        if self._current is not None and version <= self._current:
            raise StalenessViolation(f"version {version} was already published", "ledger")
        self._begun = version
        return self.live

    def proven(self, version: int, replica: int) -> None:
        """The replica has loaded `version` and its probe matched the trainer's."""
        if version not in (self._begun, self._current):
            raise StalenessViolation(f"version {version} is not being published", "ledger")
        self._proven[replica].add(version)
        if version == self._current:
            self._live.add(replica)

    def failed(self, replica: int) -> None:
        """The replica died, hung, or failed a load or a probe."""
        self._live.discard(replica)
        self._proven[replica].clear()

    def commit(self) -> int:
        """Make the begun version current.

        Raises:
            StalenessViolation: a live replica has not proven it, or none is live.
        """
        version = self._begun
        lagging = [i for i in self._live if version not in self._proven[i]]
        if version is None or lagging or not self._live:
            raise StalenessViolation(
                f"version {version} can't become current: live {self.live}, unproven {lagging}",
                "ledger",
            )
        self._current = version
        return version

    def retire(self, version: int) -> tuple[int, ...]:
        """Give up a version; returns the replicas that must unload it."""
        if self._current is None or version >= self._current:
            raise StalenessViolation(f"version {version} is current or newer", "ledger")
        if version in self._retired:
            raise StalenessViolation(f"version {version} was already retired", "ledger")
        self._retired.add(version)
        holders = self.serving(version)
        for replica in holders:
            self._proven[replica].discard(version)
        return holders
