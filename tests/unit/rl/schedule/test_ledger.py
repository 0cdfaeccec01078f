"""The version ledger."""

from __future__ import annotations

import pytest

from rl.errors import StalenessViolation
from rl.schedule.ledger import VersionLedger


def published(ledger: VersionLedger, version: int) -> None:
    for replica in ledger.begin(version):
        ledger.proven(version, replica)
    ledger.commit()


def test_a_version_is_current_only_after_every_live_replica_has_proven_it() -> None:
    ledger = VersionLedger(2)
    assert ledger.begin(0) == (0, 1)
    ledger.proven(0, 0)
    with pytest.raises(StalenessViolation, match="unproven \\[1\\]"):
        ledger.commit()
    ledger.proven(0, 1)
    assert ledger.commit() == 0
    assert ledger.serving(0) == (0, 1)


def test_a_failed_replica_does_not_hold_the_others_up_and_serves_nothing() -> None:
    ledger = VersionLedger(2)
    published(ledger, 0)
    ledger.begin(1)
    ledger.proven(1, 0)
    ledger.failed(1)
    assert ledger.commit() == 1
    assert ledger.serving(0) == (0,)
    assert ledger.live == (0,)


def test_a_replica_returns_only_by_proving_the_current_version() -> None:
    ledger = VersionLedger(2)
    published(ledger, 0)
    ledger.failed(1)
    published(ledger, 1)
    with pytest.raises(StalenessViolation):
        ledger.proven(0, 1)
    ledger.proven(1, 1)
    assert ledger.live == (0, 1)


def test_no_version_becomes_current_without_a_live_replica() -> None:
    ledger = VersionLedger(1)
    ledger.begin(0)
    ledger.failed(0)
    with pytest.raises(StalenessViolation):
        ledger.commit()


def test_versions_only_go_forward_one_at_a_time() -> None:
    ledger = VersionLedger(1)
    published(ledger, 3)
    with pytest.raises(StalenessViolation, match="already published"):
        ledger.begin(3)
    ledger.begin(4)
    with pytest.raises(StalenessViolation, match="still being published"):
        ledger.begin(5)


def test_only_older_versions_are_retired_and_only_once() -> None:
    ledger = VersionLedger(2)
    published(ledger, 0)
    with pytest.raises(StalenessViolation, match="current or newer"):
        ledger.retire(0)
    published(ledger, 1)
    assert ledger.retire(0) == (0, 1)
    with pytest.raises(StalenessViolation, match="already retired"):
        ledger.retire(0)
    assert ledger.serving(0) == ()
