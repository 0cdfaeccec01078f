"""Messages are rebuilt as the records say, branch by branch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.agent.compaction import Branch, next_branch
from rl.agent_config import AgentConfig, Example
from rl.evidence.dataset.messages import (
    Message,
    episode_messages,
    opening_length,
    without_rejected_summaries,
)
from rl.records import TurnRecord
from tests.unit.rl.evidence.dataset.material import act, compacted, said, summary


def agent(call_format: str = "fenced") -> AgentConfig:
    return AgentConfig.model_validate(
        {
            "system_prompt": "be brief",
            "examples": (Example(user="say hi", assistant="echo hi"),),
            "call_format": call_format,
            "max_turns": 9,
            "max_new_tokens": 9,
        }
    )


OPENING = ["system: be brief", "user: say hi", "assistant: echo hi", "user: do it"]


def rebuilt(turns: list[TurnRecord], call_format: str = "fenced") -> list[Message]:
    return episode_messages(agent(call_format), "\n do it\n", turns)


def branch(messages: list[Message], number: int) -> list[Message]:
    return [message for message in messages if message["branch"] == number]


def test_an_episode_without_turns_is_its_opening() -> None:
    assert said(rebuilt([])) == OPENING
    assert opening_length(agent()) == len(OPENING)


@pytest.mark.parametrize(("call_format", "role"), [("fenced", "user"), ("tool", "tool")])
def test_an_output_answers_a_call_in_the_role_of_the_format(call_format: str, role: str) -> None:
    assert said(rebuilt([act("one"), act("two")], call_format))[4:] == [
        "assistant: one",
        f"{role}: out of one\n[exit status 0]",
        "assistant: two",
    ]


def test_a_note_is_the_users_in_every_format() -> None:
    noted = act("hm", command=None, exit_code=None, output="", note="no command", problem="no_call")
    assert said(rebuilt([noted, act("two")], "tool"))[4:6] == [
        "assistant: hm",
        "user: no command",
    ]


def test_a_later_branch_repeats_opening_summary_and_latest_turns() -> None:
    messages = rebuilt(compacted())
    assert said(branch(messages, 0))[len(OPENING) :] == [
        "assistant: one",
        "user: out of one\n[exit status 0]",
        "assistant: two",
        "user: out of two\n[exit status 0]",
        "assistant: three",
        "user: out of three\n[exit status 0]",
        "user: sum up",
        "assistant: much too long",
        "user: shorter",
        "assistant: I did it",
    ]
    assert said(branch(messages, 1)) == [
        *OPENING,
        "user: you did it",
        "assistant: two",
        "user: out of two\n[exit status 0]",
        "assistant: three",
        "user: out of three\n[exit status 0]",
        "assistant: four",
    ]


def test_only_replies_that_are_trained_on_are_marked() -> None:
    marked = [message["content"] for message in rebuilt(compacted()) if message["sampled"]]
    assert marked == ["one", "two", "three", "I did it", "four"]


def test_a_rejected_summary_and_its_complaint_can_be_left_out() -> None:
    messages = rebuilt(without_rejected_summaries(compacted()))
    assert said(branch(messages, 0))[-2:] == ["user: sum up", "assistant: I did it"]
    assert "much too long" not in str(messages)
    assert "shorter" not in str(messages)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[TurnRecord], list[list[int]]]:
    """Turns as the harness makes them, and the turns that each branch holds, by number.

    The branches are made by the harness's own code, one token a reply or an answer.
    """
    turns: list[TurnRecord] = []
    branches = [Branch.opened([0])]
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            number = sum(turn.purpose == "act" for turn in turns) + 1
            branches[-1].add_turn([number], [-1.0])
            branches[-1].extend([*branches[-1].ids, -number])
            turns.append(act(str(number), len(branches) - 1))
        keep = draw(st.integers(0, 3))
        opened = next_branch([0], branches[-1], branches[-1].ids, keep, 99)
        turns.append(summary(len(branches) - 1, handover="so far", kept_turns=opened.repeated))
        branches.append(opened)
    return turns, [one.ids for one in branches]


@given(episodes())
def test_every_branch_holds_the_turns_that_the_harness_repeats(
    made: tuple[list[TurnRecord], list[list[int]]],
) -> None:
    turns, branches = made
    messages = rebuilt(turns)
    for number in range(turns[-1].branch + 1):
        replies = [
            int(message["content"])
            for message in branch(messages, number)[len(OPENING) :]
            if message["role"] == "assistant" and message["content"].isdigit()
        ]
        assert replies == [token for token in branches[number] if token > 0]
    sampled = [m["content"] for m in messages if m["sampled"] and m["content"].isdigit()]
    assert sampled == [turn.text for turn in turns if turn.purpose == "act"]


def test_a_summary_that_was_rejected_twice_answers_the_first_request() -> None:
    turns = [
        act("one"),
        summary(0, problem="empty", text=""),
        summary(0, problem="too_long", asked="write one"),
        summary(0, asked="shorter", handover="you did it"),
    ]
    assert [turn.asked for turn in without_rejected_summaries(turns)] == ["", "sum up"]
