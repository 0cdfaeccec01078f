from __future__ import annotations

import pytest

from benchmarks.train_step import main
from benchmarks.training.workload import Case, Lengths, make_groups
from rl.errors import ConfigurationError


def case(lengths: Lengths, share: float = 0.5, seed: int = 0) -> Case:
    return Case(share, lengths, tokens=200, group=8, groups=2, sampled=0.5, seed=seed)


@pytest.mark.parametrize(("share", "ideal"), [(0.25, 1.28), (0.5, 1.78), (0.75, 2.91)])
def test_the_ideal_saving_is_that_of_the_tokens(share, ideal):
    assert case("even", share).ideal == pytest.approx(ideal, abs=0.005)
    for group in make_groups(case("even", share), 100):
        total = sum(len(attempt.prompt) + len(attempt.tail) for attempt in group)
        distinct = len(group[0].prompt) + sum(len(attempt.tail) for attempt in group)
        assert total / distinct == pytest.approx(case("even", share).ideal, rel=1e-3)


@pytest.mark.parametrize("lengths", ["even", "uneven"])
def test_attempts_of_a_group_have_the_prompt_in_common_and_rewards_that_differ(lengths):
    for group in make_groups(case(lengths), 1000):
        assert all(attempt.prompt == group[0].prompt for attempt in group)
        assert len({tuple(attempt.tail[:3]) for attempt in group}) == len(group)
        assert {attempt.reward for attempt in group} == {0.0, 1.0}
        assert all(len(attempt.tail) == len(attempt.sampled) for attempt in group)
        assert (len({len(attempt.tail) for attempt in group}) == 1) == (lengths == "even")


def test_uneven_groups_hold_as_many_tokens_as_even_ones():
    counts = [
        sum(len(attempt.tail) for group in make_groups(case(lengths), 100) for attempt in group)
        for lengths in ("even", "uneven")
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_the_case_decides_every_token():
    assert make_groups(case("uneven"), 100) == make_groups(case("uneven"), 100)
    assert make_groups(case("uneven"), 100) != make_groups(case("uneven", seed=1), 100)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="at least two attempts"):
        main(["--group", "1"])
    with pytest.raises(ConfigurationError, match="no model directory"):
        main(["--model", str(tmp_path)])


@pytest.mark.parametrize("wrong", [["--share", "1"], ["--tokens", "8"], ["--rounds", "x"]])
def test_a_wrong_option_ends_with_code_2(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
