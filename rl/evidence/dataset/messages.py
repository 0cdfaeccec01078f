"""The messages of an episode, rebuilt from its turns.

Invariants:
- They are those that `rl.records.TurnRecord` describes: every branch of the context from
  its beginning, so a later branch repeats system, examples, task and its latest turns.
- `sampled` is true exactly for the replies whose tokens the sample of their branch marks
  as sampled; a repeated reply and a rejected summary are not.
- A branch ends with a reply, unless nothing was ever replied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, TypedDict

from rl.agent_config import AgentConfig
from rl.records import TurnRecord

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One message of one branch."""

    branch: int
    role: Role
    content: str
    sampled: bool


class ChatMessage(TypedDict):
    """One message as chat templates and TRL take it."""

    role: Role
    content: str


def episode_messages(
    agent: AgentConfig, instruction: str, turns: Sequence[TurnRecord]
) -> list[Message]:
    """Every branch's messages, one branch behind the other.

    Args:
        agent: the harness that the episode ran in.
        instruction: the task's text.
        turns: the episode's.
    """
    answers: Role = "tool" if agent.call_format == "tool" else "user"
    made = _opening(agent, instruction, 0)
    for branch, own in groupby(turns, key=lambda turn: turn.branch):
        if branch:
            made += _opening(agent, instruction, branch)
            made += _repeated(turns, branch, answers)
        made += _own(list(own), answers)
    return made


def without_rejected_summaries(turns: Iterable[TurnRecord]) -> list[TurnRecord]:
    """The turns as if each summary had been accepted at once.

    A rejected one goes with the message that said what was wrong with it; the accepted one
    answers what was asked first.
    """
    kept: list[TurnRecord] = []
    asked: str | None = None
    for turn in turns:
        if turn.purpose == "summary" and turn.problem is not None:
            asked = asked or turn.asked
        elif turn.purpose == "summary" and asked is not None:
            kept.append(turn.model_copy(update={"asked": asked}))
            asked = None
        else:
            kept.append(turn)
    return kept


def chat(messages: Iterable[Message]) -> list[ChatMessage]:
    """Roles and texts alone."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def opening_length(agent: AgentConfig) -> int:
    """How many messages stand before what the first reply is to: system, examples, task."""
    return 2 + 2 * len(agent.examples)


def _opening(agent: AgentConfig, instruction: str, branch: int) -> list[Message]:
    made = [_message(branch, "system", agent.system_prompt)]
    for example in agent.examples:
        made.append(_message(branch, "user", example.user))
        made.append(_message(branch, "assistant", example.assistant))
    # As the harness tells it, without the blank lines around the file's text.
    made.append(_message(branch, "user", instruction.strip()))
    return made


def _repeated(turns: Sequence[TurnRecord], branch: int, answers: Role) -> list[Message]:
    """The summary that opened `branch`, and the turns that it repeats, answers included."""
    earlier = [turn for turn in turns if turn.branch < branch]
    summary = next((turn for turn in reversed(earlier) if turn.handover), None)
    if summary is None:
        return []
    acts = [turn for turn in earlier if turn.purpose == "act"]
    made = [_message(branch, "user", summary.handover)]
    for turn in acts[len(acts) - summary.kept_turns :]:
        made.append(_message(branch, "assistant", turn.text))
        made += _answer(turn, branch, answers)
    return made


def _own(turns: list[TurnRecord], answers: Role) -> list[Message]:
    made: list[Message] = []
    for place, turn in enumerate(turns, 1):
        if turn.asked:
            made.append(_message(turn.branch, "user", turn.asked))
        sampled = turn.purpose == "act" or turn.problem is None
        made.append(_message(turn.branch, "assistant", turn.text, sampled=sampled))
        if place < len(turns):
            made += _answer(turn, turn.branch, answers)
    return made


def _answer(turn: TurnRecord, branch: int, answers: Role) -> list[Message]:
    if not turn.answer:
        return []
    return [_message(branch, "user" if turn.command is None else answers, turn.answer)]


def _message(branch: int, role: Role, content: str, *, sampled: bool = False) -> Message:
    return {"branch": branch, "role": role, "content": content, "sampled": sampled}
