"""The version ledger: which replica serves which policy version, proven.

A pure state machine.

Invariants:
- Versions are begun in order, one at a time; `current` never goes back.
- A version becomes current only when every live replica has proven it and at
  least one is live.
- A replica that failed, or has just restarted, serves nothing until it has
  proven the current version again; before there is one, it waits for the first.
- A proof holds for the generation of the replica in which it was begun: one
  that comes in after the replica was lost counts for nothing.
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
        self._generation = dict.fromkeys(range(replicas), 0)
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

    def generation(self, replica: int) -> int:
        """The replica's generation, to be given back with its proof."""
        return self._generation[replica]

    def serving(self, version: int) -> dict[int, int]:
        """Live replicas that have proven `version`, with their generations."""
        return {
            index: self._generation[index]
            for index in sorted(self._live)
            if version in self._proven[index]
        }

    def begin(self, version: int) -> dict[int, int]:
        """Start publishing; returns the replicas that must load it, with generations.

        A version that no replica could load may be begun again, or give way to a
        newer one: its proofs are refused from then on.
        """
        if self._begun is not None and version < self._begun:
            raise StalenessViolation(f"version {version} after version {self._begun}", "ledger")
        if self._current is not None and version <= self._current:
            raise StalenessViolation(f"version {version} was already published", "ledger")
        self._begun = version
        return {index: self._generation[index] for index in sorted(self._live)}

    def proven(self, version: int, replica: int, generation: int) -> bool:
        """The replica has loaded `version` and its probe matched the trainer's.

        Returns False, and changes nothing, if the replica was lost since.
        """
        if version not in (self._begun, self._current):
            raise StalenessViolation(f"version {version} is not being published", "ledger")
        if generation != self._generation[replica]:
            return False
        self._proven[replica].add(version)
        if version == self._current:
            self._live.add(replica)
        return True

    def lost(self, replica: int, generation: int) -> None:
        """The replica is in this generation now, and must prove itself again."""
        if generation > self._generation[replica]:
            self._generation[replica] = generation
            self.failed(replica)

    def restarted(self, replica: int, generation: int) -> bool:
        """The replica is back, empty, before any version was current: publish to it too.

        Returns False, and changes nothing, if it was lost again or a version is
        current, which it must prove first.
        """
        if self._current is not None or generation != self._generation[replica]:
            return False
        self._live.add(replica)
        return True

    def failed(self, replica: int) -> None:
        """The replica failed a load or a probe: it serves nothing until it is restarted."""
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
        holders = tuple(self.serving(version))
        for replica in holders:
            self._proven[replica].discard(version)
        return holders
