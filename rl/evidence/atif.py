"""An episode as a trajectory in ATIF, the Agent Trajectory Interchange Format.

Invariants:
- Steps are numbered from 1 without gaps and come in the order in which they happened:
  system, task, then for each reply the message that asked for it, if there was one of
  its own, and the reply with what it led to.
- A step has token ids only where they are known to be those that the model read and
  sampled, and logprobs only where each of its tokens is trained on.
- Nothing here depends on Harbor; the tests hold it to Harbor's own model of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.records import EpisodeRecord, Sample, TurnRecord

SCHEMA_VERSION = "ATIF-v1.7"
TOOL_NAME = "bash"


@dataclass(frozen=True, slots=True)
class About:
    """What a trajectory says of the run as a whole.

    Attributes:
        session_id: names the run.
        agent_name: of the harness.
        agent_version: of the harness.
        model_name: the name that the model is served under.
        system_prompt: the system message.
        instruction: the task's text.
        stop_reason: why the episode ended.
        tools: what was offered to the model, in OpenAI's schema; empty: fenced blocks.
        extra: further facts about the run.
    """

    session_id: str
    agent_name: str
    agent_version: str
    model_name: str
    system_prompt: str
    instruction: str
    stop_reason: str
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """What the model read and sampled in one turn; no logprobs where it is not trained on."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None


def turn_tokens(turn: TurnRecord, samples: Sequence[Sample]) -> TurnTokens | None:
    """The tokens of a turn, from the sample of its branch; None if there is none."""
    sample = next((one for one in samples if one.branch == turn.branch), None)
    start, end = turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens
    if sample is None or end > len(sample.token_ids) or not turn.completion_tokens:
        return None
    return TurnTokens(
        prompt=sample.token_ids[:start],
        completion=sample.token_ids[start:end],
        logprobs=sample.logprobs[start:end] if all(sample.sampled[start:end]) else None,
    )


def trajectory(
    turns: Sequence[TurnRecord], samples: Sequence[Sample], about: About
) -> dict[str, Any]:
    """The trajectory as JSON values."""
    steps: list[dict[str, Any]] = [
        {"source": "system", "message": about.system_prompt},
        {"source": "user", "message": about.instruction},
    ]
    for number, turn in enumerate(turns):
        if turn.asked:
            steps.append({"source": "user", "message": turn.asked})
        steps.append(_agent_step(number, turn, samples))
        if turn.handover:
            steps.append(
                {
                    "source": "user",
                    "message": turn.handover,
                    "extra": {"kept_turns": turn.kept_turns},
                }
            )
    agent: dict[str, Any] = {
        "name": about.agent_name,
        "version": about.agent_version,
        "model_name": about.model_name,
    }
    if about.tools:
        agent["tool_definitions"] = [dict(tool) for tool in about.tools]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": about.session_id,
        "agent": agent,
        "steps": [{"step_id": at, **step} for at, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "total_completion_tokens": sum(turn.completion_tokens for turn in turns),
            "total_steps": len(steps),
        },
        "extra": {"stop_reason": about.stop_reason, **(about.extra or {})},
    }


def episode_trajectory(record: EpisodeRecord, about: About) -> dict[str, Any]:
    """The trajectory of a terminal record, with how it was graded."""
    graded = {
        "attempt_id": record.attempt_id,
        "task": record.task_name,
        "task_digest": record.task_digest,
        "policy_version": record.version,
        "outcome": record.outcome,
        "reward": record.reward,
    }
    made = trajectory(record.turns, record.samples, about)
    return {**made, "extra": {**made["extra"], **graded}}


def _agent_step(number: int, turn: TurnRecord, samples: Sequence[Sample]) -> dict[str, Any]:
    """One reply of the model, what it asked for, and what it was told."""
    step: dict[str, Any] = {
        "source": "agent",
        "message": turn.text,
        "llm_call_count": 1,
        "metrics": _metrics(turn, turn_tokens(turn, samples)),
    }
    if turn.command is not None:
        call_id = f"call-{number}"
        step["tool_calls"] = [
            {
                "tool_call_id": call_id,
                "function_name": TOOL_NAME,
                "arguments": {"command": turn.command},
            }
        ]
        result = {
            "source_call_id": call_id,
            "content": turn.answer,
            "extra": {"exit_code": turn.exit_code, "seconds": turn.execute_s},
        }
        step["observation"] = {"results": [result]}
    elif turn.answer:
        step["observation"] = {"results": [{"content": turn.answer}]}
    facts: dict[str, Any] = {"purpose": turn.purpose, "branch": turn.branch}
    if turn.problem is not None:
        facts["problem"] = turn.problem
    step["extra"] = facts
    return step


def _metrics(turn: TurnRecord, tokens: TurnTokens | None) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "extra": {"finish_reason": turn.finish_reason, "seconds": turn.generate_s},
    }
    if tokens is not None:
        metrics["prompt_token_ids"] = tokens.prompt
        metrics["completion_token_ids"] = tokens.completion
        if tokens.logprobs is not None:
            metrics["logprobs"] = tokens.logprobs
    return metrics
