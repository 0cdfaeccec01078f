"""Leases on served policy versions.

Invariants:
- A lease is taken only on a version that is offered and not retired.
- A version is retired exactly once, when it is older than the current one and
  no lease on it is left; after that nothing can hold it again.
"""

from __future__ import annotations

from rl.errors import StalenessViolation


class LeaseTable:
    """Who holds which version; see the module's invariants."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._current: int | None = None

    @property
    def offered(self) -> tuple[int, ...]:
        """Versions that are served: the current one, and older ones under lease."""
        return tuple(sorted(self._holders))

    def offer(self, version: int) -> None:
        """`version` has become the current one."""
        if self._current is not None and version <= self._current:
            raise StalenessViolation(f"version {version} after {self._current}", "leases")
        self._current = version
        self._holders[version] = set()

    def acquire(self, version: int, holder: str) -> None:
        """Hold `version` until `release`."""
        if version not in self._holders:
            raise StalenessViolation(f"version {version} is not served", f"lease of {holder}")
        self._holders[version].add(holder)

    def release(self, version: int, holder: str) -> None:
        """Give a lease back."""
        try:
            self._holders[version].remove(holder)
        except KeyError:
            raise StalenessViolation(
                f"no lease on version {version}", f"lease of {holder}"
            ) from None

    def retire(self) -> list[int]:
        """Versions that can be unloaded now; each is returned once."""
        free = [
            version
            for version, holders in sorted(self._holders.items())
            if version != self._current and not holders
        ]
        for version in free:
            del self._holders[version]
        return free
