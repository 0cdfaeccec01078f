"""Evaluations during training: between the attempts of training, and never trained on."""

from __future__ import annotations

import pytest

from rl.schedule.commands import Dispatch, EvalOver, RetireVersion
from rl.schedule.evals import EvalPlan, graded_cells
from tests.support.schedule_model.play import Play

FIRST = EvalPlan(frozenset({0}), cells=3, retries=1)


def test_attempts_of_an_evaluation_go_first_into_the_same_slots() -> None:
    play = Play(slots=8, evals=FIRST)
    assert [command.cell for command in play.evaluating.values()] == [0, 1, 2]
    assert len(play.running) == 5
    assert play.scheduler.in_flight == 8
    assert {command.replica for command in play.evaluating.values()} == {0, 1}


def test_a_version_is_served_until_its_evaluation_is_over() -> None:
    play = Play(updates=4, slots=11, evals=FIRST)
    play.until_step()
    play.train(1)
    heard = play.publish(1)
    while play.groups() and any(d.version == 0 for d in play.running.values()):
        heard += play.grade(
            next(g for g in play.groups() if play.running[play.of(g)[0]].version == 0)
        )
    assert not [command for command in heard if isinstance(command, RetireVersion)]
    *rest, last = list(play.evaluating)
    for attempt_id in rest:
        assert RetireVersion(0) not in play.end(attempt_id)
    heard = play.end(last)
    assert EvalOver(0, 3, 3, "") in heard
    assert RetireVersion(0) in heard
    assert heard.index(EvalOver(0, 3, 3, "")) < heard.index(RetireVersion(0))


def test_a_masked_attempt_is_relaunched_under_a_new_id_and_then_left_out() -> None:
    play = Play(evals=FIRST)
    first = next(iter(play.evaluating))
    play.end(first, "masked")
    again = next(a for a, c in play.evaluating.items() if c.cell == 0)
    assert (first, again) == ("eval0000.0-c000-0", "eval0000.0-c000-1")
    play.end(again, "masked")
    assert all(command.cell != 0 for command in play.evaluating.values())
    heard = [command for attempt in list(play.evaluating) for command in play.end(attempt)]
    over = next(command for command in heard if isinstance(command, EvalOver))
    assert (over.graded, over.cells) == (2, 3)
    assert "too often" in over.reason


def test_an_evaluation_that_nobody_serves_any_more_is_given_up() -> None:
    play = Play(updates=4, slots=8, evals=FIRST)
    play.until_step()
    play.train(1)
    lives = {replica: play.scheduler.replica_lost(replica) for replica in (0, 1)}
    play.publish(1, lives)
    heard = [
        command for attempt in list(play.evaluating) for command in play.end(attempt, "masked")
    ]
    over = next(command for command in heard if isinstance(command, EvalOver))
    assert (over.version, over.graded) == (0, 0)
    assert "no replica serves" in over.reason
    assert RetireVersion(0) in heard or play.running


def test_a_continued_driver_evaluates_only_what_is_missing() -> None:
    graded = graded_cells(["eval0000.0-c001-0", "eval0000.1-c002-1"])
    assert graded == {0: frozenset({1, 2})}
    plan = EvalPlan(frozenset({0}), 3, 1, graded)
    play = Play(evals=plan, incarnation=2)
    assert list(play.evaluating) == ["eval0000.2-c000-0"]
    assert EvalOver(0, 3, 3, "") in play.end("eval0000.2-c000-0")
    complete = EvalPlan(frozenset({0}), 3, 1, {0: frozenset({0, 1, 2})})
    assert not Play(evals=complete).evaluating


def test_the_campaign_waits_for_evaluations_after_its_last_update() -> None:
    play = Play(updates=1, batch=2, staleness=0, slots=8, evals=FIRST)
    play.until_step()
    play.train(1)
    assert play.scheduler.done
    assert not play.scheduler.idle
    for attempt_id in list(play.evaluating):
        assert not [c for c in play.end(attempt_id) if isinstance(c, Dispatch)]
    assert play.scheduler.idle


def test_an_id_of_a_group_is_no_evaluation() -> None:
    with pytest.raises(ValueError, match="g00001"):
        graded_cells(["g00001.0-a1"])
