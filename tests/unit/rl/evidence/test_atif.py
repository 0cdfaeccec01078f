"""Trajectories in ATIF, held to Harbor's own model of the format."""

from __future__ import annotations

import json
from typing import Any

from harbor.models.trajectories import Trajectory

from rl.agent.chat import BASH_TOOL
from rl.evidence.atif import About, episode_trajectory, trajectory, turn_tokens
from rl.records import EpisodeRecord, Sample, TurnRecord

ABOUT = About(
    session_id="s1",
    agent_name="bash",
    agent_version="1",
    model_name="policy-v3",
    system_prompt="Use bash.",
    instruction="Make it.",
    stop_reason="completed",
    tools=(BASH_TOOL,),
)


def turn(prompt: int, completion: int, **fields: Any) -> TurnRecord:
    return TurnRecord(
        prompt_tokens=prompt,
        completion_tokens=completion,
        text=f"reply at {prompt}",
        finish_reason="stop",
        **fields,
    )


def sample(branch: int, *parts: tuple[int, bool]) -> Sample:
    """A branch of parts (length, sampled); tokens are numbered, logprobs negative."""
    sampled = [flag for length, flag in parts for _ in range(length)]
    return Sample(
        branch=branch,
        token_ids=[100 * branch + at for at in range(len(sampled))],
        sampled=sampled,
        logprobs=[-1.0 - at if flag else 0.0 for at, flag in enumerate(sampled)],
    )


TURNS = [
    turn(3, 2, command="ls", exit_code=0, output="a\x00\ufffdb"),
    turn(7, 1, note="Your reply was cut off.", problem="cut"),
    turn(9, 2, purpose="summary", asked="Sum up.", problem="empty"),
    turn(12, 2, purpose="summary", asked="Again.", handover="So far: ls.", kept_turns=1),
    turn(4, 3, branch=1),
]
LATER = [(2, False), (1, True), (1, False), (2, False), (1, False), (2, True)]
SAMPLES = [
    sample(0, (3, False), (2, True), *LATER),
    sample(1, (4, False), (3, True)),
]


def validated(made: dict[str, Any]) -> Trajectory:
    return Trajectory.model_validate_json(json.dumps(made))


def test_steps_come_in_the_order_in_which_they_happened() -> None:
    steps = validated(trajectory(TURNS, SAMPLES, ABOUT)).steps
    assert [(step.source, step.message) for step in steps] == [
        ("system", "Use bash."),
        ("user", "Make it."),
        ("agent", "reply at 3"),
        ("agent", "reply at 7"),
        ("user", "Sum up."),
        ("agent", "reply at 9"),
        ("user", "Again."),
        ("agent", "reply at 12"),
        ("user", "So far: ls."),
        ("agent", "reply at 4"),
    ]


def test_command_and_note_are_told_apart() -> None:
    steps = validated(trajectory(TURNS, SAMPLES, ABOUT)).steps
    ran, cut = steps[2], steps[3]
    assert ran.tool_calls is not None and ran.observation is not None
    assert ran.tool_calls[0].arguments == {"command": "ls"}
    assert ran.observation.results[0].source_call_id == ran.tool_calls[0].tool_call_id
    assert ran.observation.results[0].content == TURNS[0].answer
    assert cut.tool_calls is None and cut.observation is not None
    assert cut.observation.results[0].content == "Your reply was cut off."
    assert steps[-1].observation is None


def test_each_turn_has_the_tokens_of_its_branch() -> None:
    metrics = [step.metrics for step in validated(trajectory(TURNS, SAMPLES, ABOUT)).steps]
    first, last = metrics[2], metrics[-1]
    assert first is not None and last is not None
    assert (first.prompt_token_ids, first.completion_token_ids) == ([0, 1, 2], [3, 4])
    assert first.logprobs == [-4.0, -5.0]
    assert (last.prompt_token_ids, last.completion_token_ids) == (
        [100, 101, 102, 103],
        [104, 105, 106],
    )


def test_rejected_summary_has_tokens_but_no_logprobs() -> None:
    rejected = turn_tokens(TURNS[2], SAMPLES)
    assert rejected is not None
    assert (rejected.completion, rejected.logprobs) == ([9, 10], None)


def test_unknown_tokens_are_left_out() -> None:
    (step,) = validated(trajectory([turn(5, 2)], [], ABOUT)).steps[2:]
    assert step.metrics is not None
    assert step.metrics.completion_tokens == 2
    assert step.metrics.completion_token_ids is None and step.metrics.logprobs is None
    assert turn_tokens(turn(6, 2), [sample(0, (7, True))]) is None


def test_totals_and_grade_are_the_episodes() -> None:
    record = EpisodeRecord(
        attempt_id="g1-a0",
        group_id="g1",
        task_name="t",
        task_digest="d" * 64,
        version=3,
        replica=0,
        outcome="graded",
        reward=1.0,
        stop_reason="completed",
        samples=SAMPLES,
        turns=TURNS,
        started_at=0.0,
    )
    made = validated(episode_trajectory(record, ABOUT))
    assert made.final_metrics is not None and made.extra is not None
    assert made.final_metrics.total_prompt_tokens == 35
    assert made.final_metrics.total_completion_tokens == 10
    assert made.final_metrics.total_steps == len(made.steps)
    assert (made.extra["reward"], made.extra["policy_version"]) == (1.0, 3)
    assert made.agent.tool_definitions == [BASH_TOOL]
