"""What is computed from records; the formulas themselves: test_stats_reference.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction

import pytest

from rl.errors import EvidenceError
from rl.evidence import stats
from rl.records import EpisodeRecord
from tests.unit.rl.evidence.synthetic import episode, masked, task


def test_wilson_at_its_edges_is_exact() -> None:
    assert stats.wilson(0, 0) == stats.Interval(low=0.0, high=1.0)
    assert (stats.wilson(0, 13).low, stats.wilson(13, 13).high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        stats.wilson(3, 2)


def test_zero_differences_do_not_change_the_p_value() -> None:
    values = [Fraction(1, 2), Fraction(1, 4), Fraction(-1, 8)]
    assert stats.sign_flip_p(values) == stats.sign_flip_p([Fraction(0), *values, Fraction(0)])
    assert stats.sign_flip_p([Fraction(0)] * 30) == (1.0, True)


def test_all_positive_differences_give_the_smallest_p() -> None:
    assert stats.sign_flip_p([Fraction(1, 2)] * 6)[0] == 2 / 2**6


def test_bootstrap_is_deterministic_by_seed() -> None:
    values = [0.5, -0.25, 0.125, 0.0, 1.0]
    assert stats.bootstrap_mean(values, 3) == stats.bootstrap_mean(values, 3)
    cells = [(1, 4), (3, 4), (2, 3)]
    assert stats.bootstrap_rate(cells, 3) == stats.bootstrap_rate(cells, 3)
    with pytest.raises(ValueError, match="no values"):
        stats.bootstrap_mean([])
    with pytest.raises(ValueError, match="without attempts"):
        stats.bootstrap_rate([(0, 0)])


def heldout(
    cells: dict[str, list[tuple[int, int]]], arms: tuple[str, str] = ("base", "step2")
) -> Iterator[EpisodeRecord]:
    for index, pairs in enumerate(cells.values()):
        for arm, version, (wins, count) in zip(arms, (0, 2), pairs, strict=True):
            for n in range(count):
                reward = float(n < wins)
                name = f"{arm}-{index}-{n}"
                yield episode(name, "g", task("h", index), version, arm=arm, reward=reward)


def test_arms_are_compared_task_by_task() -> None:
    records = [*heldout({"a": [(1, 4), (3, 4)], "b": [(2, 4), (2, 4)], "c": [(4, 4), (3, 4)]})]
    records.append(masked("m", "g", task("h", 0), 2, arm="step2"))
    result = stats.compare_arms(records, "base", "step2")
    assert (result.base.solved, result.base.attempts) == (7, 12)
    assert (result.final.solved, result.final.attempts, result.final.masked) == (8, 12, 1)
    assert {t.task_name[:5]: t.difference for t in result.tasks} == {
        "mkdir": 0.5,
        "touch": 0.0,
        "remov": -0.25,
    }
    assert result.difference == pytest.approx(0.25 / 3)
    assert result.p_value == 1.0 and result.exact and not result.significant
    assert result.base.pass_at_k[1] == pytest.approx(7 / 12)
    assert list(result.final.pass_at_k) == [1, 2, 3, 4]


def test_differences_that_tie_but_for_rounding_tie() -> None:
    assert 4 / 5 - 3 / 5 > 1 / 5
    cells = {"a": [(3, 5), (4, 5)], "b": [(1, 5), (0, 5)], "c": [(0, 2), (1, 2)]}
    result = stats.compare_arms(heldout(cells), "base", "step2")
    assert (result.p_value, result.exact) == (6 / 8, True)


def test_a_pass_rate_has_an_interval_over_tasks() -> None:
    even = heldout({str(n): [(2, 4), (2, 4)] for n in range(6)})
    split = heldout({str(n): [(4 * (n % 2), 4), (2, 4)] for n in range(6)})
    same = stats.summarize_arm(even, "base")
    assert same.task_interval == stats.Interval(low=0.5, high=0.5)
    clustered = stats.summarize_arm(split, "base")
    assert clustered.interval == same.interval
    assert clustered.task_interval is not None
    assert clustered.task_interval.low < clustered.interval.low
    assert clustered.task_interval.high > clustered.interval.high


def test_a_summary_written_without_the_interval_over_tasks_is_read() -> None:
    summary = stats.summarize_arm(heldout({"a": [(1, 2), (1, 2)]}), "base")
    fields = json.loads(summary.model_dump_json())
    del fields["task_interval"]
    assert stats.ArmSummary.model_validate(fields).task_interval is None


def test_rates_of_tasks_are_by_name_and_count_every_outcome() -> None:
    records = [*heldout({"a": [(1, 4), (0, 4)], "b": [(2, 2), (0, 4)]})]
    lost = task("h", 2)
    records += [
        masked(f"m{n}", "g", of, 0, arm="base") for n, of in enumerate((lost, task("h", 0)))
    ]
    records.append(
        episode(
            "c", "g", task("h", 1), 0,
            arm="base", outcome="cancelled", reward=None, stop_reason="cancelled",
        )
    )  # fmt: skip
    rates = stats.task_rates(records, "base")
    assert [(r.task_name, r.attempts, r.solved, r.rate, r.masked, r.cancelled) for r in rates] == [
        ("mkdir-h-00", 4, 1, 0.25, 1, 0),
        ("remove-h-02", 0, 0, None, 1, 0),
        ("touch-h-01", 2, 2, 1.0, 0, 1),
    ]
    assert rates[0].task_digest == task("h", 0).digest
    assert rates[0].interval == stats.wilson(1, 4)
    assert rates[1].interval == stats.Interval(low=0.0, high=1.0)
    assert stats.task_rates(records, "step9") == []


def test_rates_of_a_task_with_two_contents_are_refused() -> None:
    records = [*heldout({"a": [(1, 2), (1, 2)]})]
    records.append(records[0].model_copy(update={"task_digest": "0" * 64}))
    with pytest.raises(EvidenceError, match="several digests"):
        stats.task_rates(records, "base")


def test_a_missing_arm_and_mixed_versions_are_refused() -> None:
    records = [*heldout({"a": [(1, 2), (1, 2)]})]
    with pytest.raises(EvidenceError, match="arm 'step9' has no graded attempt"):
        stats.compare_arms(records, "base", "step9")
    records.append(episode("x", "g", task("h", 0), 5, arm="base"))
    with pytest.raises(EvidenceError, match="mixes policy versions"):
        stats.compare_arms(records, "base", "step2")
    with pytest.raises(EvidenceError, match="mixes policy versions"):
        stats.task_rates(records, "base")
