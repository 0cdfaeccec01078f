"""The agent's part of `rl.config`'s tree."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl.values import (
    Fraction,
    NonNegative,
    Positive,
    Seconds,
    Section,
    Temperature,
    Text,
)


class Example(Section):
    """One demonstration turn pair shown before the instruction."""

    user: Text = Field(description="the demonstration's instruction")
    assistant: Text = Field(description="the demonstration's reply, verbatim")


SUMMARY_REQUEST = (
    "Your context is nearly full. Write a summary of your work on the task so far, with which "
    "you can go on without anything else of this conversation: what you found out, what you "
    "changed, what is left to do. Write plain text, and no command."
)


class CompactionConfig(Section):
    """Earlier turns give way to a summary that the model writes.

    The next branch of the episode holds the system message, the task, the summary and the
    latest turns.
    """

    threshold_tokens: Positive | None = Field(
        default=None, description="length of the context at which it is rebuilt, tokens"
    )
    threshold_share: Fraction | None = Field(
        default=None, description="the same as a share of engine.max_model_len"
    )
    summary_tokens: Positive = Field(
        description="a longer summary is rejected; at most agent.max_new_tokens, tokens"
    )
    keep_turns: NonNegative = Field(
        default=1,
        description="latest turns that the next branch repeats token by token, "
        "fewer where they don't fit",
    )
    max_retries: NonNegative = Field(
        default=1,
        description="how often another summary is asked for when one is rejected, before the "
        "episode ends",
    )
    request: Text = Field(
        default=SUMMARY_REQUEST, min_length=1, description="what the model is asked for"
    )

    @model_validator(mode="after")
    def _one_threshold(self) -> CompactionConfig:
        if (self.threshold_tokens is None) == (self.threshold_share is None):
            raise ValueError("give either threshold_tokens or threshold_share")
        return self

    def threshold(self, max_model_len: int) -> int:
        """The threshold where the engine takes `max_model_len` tokens, tokens."""
        if self.threshold_tokens is not None:
            return self.threshold_tokens
        return int((self.threshold_share or 1.0) * max_model_len)


class AgentConfig(Section):
    """The bash-tool harness around the model."""

    system_prompt: Text = Field(description="the system message")
    examples: tuple[Example, ...] = Field(
        default=(), description="demonstration turns between the system message and the task"
    )
    call_format: Literal["tool", "fenced"] = Field(
        default="tool",
        description="tool: native tool calls, by the renderer's parser; "
        "fenced: one fenced bash block per turn",
    )
    max_turns: Positive = Field(description="model turns per episode")
    max_new_tokens: Positive = Field(description="sampled tokens per turn")
    temperature: Temperature = Field(
        default=1.0, description="of sampling; the trainer uses the same"
    )
    command_timeout_s: Seconds = Field(default=120.0, description="limit of one command, s")
    output_limit_bytes: Positive = Field(
        default=16_384, description="a command's output is cut to this, head and tail, bytes"
    )
    max_recoveries: NonNegative = Field(
        default=3,
        description="consecutive turns without a usable command, cut or malformed, that are "
        "answered with a note before the episode ends; 0 ends it at the first",
    )
    compaction: CompactionConfig | None = Field(
        default=None,
        description="rebuilding a context that grows too long; absent: the episode ends there",
    )

    @model_validator(mode="after")
    def _summary_is_one_reply(self) -> AgentConfig:
        if self.compaction and self.compaction.summary_tokens > self.max_new_tokens:
            raise ValueError("compaction.summary_tokens may not exceed max_new_tokens")
        return self
