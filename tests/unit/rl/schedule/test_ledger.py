"""The version ledger."""

from __future__ import annotations

import pytest

from rl.errors import StalenessViolation
from rl.schedule.ledger import VersionLedger


def publish(ledger: VersionLedger, version: int) -> None:
    for replica, generation in ledger.begin(version).items():
        assert ledger.proven(version, replica, generation)
    ledger.commit()


def publishing(version: int, replicas: int = 2) -> VersionLedger:
    ledger = VersionLedger(replicas)
    publish(ledger, version)
    return ledger


def test_a_version_is_current_only_after_every_live_replica_has_proven_it() -> None:
    ledger = VersionLedger(2)
    assert ledger.begin(0) == {0: 0, 1: 0}
    ledger.proven(0, 0, 0)
    with pytest.raises(StalenessViolation, match="unproven \\[1\\]"):
        ledger.commit()
    assert ledger.current is None
    ledger.proven(0, 1, 0)
    assert ledger.commit() == 0
    assert ledger.serving(0) == {0: 0, 1: 0}


def test_nothing_that_was_not_begun_becomes_current() -> None:
    with pytest.raises(StalenessViolation, match="version None can't become current"):
        VersionLedger(1).commit()


def test_a_failed_replica_does_not_hold_the_others_up_and_serves_nothing() -> None:
    ledger = publishing(0)
    ledger.begin(1)
    ledger.proven(1, 0, 0)
    ledger.failed(1)
    assert ledger.commit() == 1
    assert ledger.serving(0) == {0: 0}
    assert ledger.live == (0,)


def test_a_replica_returns_only_by_proving_the_current_version() -> None:
    ledger = publishing(0)
    ledger.lost(1, 1)
    publish(ledger, 1)
    with pytest.raises(StalenessViolation, match="version 0 is not being published"):
        ledger.proven(0, 1, 1)
    assert ledger.proven(1, 1, 1)
    assert ledger.live == (0, 1)
    assert ledger.serving(1) == {0: 0, 1: 1}
    assert ledger.serving(0) == {0: 0}


def test_a_proof_of_a_past_generation_counts_for_nothing() -> None:
    ledger = publishing(0)
    ledger.begin(1)
    ledger.proven(1, 0, 0)
    ledger.lost(1, 1)
    assert not ledger.proven(1, 1, 0)
    ledger.commit()
    assert ledger.serving(1) == {0: 0}
    assert not ledger.proven(1, 1, 0)
    assert ledger.live == (0,)


def test_old_news_of_a_loss_takes_nobody_out_of_rotation_again() -> None:
    ledger = publishing(0)
    ledger.lost(1, 2)
    ledger.proven(0, 1, 2)
    for generation in (1, 2):
        ledger.lost(1, generation)
        assert ledger.live == (0, 1)
        assert ledger.generation(1) == 2


def test_no_version_becomes_current_without_a_live_replica() -> None:
    ledger = VersionLedger(1)
    ledger.begin(0)
    ledger.failed(0)
    with pytest.raises(StalenessViolation, match="live \\(\\)"):
        ledger.commit()


def test_versions_only_go_forward() -> None:
    ledger = publishing(3)
    with pytest.raises(StalenessViolation, match="already published"):
        ledger.begin(3)
    ledger.begin(5)
    with pytest.raises(StalenessViolation):
        ledger.begin(4)
    assert ledger.current == 3


def test_a_version_that_no_replica_could_load_may_be_begun_again() -> None:
    ledger = publishing(0, replicas=1)
    ledger.begin(1)
    ledger.failed(0)
    ledger.lost(0, 1)
    assert ledger.proven(0, 0, 1)
    publish(ledger, 1)
    assert ledger.serving(1) == {0: 1}


def test_a_version_that_no_replica_could_load_gives_way_to_a_newer_one() -> None:
    """The trainer goes on while the replicas restart."""
    ledger = publishing(0, replicas=1)
    ledger.begin(1)
    ledger.failed(0)
    ledger.lost(0, 1)
    assert ledger.proven(0, 0, 1)
    assert ledger.begin(2) == {0: 1}
    with pytest.raises(StalenessViolation, match="version 1 is not being published"):
        ledger.proven(1, 0, 1)
    assert ledger.proven(2, 0, 1)
    assert ledger.commit() == 2


def test_only_older_versions_are_retired_and_only_once() -> None:
    ledger = publishing(0)
    with pytest.raises(StalenessViolation, match="current or newer"):
        ledger.retire(0)
    publish(ledger, 1)
    assert ledger.retire(0) == (0, 1)
    with pytest.raises(StalenessViolation, match="already retired"):
        ledger.retire(0)
    assert ledger.serving(0) == {}


def test_a_version_is_unloaded_only_where_it_is_served() -> None:
    ledger = publishing(0)
    ledger.lost(1, 1)
    publish(ledger, 1)
    ledger.proven(1, 1, 1)
    assert ledger.retire(0) == (0,)
