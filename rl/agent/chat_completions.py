"""The bash-tool harness over a server that only speaks chat completions.

For evaluation with models that run elsewhere: nothing is known of tokens here, so
nothing that it leaves behind can be trained on (`rl.agent.harness` is for that).

Invariants:
- A command is run only if the model finished writing it: a call that was cut by the
  length limit, or is malformed, is never executed.
- `run` returns before its deadline whatever the model does; running out of time,
  turns or context is the model's doing.
- A request is repeated only when the server is busy or gone, a bounded number of
  times within the same deadline; any other failure of it is an `EngineError`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from rl.agent.calls import Command, Malformed, NoCall, fenced_call, tool_call
from rl.agent.chat import BASH_TOOL
from rl.agent.harness import MIN_USEFUL_S, NO_CALL_NOTE, AgentResult
from rl.agent.shell import Shell
from rl.agent_config import AgentConfig
from rl.errors import EngineError
from rl.records import StopReason, TurnRecord

if TYPE_CHECKING:
    from rl.agent.calls import Call

MAX_TRIES = 4  # of one request
FIRST_BACKOFF_S = 0.5  # doubled at each further try
BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
ERROR_EXCERPT = 500  # characters of an error answer that are kept
NOT_RUN = "not run: one command at a time"
# How servers say that a conversation has grown too long: OpenAI's code, and vLLM's words.
TOO_LONG = ("context_length_exceeded", "maximum context length")


@dataclass(frozen=True, slots=True)
class Server:
    """Where chat completions are asked for.

    Attributes:
        base_url: up to and including the version, such as http://localhost:8000/v1.
        model: the name it serves the model under.
        api_key: sent as a bearer token, if there is one.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class _Reply:
    """One completion: its message as it is sent back, and what it asks for."""

    text: str
    calls: list[dict[str, Any]]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ContextFull(Exception):
    """The server takes no longer conversation."""


