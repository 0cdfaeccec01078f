"""The harness over chat completions, against a server of its own protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from rl.agent import chat_completions
from rl.agent.chat_completions import ChatCompletionsAgent, Server
from rl.agent.harness import AgentResult
from rl.agent.shell import CommandResult
from rl.agent_config import AgentConfig
from rl.errors import EngineError

type Answer = Callable[[list[dict[str, Any]]], web.Response]


class EchoShell:
    """Prints the command that it is given."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        self.ran.append(command)
        return CommandResult(f"ran {command}", 0)


def reply(content: str | None = None, *arguments: str, reason: str = "stop") -> web.Response:
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": "bash", "arguments": text}}
        for at, text in enumerate(arguments)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return web.json_response(
        {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}
    )


def command(text: str) -> str:
    return json.dumps({"command": text})


def run(
    *answers: web.Response | Answer, limit_s: float = 20.0, **changes: Any
) -> tuple[AgentResult, list[str], list[dict[str, Any]]]:
    """The result, the commands run, and the requests that the server got."""
    config = AgentConfig.model_validate(
        {"system_prompt": "Use bash.", "max_turns": 4, "max_new_tokens": 50, **changes}
    )
    requests: list[dict[str, Any]] = []
    waiting = list(answers)

    async def complete(request: web.Request) -> web.Response:
        requests.append(await request.json())
        if not waiting:
            await asyncio.Event().wait()
        answer = waiting.pop(0)
        return answer if isinstance(answer, web.Response) else answer(requests[-1]["messages"])

    async def main() -> tuple[AgentResult, list[str]]:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        shell = EchoShell()
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")
        try:
            deadline = asyncio.get_running_loop().time() + limit_s
            result = await ChatCompletionsAgent(server, config, 7).run("Do it.", shell, deadline)
        finally:
            await runner.cleanup()
        return result, shell.ran

    result, ran = asyncio.run(main())
    return result, ran, requests


def test_tool_calls_are_run_and_answered() -> None:
    result, ran, requests = run(reply(None, command("ls"), command("pwd")), reply("Done."))
    assert (result.stop_reason, result.samples, ran) == ("completed", [], ["ls"])
    assert [turn.command for turn in result.turns] == ["ls", None]
    assert result.turns[0].left_out == 1
    assistant, first, second = requests[1]["messages"][2:]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c0", "c1"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("c0", "c1")
    assert first["content"].startswith("ran ls\n[exit status 0]")
    assert second["content"] == chat_completions.NOT_RUN
    assert [request["seed"] for request in requests] == [7, 8]


def test_fenced_blocks_are_run_and_answered() -> None:
    result, ran, requests = run(
        reply("First:\n```bash\nls\n```"), reply("Done."), call_format="fenced"
    )
    assert (result.stop_reason, ran) == ("completed", ["ls"])
    assert "tools" not in requests[0]
    assert requests[1]["messages"][-1] == {"role": "user", "content": "ran ls\n[exit status 0]"}


@pytest.mark.parametrize(
    ("answer", "changes", "problem"),
    [
        (reply(None, '{"command": "rm -r', reason="length"), {}, "cut"),
        (reply(None, "no json"), {}, "malformed"),
        (reply(None, '{"cmd": "ls"}'), {}, "malformed"),
        (reply(None, "[" * 100_000), {}, "malformed"),
        (reply("```bash\nrm -r", reason="length"), {"call_format": "fenced"}, "cut"),
        (reply("Hello."), {}, "no_call"),
        (reply("half \ud83d of a character"), {}, "no_call"),
    ],
)
def test_unusable_reply_is_not_run_and_the_model_is_told(
    answer: web.Response, changes: dict[str, Any], problem: str
) -> None:
    result, ran, requests = run(answer, reply("Bye."), max_recoveries=1, **changes)
    assert (result.stop_reason, ran) == ("no_command", [])
    assert result.turns[0].problem == problem
    assert result.turns[0].model_dump_json()  # it can be kept
    sent = requests[1]["messages"][-2:]
    assert "tool_calls" not in sent[0]
    assert sent[1] == {"role": "user", "content": result.turns[0].note}


def test_turns_and_time_run_out() -> None:
    result, ran, _ = run(*(reply(None, command("ls")) for _ in range(2)), max_turns=2)
    assert (result.stop_reason, len(ran)) == ("turn_limit", 2)
    result, ran, _ = run(reply(None, command("ls")), limit_s=1.0)  # then it says nothing
    assert (result.stop_reason, ran) == ("time_limit", ["ls"])


def test_full_context_ends_the_episode() -> None:
    full = web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)
    result, ran, _ = run(reply(None, command("ls")), full)
    assert (result.stop_reason, ran) == ("context_limit", ["ls"])


def test_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_completions, "FIRST_BACKOFF_S", 0.01)
    busy = [web.Response(status=429), web.Response(status=503)]
    result, ran, requests = run(*busy, reply(None, command("ls")), reply("Done."))
    assert (result.stop_reason, ran, len(requests)) == ("completed", ["ls"], 4)


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=401, text="no key"),
        web.json_response({"choices": []}),
        web.json_response({"choices": [{"message": {"content": "x", "tool_calls": [1]}}]}),
        web.Response(text="<html>"),
    ],
)
def test_other_failure_is_the_engines(answer: web.Response) -> None:
    with pytest.raises(EngineError) as caught:
        run(answer)
    assert caught.value.where.endswith("/v1/chat/completions") and caught.value.remedy
