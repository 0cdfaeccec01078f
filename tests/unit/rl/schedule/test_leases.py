"""Leases on versions."""

from __future__ import annotations

import pytest

from rl.errors import StalenessViolation
from rl.schedule.leases import LeaseTable


def offering(*versions: int) -> LeaseTable:
    leases = LeaseTable()
    for version in versions:
        leases.offer(version)
    return leases


def test_the_current_version_is_never_retired() -> None:
    leases = offering(0)
    assert leases.retire() == []
    assert leases.offered == (0,)


def test_an_older_version_is_retired_once_when_its_last_lease_ends() -> None:
    leases = offering(0)
    leases.acquire(0, "a")
    leases.acquire(0, "b")
    leases.offer(1)
    leases.release(0, "a")
    assert leases.retire() == []
    leases.release(0, "b")
    assert leases.retire() == [0]
    assert leases.retire() == []
    assert leases.offered == (1,)


def test_versions_that_nobody_holds_are_retired_together() -> None:
    leases = offering(0, 2, 5)
    assert leases.retire() == [0, 2]


def test_a_version_that_is_not_served_can_not_be_held() -> None:
    leases = offering(0, 1)
    leases.retire()
    with pytest.raises(StalenessViolation, match="version 0 is not served"):
        leases.acquire(0, "late")
    with pytest.raises(StalenessViolation, match="version 2 is not served"):
        leases.acquire(2, "early")


def test_a_lease_is_given_back_once() -> None:
    leases = offering(0)
    leases.acquire(0, "a")
    leases.release(0, "a")
    with pytest.raises(StalenessViolation, match="no lease on version 0"):
        leases.release(0, "a")


@pytest.mark.parametrize("version", [2, 3])
def test_versions_are_offered_in_order(version: int) -> None:
    with pytest.raises(StalenessViolation, match=f"version {version} after 3"):
        offering(0, 3).offer(version)
