"""Conversations as tokens: one façade over the `renderers` package.

Invariants:
- `extend` returns its `tokens` unchanged as a prefix; a renderer that can't do
  so is refused when it is chosen, not in the middle of an episode.
- `commands` never raises on what a model wrote: a call that can't be used is a
  `Malformed` with a note that tells the model why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rl.agent.tokenizer import FastTokenizer
from rl.config import AgentConfig, ModelConfig
from rl.errors import ConfigurationError

if TYPE_CHECKING:
    from renderers.base import Message, Renderer, ToolSpec

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the task's working directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command to run"}},
            "required": ["command"],
        },
    },
}
FENCE_STOP = "\n```"
_FENCED = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The model tried to call and failed; `note` is what it is told."""

    note: str


@dataclass(frozen=True, slots=True)
class NoCall:
    """The model wrote no call at all."""


Call = Command | Malformed | NoCall


class Chat:
    """Renders, extends and parses the conversations of one model.

    Args:
        model_dir: the model's directory (tokenizer.json is read).
        model: names the renderer.
        agent: the prompt and the call format.

    Raises:
        ConfigurationError: no renderer fits the model, or it can't extend.
    """

    def __init__(self, model_dir: Path, model: ModelConfig, agent: AgentConfig) -> None:
        self._agent = agent
        self._tokenizer = FastTokenizer(model_dir, model.name)
        self._renderer = _renderer(self._tokenizer, model)
        self._tools = [cast("ToolSpec", BASH_TOOL)] if agent.call_format == "tool" else None
        if not self._can_extend():
            raise ConfigurationError(
                f"renderer '{model.renderer}' can't extend a conversation token by token",
                "model.renderer",
                "choose a renderer with a bridge, such as 'chatml'",
            )

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        return self._renderer.get_stop_token_ids()

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a turn; they are part of what was sampled."""
        return [FENCE_STOP] if self._agent.call_format == "fenced" else []

    def opening(self, instruction: str) -> list[int]:
        """The first prompt: system, examples, instruction, assistant header."""
        messages: list[Message] = [{"role": "system", "content": self._agent.system_prompt}]
        for example in self._agent.examples:
            messages.append({"role": "user", "content": example.user})
            messages.append({"role": "assistant", "content": example.assistant})
        messages.append({"role": "user", "content": instruction.strip()})
        return self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True)

    def extend(
        self, prompt: list[int], completion: list[int], text: str, role: Literal["tool", "user"]
    ) -> list[int] | None:
        """`prompt + completion` continued by one message and an assistant header.

        Returns None when this completion can't be continued (it holds control
        tokens out of place).
        """
        if self._tools is None:
            role = "user"
        message: Message = {"role": role, "content": text}
        if role == "tool":
            message["name"] = "bash"
        bridged = self._renderer.bridge_to_next_turn(
            prompt, completion, [message], tools=self._tools
        )
        if bridged is None:
            return None
        ids = bridged.token_ids
        head = [*prompt, *completion]
        return ids if ids[: len(head)] == head else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, without control tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def call(self, prompt: list[int], completion: list[int], cut: bool) -> Call:
        """The call in one completion; `cut` says that the length limit ended it."""
        if self._tools is None:
            return self._fenced_call(self.decode(completion), cut)
        parsed = self._renderer.parse_response(completion, tools=self._tools, prompt_ids=prompt)
        if not parsed.tool_calls:
            return Malformed("Your reply was cut off at the length limit.") if cut else NoCall()
        first = parsed.tool_calls[0]
        if first.status != "ok":
            why = "was cut off at the length limit" if cut else f"is malformed ({first.status})"
            return Malformed(f"Your tool call {why}; it was not run. Write it again, shorter.")
        arguments = first.arguments
        command = arguments.get("command") if isinstance(arguments, dict) else None
        if not isinstance(command, str) or not command.strip():
            return Malformed("The bash tool needs a non-empty string argument 'command'.")
        return Command(command)

    def _fenced_call(self, text: str, cut: bool) -> Call:
        match = _FENCED.search(text)
        if match is None:
            if "```" in text:
                return Malformed("Your code block was not closed; it was not run.")
            return Malformed("Your reply was cut off at the length limit.") if cut else NoCall()
        command = match.group(1).strip("\n")
        return Command(command) if command.strip() else Malformed("Your code block is empty.")

    def _can_extend(self) -> bool:
        prompt = self.opening("x")
        end = self._renderer.get_stop_token_ids()[0]
        return self.extend(prompt, [*self._tokenizer.encode("ok"), end], "y", "tool") is not None


def _renderer(tokenizer: FastTokenizer, model: ModelConfig) -> Renderer:
    """The renderer that `model.renderer` names."""
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    if model.renderer == "chatml":
        from rl.agent.chatml import ChatMLRenderer

        return ChatMLRenderer(tokenizer)
    config = None if model.renderer == "auto" else config_from_name(model.renderer)
    if model.renderer != "auto" and config is None:
        raise ConfigurationError(f"unknown renderer '{model.renderer}'", "model.renderer")
    try:
        return create_renderer(tokenizer, cast(Any, config))
    except (AssertionError, ImportError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"no renderer for model '{model.name}': {error}",
            "model.renderer",
            "name one explicitly, such as 'chatml' or 'qwen3'",
        ) from error
