"""The proof that an engine applies an adapter."""

from __future__ import annotations

from actors.replica import applied
from rl.records import Probe

NOISE = 1e-4


def probe(change: float) -> Probe:
    base = [-1.0, -2.0, -3.0]
    return Probe(
        token_ids=[1, 2, 3, 4], logprobs=[value + change for value in base], base_logprobs=base
    )


def engine(change: float, rounding: float = 3e-5) -> tuple[list[float], list[float]]:
    """An engine's logprobs with and without the adapter, off the trainer's by `rounding`."""
    base = [value + rounding for value in (-1.0, -2.0, -3.0)]
    return [value + change for value in base], base


def test_an_adapter_that_changes_what_the_trainers_does_is_applied() -> None:
    assert applied(*engine(0.01), probe(0.01), NOISE)


def test_an_adapter_without_effect_is_not_applied_where_the_trainers_has_one() -> None:
    assert not applied(*engine(0.0), probe(0.01), NOISE)
    assert not applied(*engine(1e-7), probe(2e-4), NOISE)


def test_an_update_smaller_than_rounding_is_never_taken_for_a_missing_adapter() -> None:
    for change in (0.0, 1e-9, 2e-6, 5e-5):
        assert applied(*engine(change / 3), probe(change), NOISE)
