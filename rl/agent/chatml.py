"""A ChatML renderer for models that the `renderers` package has none for.

Invariants:
- The prompt equals what the model's own ChatML template makes of the messages.
- A conversation is only ever extended: `bridge_to_next_turn` returns its inputs
  unchanged as a prefix, then the tokens that close the sampled turn if it did
  not close itself, then the new messages and the next assistant header.
- Untrusted text can't contain control tokens: their spelling stays plain text.
"""

from __future__ import annotations

import json
from typing import Any

from renderers.base import (
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    ToolSpec,
)
from renderers.configs import BaseRendererConfig

from rl.agent.tokenizer import FastTokenizer

_TOOLS_HEADER = "You can call these functions:\n"
_TOOLS_FOOTER = (
    "\nTo call one, write\n<tool_call>\n"
    '{"name": <function name>, "arguments": <arguments as JSON>}\n</tool_call>'
)
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"


class ChatMLRendererConfig(BaseRendererConfig):
    """Configuration of `ChatMLRenderer`; it has no settings of its own."""


class ChatMLRenderer:
    """Messages to tokens and back, in ChatML with Hermes-style tool calls."""

    config_class = ChatMLRendererConfig

    def __init__(self, tokenizer: FastTokenizer, config: ChatMLRendererConfig | None = None):
        self.config = config or ChatMLRendererConfig()
        self._tokenizer = tokenizer
        self._start = self._special("<|im_start|>")
        self._end = self._special("<|im_end|>")
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self._stops = [self._end] if end_of_text is None else [self._end, end_of_text]

    @property
    def is_prefix_stable(self) -> bool:
        """Messages never change how earlier ones are rendered."""
        return True

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Token ids of a whole conversation, with each token's message index."""
        ids: list[int] = []
        owners: list[int] = []
        pending = self._with_tools(messages, tools)
        for index, (role, text) in enumerate(pending):
            part = self._message(role, text)
            ids.extend(part)
            owners.extend([index] * len(part))
        if add_generation_prompt:
            header = self._header("assistant")
            ids.extend(header)
            owners.extend([-1] * len(header))
        return RenderedTokens(
            token_ids=ids,
            message_indices=owners,
            message_roles=[role for role, _ in pending],
        )

    def render_ids(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of a whole conversation."""
        return self.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        ).token_ids

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[ToolSpec] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Text and tool calls of one completion; malformed calls are kept, by status."""
        del prompt_ids
        kept = [token for token in token_ids if token not in self._stops]
        text = self._tokenizer.decode(kept)
        content, *blocks = text.split(_CALL_OPEN)
        names = {str(_function(tool)["name"]) for tool in tools or []}
        calls = [self._call(block, names) for block in blocks]
        return ParsedResponse(content=content.strip(), tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        return list(self._stops)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The previous tokens, closed, with the new messages and an assistant header."""
        del tools
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        ids = [*previous_prompt_ids, *previous_completion_ids]
        if not previous_completion_ids or previous_completion_ids[-1] != self._end:
            ids.append(self._end)
        ids.extend(self._tokenizer.encode("\n"))
        owners = [-1] * len(ids)
        for index, message in enumerate(new_messages):
            part = self._message(message["role"], _text(message))
            ids.extend(part)
            owners.extend([index] * len(part))
        header = self._header("assistant")
        ids.extend(header)
        owners.extend([-1] * len(header))
        return RenderedTokens(
            token_ids=ids,
            message_indices=owners,
            message_roles=[message["role"] for message in new_messages],
        )

    def _special(self, text: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int):
            raise ValueError(f"the tokenizer has no {text} token; ChatML needs it")
        return token

    def _header(self, role: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(f"{role}\n")]

    def _message(self, role: str, text: str) -> list[int]:
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        body = self._tokenizer.encode_plain(f"{role}\n{text}")
        return [self._start, *body, self._end, *self._tokenizer.encode("\n")]

    def _with_tools(
        self, messages: list[Message], tools: list[ToolSpec] | None
    ) -> list[tuple[str, str]]:
        pairs = [(message["role"], _with_calls(message)) for message in messages]
        if not tools:
            return pairs
        listing = _TOOLS_HEADER + "\n".join(json.dumps(tool) for tool in tools) + _TOOLS_FOOTER
        if pairs and pairs[0][0] == "system":
            return [("system", f"{pairs[0][1]}\n\n{listing}"), *pairs[1:]]
        return [("system", listing), *pairs]

    def _call(self, block: str, names: set[str]) -> ParsedToolCall:
        raw, closed, _ = block.partition(_CALL_CLOSE)
        if not closed:
            return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
        try:
            data: Any = json.loads(raw)
        except (ValueError, RecursionError):
            return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
        if not isinstance(data, dict) or not isinstance(data.get("arguments", {}), dict):
            return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        name = data.get("name")
        if not isinstance(name, str) or not name:
            return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
        status = (
            ToolCallParseStatus.UNKNOWN_TOOL
            if names and name not in names
            else ToolCallParseStatus.OK
        )
        return ParsedToolCall(
            raw=raw, name=name, arguments=data.get("arguments", {}), status=status
        )


def _function(tool: ToolSpec) -> dict[str, Any]:
    """The function inside OpenAI's envelope, or the bare specification."""
    spec: dict[str, Any] = dict(tool)
    return spec.get("function", spec)


def _with_calls(message: Message) -> str:
    """A message's text, with the calls of an assistant's as it writes them."""
    parts = [_text(message)]
    for call in message.get("tool_calls") or []:
        function: Any = call.get("function")
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]})
        parts.append(f"{_CALL_OPEN}\n{body}\n{_CALL_CLOSE}")
    return "\n".join(part for part in parts if part)


def _text(message: Message) -> str:
    """A message's content as text; only text is supported."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)