class ChatCompletionsAgent:
    """Runs one model on one task through a bash tool.

    Args:
        server: serves the model.
        config: turns, limits and the call format; compaction is not done here.
        seed: of the first turn's sampling; None: the server draws one.
    """

    def __init__(self, server: Server, config: AgentConfig, seed: int | None = None) -> None:
        self._server = server
        self._config = config
        self._seed = seed

    async def run(self, instruction: str, shell: Shell, deadline: float) -> AgentResult:
        """Run the episode's turns.

        Args:
            instruction: the task's text.
            shell: the sandbox.
            deadline: on the running loop's clock, s.

        Raises:
            InfrastructureError: server or sandbox failed.
        """
        messages = self._opening(instruction)
        turns: list[TurnRecord] = []
        key = self._server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None)  # the deadline bounds every request
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            stop = await self._turns(session, messages, turns, shell, deadline)
        return AgentResult(stop, [], turns)

    def _opening(self, instruction: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [_message("system", self._config.system_prompt)]
        for example in self._config.examples:
            messages.append(_message("user", example.user))
            messages.append(_message("assistant", example.assistant))
        return [*messages, _message("user", instruction.strip())]

    async def _turns(
        self,
        session: aiohttp.ClientSession,
        messages: list[dict[str, Any]],
        turns: list[TurnRecord],
        shell: Shell,
        deadline: float,
    ) -> StopReason:
        """Turn after turn until something ends the episode; says what did."""
        loop = asyncio.get_running_loop()
        failures = 0
        for turn in range(self._config.max_turns):
            began = loop.time()
            try:
                async with asyncio.timeout_at(deadline):
                    reply = await self._complete(session, messages, turn)
            except TimeoutError:
                return "time_limit"
            except ContextFull:
                return "context_limit"
            call = self._call(reply)
            record = TurnRecord(
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                text=reply.text,
                finish_reason=reply.finish_reason,
                generate_s=loop.time() - began,
            )
            if isinstance(call, NoCall) and any(one.command is not None for one in turns):
                turns.append(record)
                return "completed"
            record = await self._act(call, record, shell, deadline)
            turns.append(record)
            if loop.time() >= deadline or (isinstance(call, Command) and record.command is None):
                return "time_limit"
            failures = 0 if isinstance(call, Command) else failures + 1
            if failures > self._config.max_recoveries:
                return "no_command"
            messages += self._continuation(reply, record)
        if all(one.command is None for one in turns):
            return "no_command"
        return "completed" if self._config.max_turns == 1 else "turn_limit"

    async def _complete(
        self, session: aiohttp.ClientSession, messages: Sequence[Mapping[str, Any]], turn: int
    ) -> _Reply:
        """One completion of the conversation so far."""
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": messages,
            "max_tokens": self._config.max_new_tokens,
            "temperature": self._config.temperature,
        }
        if self._config.call_format == "tool":
            body["tools"] = [BASH_TOOL]
        if self._seed is not None:
            body["seed"] = self._seed + turn
        url = f"{self._server.base_url.rstrip('/')}/chat/completions"
        backoff = FIRST_BACKOFF_S
        for left in range(MAX_TRIES - 1, -1, -1):
            try:
                async with session.post(url, json=body) as response:
                    status, text = response.status, await response.text()
            except aiohttp.ClientError as error:
                problem = f"connection failed: {type(error).__name__}: {error}"
            else:
                if status == 200:
                    return _reply(text, url)
                if 400 <= status < 500 and any(words in text for words in TOO_LONG):
                    raise ContextFull
                problem = f"HTTP {status}: {text[:ERROR_EXCERPT].strip()}"
                left = left if status in BUSY_STATUSES else 0
            if not left:
                raise EngineError(problem, url, "check the server's address, key and log")
            await asyncio.sleep(backoff)
            backoff *= 2
        raise AssertionError("the last try returns or raises")

    def _call(self, reply: _Reply) -> Call:
        cut = reply.finish_reason == "length"
        if self._config.call_format == "fenced":
            return fenced_call(reply.text, cut)
        return tool_call([_parsed(call, cut) for call in reply.calls], cut)

    async def _act(
        self, call: Call, record: TurnRecord, shell: Shell, deadline: float
    ) -> TurnRecord:
        """Run the command, if there is time, or note why there is none."""
        if isinstance(call, Malformed):
            return record.model_copy(update={"problem": call.problem, "note": call.note})
        if isinstance(call, NoCall):
            return record.model_copy(update={"problem": "no_call", "note": NO_CALL_NOTE})
        loop = asyncio.get_running_loop()
        began = loop.time()
        left = deadline - began
        if left < MIN_USEFUL_S:
            return record
        limit = min(self._config.command_timeout_s, left)
        result = await shell.run(call.text, limit, self._config.output_limit_bytes)
        return record.model_copy(
            update={
                "command": call.text,
                "left_out": call.left_out,
                "exit_code": result.exit_code,
                "output": result.output,
                "execute_s": loop.time() - began,
            }
        )

    def _continuation(self, reply: _Reply, record: TurnRecord) -> list[dict[str, Any]]:
        """The messages of one turn; a call that can't be sent back is left out of them."""
        if record.command is None or self._config.call_format == "fenced":
            return [_message("assistant", reply.text), _message("user", record.answer)]
        answers = [record.answer, *[NOT_RUN] * (len(reply.calls) - 1)]
        return [
            {**_message("assistant", reply.text), "tool_calls": reply.calls},
            *(
                {**_message("tool", answer), "tool_call_id": call.get("id", "")}
                for call, answer in zip(reply.calls, answers, strict=True)
            ),
        ]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _reply(text: str, url: str) -> _Reply:
    """The one choice of an answer.

    Raises:
        EngineError: it is no chat completion.
    """
    try:
        answer = json.loads(text)
        choice = answer["choices"][0]
        message = choice["message"]
        usage = answer.get("usage") or {}
        return _Reply(
            text=_storable(str(message.get("content") or "")),
            calls=[dict(call) for call in message.get("tool_calls") or []],
            finish_reason=str(choice.get("finish_reason") or "stop"),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"the answer is no chat completion ({error!r}): {text[:ERROR_EXCERPT]}"
        raise EngineError(what, url, "check that the address is that of an OpenAI API") from None


def _storable(text: str) -> str:
    """`text` without the halves of characters that JSON can spell and no file can hold."""
    return text.encode("utf-8", errors="replace").decode()


def _parsed(call: Mapping[str, Any], cut: bool) -> Any:
    """A server's tool call as the renderers' parsers would give it."""
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    given: Any = call.get("function")
    function = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    raw = function.get("arguments")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        broken = ToolCallParseStatus.UNCLOSED_BLOCK if cut else ToolCallParseStatus.INVALID_JSON
        return ParsedToolCall(raw=str(raw), status=broken)
    return ParsedToolCall(
        raw=str(raw), name=function.get("name"), arguments=arguments, status=ToolCallParseStatus.OK
    )
