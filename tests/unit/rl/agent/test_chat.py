"""Conversations as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.agent.calls import Command, Malformed
from rl.agent.chat import Told
from rl.errors import ConfigurationError
from rl.learner.tree import common_length
from tests.unit.rl.agent.scripted import (
    RENDERERS,
    agent_config,
    ids_of,
    make_chat,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("renderer", ["no-such", "auto", "glm-4.5"])
def test_a_renderer_that_can_not_serve_is_refused_when_it_is_chosen(
    model_dir: Path, renderer: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.renderer"):
        make_chat(model_dir, agent_config(call_format="tool"), renderer)


@pytest.mark.parametrize("arguments", ["[" * 4000, "9" * 5000, '{"a":' * 4000])
def test_a_call_that_breaks_the_parser_is_malformed(model_dir: Path, arguments: str) -> None:
    chat = make_chat(model_dir, agent_config(call_format="tool"), "qwen3")
    prompt = chat.opening("x")
    reply = ids_of(chat, f'<tool_call>\n{{"name": "bash", "arguments": {arguments}\n</tool_call>')
    assert isinstance(chat.call(prompt, reply, cut=False), Malformed)
    extended = chat.extend(prompt, reply, [Told("user", "y")])
    assert extended is not None
    assert extended[: len(prompt) + len(reply)] == prompt + reply


COMMAND = "rm -rf /important"
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "functions.bash:0",
            "type": "function",
            "function": {"name": "bash", "arguments": {"command": COMMAND}},
        }
    ],
}


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_call_cut_anywhere_is_never_a_part_of_its_command(model_dir: Path, renderer: str) -> None:
    chat = make_chat(model_dir, agent_config(call_format="tool"), renderer)
    prompt = chat.opening("x")
    system: Any = {"role": "system", "content": "Use bash."}
    messages: list[Any] = [system, {"role": "user", "content": "x"}, CALL]
    whole = chat._renderer.render_ids(messages, tools=chat._tools)
    shared = common_length(prompt, whole)
    prompt, reply = whole[:shared], whole[shared:]
    assert chat.call(prompt, reply, cut=False) == Command(COMMAND)
    for length in range(1, len(reply)):
        call = chat.call(prompt, reply[:length], cut=True)
        assert isinstance(call, Malformed) or call == Command(COMMAND)
        closed = chat.extend(prompt, reply[:length], [Told("user", "y")])
        assert closed is not None
        assert closed[: shared + length] == whole[: shared + length]


def test_a_handover_follows_the_task_and_leaves_it_as_it_is(model_dir: Path) -> None:
    chat = make_chat(model_dir, agent_config())
    plain, handed = chat.opening("Do it."), chat.opening("Do it.", "Go on.")
    header = len(ids_of(chat, "<|im_start|>assistant\n"))
    assert handed[: len(plain) - header] == plain[:-header]
    assert "Go on." in chat.decode(handed[len(plain) - header :])


def test_text_with_control_words_is_readable_and_controls_nothing(model_dir: Path) -> None:
    chat = make_chat(model_dir, agent_config(), "qwen3")
    tokenizer = chat._tokenizer
    text = "a <|im_end|> b <tool_call> <<|im_end|>"
    ids = tokenizer.encode(tokenizer.defused(text))
    controls = {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<tool_call>")}
    assert not controls & set(ids)
    assert tokenizer.decode(ids).replace("\u2060", "") == text
    assert tokenizer.defused("if a < b: pass") == "if a < b: pass"
