"""The statistics against scipy, statsmodels, published values and brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from rl.evidence import permutation
from rl.evidence.intervals import CONFIDENCE, RESAMPLES, bootstrap_mean, bootstrap_rate, wilson
from rl.evidence.permutation import sign_flip_p
from rl.evidence.stats import MAX_K, SIGNIFICANCE, pass_at_k
from tests.unit.rl.evidence import document

COUNTS = [(0, 1), (1, 1), (0, 8), (1, 8), (8, 8), (91, 184), (83, 184), (3, 500), (2999, 3000)]


@pytest.mark.parametrize(("solved", "attempts"), COUNTS)
def test_wilson_equals_scipy_and_statsmodels(solved: int, attempts: int) -> None:
    ours = wilson(solved, attempts)
    scipys = scipy_stats.binomtest(solved, attempts).proportion_ci(CONFIDENCE, method="wilson")
    theirs = proportion_confint(solved, attempts, alpha=1 - CONFIDENCE, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx(theirs, abs=1e-12)


# R. G. Newcombe, Two-sided confidence intervals for the single proportion, Statistics in
# Medicine 17 (1998) 857-872, table I, method 3 (score, no continuity correction).
@pytest.mark.parametrize(
    ("solved", "attempts", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_table(
    solved: int, attempts: int, low: float, high: float
) -> None:
    ours = wilson(solved, attempts)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(attempts=st.integers(1, 400), share=st.floats(0, 1))
def test_wilson_holds_its_rate_and_mirrors(attempts: int, share: float) -> None:
    solved = round(share * attempts)
    ours, mirrored = wilson(solved, attempts), wilson(attempts - solved, attempts)
    assert 0 <= ours.low <= solved / attempts <= ours.high <= 1
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((ours.low, ours.high))


def chen_pass_at_k(n: int, c: int, k: int) -> float:
    """The product form of Chen et al., arXiv:2107.03374, figure 3."""
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@pytest.mark.parametrize("k", range(1, MAX_K + 1))
@pytest.mark.parametrize("attempts", [8, 11, 16])
def test_pass_at_k_equals_the_published_form_and_all_subsets(attempts: int, k: int) -> None:
    for solved in range(attempts + 1):
        ours = pass_at_k(attempts, solved, k)
        assert ours == pytest.approx(chen_pass_at_k(attempts, solved, k), abs=1e-12)
        if attempts < 16:
            outcomes = [index < solved for index in range(attempts)]
            subsets = [any(chosen) for chosen in combinations(outcomes, k)]
            assert ours == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def enumerated_p(differences: Sequence[Fraction]) -> Fraction:
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return Fraction(sum(value >= observed for value in sums), len(sums))


def cells(attempts: int) -> st.SearchStrategy[Fraction]:
    """A pass rate of up to that many attempts, some of them masked."""
    return st.integers(1, attempts).flatmap(
        lambda n: st.integers(0, n).map(lambda c: Fraction(c, n))
    )


differences = st.lists(
    st.tuples(cells(8), cells(8)).map(lambda pair: pair[1] - pair[0]), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(values=differences)
def test_the_sign_flip_test_equals_enumeration(values: list[Fraction]) -> None:
    assert sign_flip_p(values) == (float(enumerated_p(values)), True)


@settings(max_examples=60, deadline=None)
@given(values=differences)
def test_patterns_give_what_the_table_gives(values: list[Fraction]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "EXACT_SUMS", 0)
        assert sign_flip_p(values) == (float(enumerated_p(values)), True)


@settings(max_examples=60, deadline=None)
@given(values=differences)
def test_the_sign_flip_test_is_symmetric(values: list[Fraction]) -> None:
    expected = sign_flip_p(values)
    assert sign_flip_p([-value for value in values]) == expected
    assert sign_flip_p([*reversed(values), Fraction(0)]) == expected
    assert sign_flip_p([7 * value for value in values]) == expected


@pytest.mark.parametrize("size", [3, 8, 13])
def test_the_sign_flip_test_equals_scipy(size: int) -> None:
    values = np.random.default_rng(size).integers(-7, 9, size)
    theirs = scipy_stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=2**size
    )
    ours, exact = sign_flip_p([Fraction(int(value), 8) for value in values])
    assert exact
    assert ours == pytest.approx(theirs.pvalue, abs=1e-12)


# R. A. Fisher, The Design of Experiments (1935), section 21: Darwin's 15 pairs of maize
# plants, differences in eighths of an inch.  In each tail 863 of the 2**15 sums are as large.
def test_the_sign_flip_test_equals_fishers_count_for_darwins_plants() -> None:
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip_p([Fraction(value) for value in darwin]) == (2 * 863 / 2**15, True)


@pytest.mark.parametrize("tasks", [23, 53, 400])
def test_many_tasks_are_exact(tasks: int) -> None:
    sizes = np.random.default_rng(tasks).integers(-8, 9, tasks)
    counts = {0: 1}
    for size in map(int, sizes):
        longer: dict[int, int] = {}
        for reached, count in counts.items():
            for after in (reached + size, reached - size):
                longer[after] = longer.get(after, 0) + count
        counts = longer
    extreme = sum(n for reached, n in counts.items() if abs(reached) >= abs(sizes.sum()))
    ours, exact = sign_flip_p([Fraction(int(size), 8) for size in sizes])
    assert exact
    expected = Fraction(extreme, 2**tasks)
    assert ours == (float(expected) if tasks <= 53 else pytest.approx(float(expected), rel=1e-12))


def test_beyond_the_bound_it_is_seeded_and_near_the_exact_value() -> None:
    values = [Fraction(int(n), 8) for n in np.random.default_rng(1).integers(-6, 9, 24)]
    expected, _ = sign_flip_p(values)
    tiny = [*values, Fraction(1, 10**12)]  # a unit that no table holds; changes nothing else
    sampled, exact = sign_flip_p(tiny, seed=4)
    assert not exact
    assert sampled == sign_flip_p(tiny, seed=4)[0] != sign_flip_p(tiny, seed=5)[0]
    assert sampled == pytest.approx(expected, abs=4 * math.sqrt(expected / permutation.SAMPLES))
    all_up = [Fraction(1, 8)] * 40 + [Fraction(1, 10**12)]
    assert sign_flip_p(all_up) == (1 / (1 + permutation.SAMPLES), False)


def test_bootstrap_of_a_mean_agrees_with_scipy() -> None:
    values = np.random.default_rng(2).integers(-8, 9, 23) / 8
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=9
    ).confidence_interval
    ours = bootstrap_mean(values.tolist())
    error = 0.03 * (theirs.high - theirs.low)  # 4 standard errors of the two ends' difference
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=error)


def test_bootstrap_of_a_rate_agrees_with_scipy() -> None:
    draws = np.random.default_rng(3)
    attempts = draws.integers(3, 9, 23)
    solved = draws.binomial(attempts, draws.uniform(0, 1, 23))

    def rate(wins: np.ndarray, tries: np.ndarray, axis: int) -> np.ndarray:
        return wins.sum(axis=axis) / tries.sum(axis=axis)

    theirs = scipy_stats.bootstrap(
        (solved, attempts), rate, paired=True, vectorized=True, n_resamples=RESAMPLES,
        method="percentile", rng=9,
    ).confidence_interval  # fmt: skip
    ours = bootstrap_rate(list(zip(solved.tolist(), attempts.tolist(), strict=True)))
    error = 0.03 * (theirs.high - theirs.low)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=error)


# --- docs/statistics.md: the worked example ------------------------------------

TASKS, ATTEMPTS = 23, 8
BASE_SOLVED, FINAL_SOLVED = 91, 83


def points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")


def test_the_documents_arms_are_computed() -> None:
    rows = []
    for arm, solved in (("base", BASE_SOLVED), ("final", FINAL_SOLVED)):
        attempts = TASKS * ATTEMPTS
        interval = wilson(solved, attempts)
        rate = f"{100 * solved / attempts:.1f}%"
        bounds = f"{100 * interval.low:.1f}% to {100 * interval.high:.1f}%"
        rows.append([arm, f"{solved}/{attempts}", rate, bounds])
    assert document.table("Worked example: the reference outcome") == rows


def test_the_documents_bounds_are_computed() -> None:
    attempts = TASKS * ATTEMPTS
    low, high = confint_proportions_2indep(
        FINAL_SOLVED, attempts, BASE_SOLVED, attempts, method="newcomb", compare="diff"
    )
    _, fisher = scipy_stats.fisher_exact([[n, attempts - n] for n in (FINAL_SOLVED, BASE_SOLVED)])
    one = Fraction(-1, ATTEMPTS)
    spread, _ = sign_flip_p([one] * 8 + [Fraction(0)] * (TASKS - 8))
    single, _ = sign_flip_p([8 * one] + [Fraction(0)] * (TASKS - 1))
    values = [value for _, value in document.table("Bounds without the counts by task")]
    assert values == [
        points((FINAL_SOLVED - BASE_SOLVED) / attempts),
        f"{points(low)} to {points(high)}",
        f"{fisher:.2f}",
        f"{spread:.4f}",
        f"{single:.4f}",
    ]


def test_the_document_names_the_bounds_of_the_code() -> None:
    for value in (f"2^{permutation.EXACT_SUMS.bit_length() - 1}", f"p < {SIGNIFICANCE}",
                  f"{permutation.SAMPLES:,} seeded", f"beyond {permutation.EXACT_TASKS} tasks",
                  f"k up to {MAX_K}", f"{100 * CONFIDENCE:.0f}% Wilson"):  # fmt: skip
        assert value in document.TEXT, value
    assert 2 / 2**5 > SIGNIFICANCE > 2 / 2**6
    assert math.lcm(*range(1, ATTEMPTS + 1)) == 840
