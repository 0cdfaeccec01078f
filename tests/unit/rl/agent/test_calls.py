"""What a reply asks for."""

from __future__ import annotations

from typing import Any

import pytest
from renderers.base import ParsedToolCall, ToolCallParseStatus

from rl.agent.calls import Call, Command, Malformed, NoCall, fenced_call, tool_call


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("```bash\nls\n```", Command("ls")),
        ("First:\n```sh\nls\ncat a\n```\nThen.", Command("ls\ncat a")),
        ("```\nls\n```", Command("ls")),
        ("```bash\nls\n```\n```bash\nrm a\n```", Command("ls", left_out=1)),
        ("```python\nprint()\n```\nProse.\n```bash\nls\n```", Command("ls")),
        ("```bash\nls\n```\n```bash\nrm", Command("ls")),
        ("no command", NoCall()),
    ],
)
def test_the_first_whole_shell_block_is_the_command(text: str, call: Call) -> None:
    assert fenced_call(text, cut=False) == call


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("```bash\nls", "closed"),
        ("```bash\n\n```", "empty"),
        ("```python\nprint()\n```", "bash"),
        ("```bash\na\0b\n```", "character"),
    ],
)
def test_a_block_that_can_not_be_run_is_malformed(text: str, word: str) -> None:
    call = fenced_call(text, cut=False)
    assert isinstance(call, Malformed)
    assert call.problem == "malformed"
    assert word in call.note


@pytest.mark.parametrize("text", ["```bash\nls", "Let me", "```python\nprint()"])
def test_a_cut_reply_without_a_whole_block_is_cut(text: str) -> None:
    call = fenced_call(text, cut=True)
    assert isinstance(call, Malformed)
    assert call.problem == "cut"


def parsed(arguments: Any, name: str | None = "bash", status: str = "ok") -> ParsedToolCall:
    return ParsedToolCall("", name, arguments, status=ToolCallParseStatus(status))


@pytest.mark.parametrize(
    "first",
    [
        parsed({"command": "ls"}, name="python"),
        parsed({"command": "ls"}, name=None),
        parsed({"command": 5}),
        parsed({"command": " "}),
        parsed({"command": "a\ud800b"}),
        parsed({}),
        parsed(None),
        parsed("ls"),
        parsed(None, status="invalid_json"),
        parsed(None, status="unclosed_block"),
    ],
)
def test_a_tool_call_that_can_not_be_run_is_malformed(first: ParsedToolCall) -> None:
    call = tool_call([first, parsed({"command": "ls"})], cut=False)
    assert isinstance(call, Malformed)
    assert call.problem == "malformed"


def test_a_tool_call_left_open_by_the_length_limit_is_cut() -> None:
    call = tool_call([parsed(None, status="unclosed_block")], cut=True)
    assert isinstance(call, Malformed)
    assert call.problem == "cut"
