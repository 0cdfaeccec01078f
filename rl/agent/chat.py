"""Conversations as tokens: one façade over the `renderers` package.

Invariants:
- `extend` returns its tokens unchanged as a prefix; a renderer that can't do so is
  refused when it is chosen, not in the middle of an episode.
- What a model wrote never raises here, whatever its tokens.
- Text from outside (instructions, outputs, summaries) can't contain control tokens.
- A turn in which a call was left open reads as a whole one to the model: behind it
  stand the tokens that close the call, then those that end the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rl.agent.calls import (
    FENCE_STOP,
    TOOL_NAME,
    UNREADABLE,
    Call,
    fence_is_open,
    fenced_call,
    tool_call,
)
from rl.agent.tokenizer import FastTokenizer
from rl.agent_config import AgentConfig
from rl.config import ModelConfig
from rl.errors import ConfigurationError

if TYPE_CHECKING:
    from renderers.base import Message, ParsedResponse, Renderer, ToolSpec

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Run a bash command in the task's working directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command to run"}},
            "required": ["command"],
        },
    },
}
# What parsers of other people's make of odd input, such as brackets nested a thousand deep.
_PARSER_FAILURES = (
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Replies that a renderer may take for whole: some open the reasoning in the prompt.
_WHOLE_REPLIES = ("ok", "</think>\n\nok")
_PROBE = "PROBE"


@dataclass(frozen=True, slots=True)
class Told:
    """One message to the model; `tool` answers a call."""

    role: Literal["tool", "user"]
    text: str


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
        self._takes_plain_text = model.renderer == "chatml"
        self._tools = [cast("ToolSpec", BASH_TOOL)] if agent.call_format == "tool" else None
        self._end = self._renderer.get_stop_token_ids()[0]
        self._whole_reply = self._find_whole_reply(model.renderer)
        self._closer = FENCE_STOP if self._tools is None else self._call_closer()

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        return self._renderer.get_stop_token_ids()

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a turn; they are part of what was sampled."""
        return [FENCE_STOP] if self._agent.call_format == "fenced" else []

    def opening(self, instruction: str, handover: str = "") -> list[int]:
        """A prompt's tokens: system, examples, instruction, handover, assistant header.

        Args:
            instruction: the task's text.
            handover: a second message of the user's, if not empty.
        """
        messages: list[Message] = [{"role": "system", "content": self._agent.system_prompt}]
        for example in self._agent.examples:
            messages.append({"role": "user", "content": example.user})
            messages.append({"role": "assistant", "content": example.assistant})
        messages.append({"role": "user", "content": self._plain(instruction.strip())})
        if handover:
            messages.append({"role": "user", "content": self._plain(handover)})
        return self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True)

    def extend(
        self, prompt: list[int], completion: list[int], told: Sequence[Told]
    ) -> list[int] | None:
        """`prompt + completion`, closed, continued by messages and an assistant header.

        Returns None when this completion can't be continued.
        """
        messages = [self._message(one) for one in told]
        closer = self._tokenizer.encode(self.closer(prompt, completion))
        closed = [*completion, *closer]
        return self._bridge(prompt, closed, messages) or self._graft(prompt, closed, messages)

    def closer(self, prompt: list[int], completion: list[int]) -> str:
        """What is missing of a call that `completion` leaves open; empty if none is.

        A turn that the model has ended stays as it is.
        """
        if completion and completion[-1] in self.stop_token_ids:
            return ""
        text = self._tokenizer.decode(completion)
        if self._tools is None:
            is_open = fence_is_open(self.decode(completion))
        else:
            parsed = self._parse(prompt, completion)
            calls = parsed.tool_calls if parsed else []
            is_open = bool(calls) and calls[-1].status == "unclosed_block"
        return _missing(text, self._closer) if is_open else ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, without control tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def call(self, prompt: list[int], completion: list[int], cut: bool) -> Call:
        """The call in one completion; `cut` says that the length limit ended it."""
        if self._tools is None:
            return fenced_call(self.decode(completion), cut)
        parsed = self._parse(prompt, completion)
        return UNREADABLE if parsed is None else tool_call(parsed.tool_calls, cut)

    def content(self, prompt: list[int], completion: list[int]) -> str:
        """What one completion says, without reasoning, calls and control tokens."""
        parsed = self._parse(prompt, completion)
        return parsed.content.strip() if parsed else ""

    def _parse(self, prompt: list[int], completion: list[int]) -> ParsedResponse | None:
        try:
            return self._renderer.parse_response(completion, tools=self._tools, prompt_ids=prompt)
        except _PARSER_FAILURES:
            return None

    def _message(self, told: Told) -> Message:
        text = self._plain(told.text)
        if self._tools is not None and told.role == "tool":
            return {"role": "tool", "name": TOOL_NAME, "content": text}
        return {"role": "user", "content": text}

    def _plain(self, text: str) -> str:
        return text if self._takes_plain_text else self._tokenizer.defused(text)

    def _bridge(
        self, prompt: list[int], completion: list[int], messages: list[Message]
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            prompt, completion, messages, tools=self._tools
        )
        head = [*prompt, *completion]
        if bridged is None or bridged.token_ids[: len(head)] != head:
            return None
        return bridged.token_ids

    def _graft(
        self, prompt: list[int], completion: list[int], messages: list[Message]
    ) -> list[int] | None:
        """Continue a completion with control tokens out of place as one without would be."""
        extended = self._bridge(prompt, self._whole_reply, messages)
        if extended is None:
            return None
        ended = bool(completion) and completion[-1] in self.stop_token_ids
        end = [] if ended else [self._end]
        return [*prompt, *completion, *end, *extended[len(prompt) + len(self._whole_reply) :]]

    def _find_whole_reply(self, renderer: str) -> list[int]:
        """A reply that the renderer can continue in every way the harness does."""
        prompt = self.opening("x")
        continuations: list[list[Told]] = [[Told("user", "y")]]
        if self._tools is not None:
            continuations.append([Told("tool", "y")])
            if self._agent.compaction is not None:
                continuations.append([Told("tool", "y"), Told("user", "z")])
        for text in _WHOLE_REPLIES:
            reply = [*self._tokenizer.encode(text), self._end]
            if all(
                self._bridge(prompt, reply, [self._message(one) for one in told])
                for told in continuations
            ):
                return reply
        raise ConfigurationError(
            f"renderer '{renderer}' can't extend a conversation token by token",
            "model.renderer",
            "choose a renderer with a bridge, such as 'chatml'",
        )

    def _call_closer(self) -> str:
        """What the renderer writes behind a call's last argument, up to the turn's end."""
        function = {"name": TOOL_NAME, "arguments": {"command": _PROBE}}
        messages: list[Any] = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "functions.bash:0", "type": "function", "function": function}
                ],
            },
        ]
        ids = self._renderer.render_ids(messages, tools=self._tools)
        _, _, rest = self._tokenizer.decode(ids).rpartition(_PROBE)
        for stop in self.stop_token_ids:
            rest = rest.partition(self._tokenizer.decode(stop))[0]
        return rest


def _missing(text: str, closer: str) -> str:
    """The part of `closer` that `text` doesn't already end with."""
    for written in range(len(closer) - 1, 0, -1):
        if text.endswith(closer[:written]):
            return closer[written:]
    return closer


def _renderer(tokenizer: FastTokenizer, model: ModelConfig) -> Renderer:
    """The renderer that `model.renderer` names."""
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import config_from_name

    if model.renderer == "chatml":
        from rl.agent.chatml import ChatMLRenderer

        return ChatMLRenderer(tokenizer)
    # Looked up here: what the package does for a model that it doesn't know takes a network.
    name = MODEL_RENDERER_MAP.get(model.name) if model.renderer == "auto" else model.renderer
    remedy = "name one explicitly, such as 'chatml' or 'qwen3'"
    if name is None:
        raise ConfigurationError(
            f"the renderers package has none for model '{model.name}'", "model.renderer", remedy
        )
    try:
        config = cast(Any, config_from_name(name))
        # Reasoning once sampled stays: a conversation is extended, never rendered again.
        return create_renderer(tokenizer, type(config)(thinking_retention="all"))
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"no renderer '{name}' for model '{model.name}': {error}", "model.renderer", remedy
        ) from error
