import math

import numpy as np
import pytest
from scipy import stats as reference

from rl.errors import EvidenceError
from rl.evidence import stats
from tests.unit.rl.evidence.synthetic import episode, masked, task


@pytest.mark.parametrize(
    ("wins", "trials"), [(0, 8), (1, 8), (91, 184), (83, 184), (8, 8), (3, 500)]
)
def test_wilson_equals_scipy(wins: int, trials: int) -> None:
    ours = stats.wilson(wins, trials)
    theirs = reference.binomtest(wins, trials).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_without_trials_says_nothing() -> None:
    assert stats.wilson(0, 0) == stats.Interval(low=0.0, high=1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        stats.wilson(3, 2)


@pytest.mark.parametrize(("attempts", "wins"), [(8, 0), (8, 1), (8, 3), (8, 8), (5, 2)])
def test_pass_at_k_equals_the_hypergeometric_law(attempts: int, wins: int) -> None:
    for k in range(1, attempts + 1):
        none = reference.hypergeom.pmf(0, attempts, wins, k)
        assert stats.pass_at_k(attempts, wins, k) == pytest.approx(1 - none)


@pytest.mark.parametrize("size", [3, 8, 12])
def test_exact_sign_flip_test_equals_scipy(size: int) -> None:
    values = np.random.default_rng(size).integers(-8, 9, size) / 8
    theirs = reference.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=2**size
    )
    ours, exact = stats.sign_flip_p(values.tolist())
    assert exact
    assert ours == pytest.approx(theirs.pvalue, abs=1e-12)


def test_zero_differences_do_not_change_the_p_value() -> None:
    assert stats.sign_flip_p([0.5, 0.25, -0.125]) == stats.sign_flip_p([0, 0.5, 0.25, 0, -0.125])
    assert stats.sign_flip_p([0.0] * 30) == (1.0, True)


def test_monte_carlo_is_seeded_and_near_the_exact_value() -> None:
    values = np.random.default_rng(1).normal(0.15, 0.4, 18)
    exact, _ = stats.sign_flip_p(values.tolist())
    padded = [*values.tolist(), 1e-12, 1e-12, 1e-12]  # beyond the exact limit, nothing added
    sampled, is_exact = stats.sign_flip_p(padded, seed=4)
    assert not is_exact
    assert sampled == stats.sign_flip_p(padded, seed=4)[0]
    assert sampled == pytest.approx(exact, abs=4 * math.sqrt(exact / stats.SAMPLES))


def test_all_positive_differences_give_the_smallest_p() -> None:
    assert stats.sign_flip_p([0.5] * 6)[0] == 2 / 2**6


def test_bootstrap_interval_agrees_with_scipy() -> None:
    values = np.random.default_rng(2).normal(0.2, 0.5, 23)
    theirs = reference.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(9)
    ).confidence_interval
    ours = stats.bootstrap_mean(values.tolist())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def heldout(cells: dict[str, list[tuple[int, int]]], arms: tuple[str, str] = ("base", "step2")):
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


def test_the_reference_outcome_is_no_significant_change() -> None:
    base = [4] * 22 + [3]
    final = [n - (i % 3 == 0) for i, n in enumerate(base)]
    cells = {str(i): [(b, 8), (f, 8)] for i, (b, f) in enumerate(zip(base, final, strict=True))}
    result = stats.compare_arms(heldout(cells), "base", "step2")
    assert (result.base.solved, result.final.solved) == (91, 83)
    assert result.difference == pytest.approx(-8 / 184)
    assert result.interval.low < result.difference < result.interval.high


def test_a_missing_arm_and_mixed_versions_are_refused() -> None:
    records = [*heldout({"a": [(1, 2), (1, 2)]})]
    with pytest.raises(EvidenceError, match="arm 'step9' has no graded attempt"):
        stats.compare_arms(records, "base", "step9")
    records.append(episode("x", "g", task("h", 0), 5, arm="base"))
    with pytest.raises(EvidenceError, match="mixes policy versions"):
        stats.compare_arms(records, "base", "step2")
