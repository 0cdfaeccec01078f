"""Scripted models and shells for the harness, over real renderers and tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken

from rl.agent.chat import Chat
from rl.agent.harness import AgentResult, BashAgent, Generated
from rl.agent.shell import CommandResult
from rl.agent_config import AgentConfig
from rl.config import ModelConfig
from rl.errors import SandboxError
from rl.learner.stand_in import train_tokenizer
from rl.records import Sample

CORPUS = (
    "system user assistant tool bash name arguments command function parameter",
    "```bash\nmkdir data\n```",
    '{"name": "bash", "arguments": {"command": "ls -la"}}',
    "Use bash. Do it. Your summary of that: exit status 0",
)
END = "<|im_end|>"
RENDERERS = ("chatml", "qwen3", "prime-qwen3", "qwen3.5", "kimi-k2", "llama-3", "nemotron-3")
# What the renderers of Qwen, Llama and Kimi look up; only the latter are control tokens.
WORDS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CONTROLS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|python_tag|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer that every renderer used here finds its tokens in."""
    directory.mkdir(parents=True, exist_ok=True)
    bpe = train_tokenizer(CORPUS)
    bpe.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROLS])
    bpe.save(str(directory / "tokenizer.json"))
    return directory


def agent_config(**changes: object) -> AgentConfig:
    """Three turns of fenced commands, with one recovery."""
    values: dict[str, object] = {
        "system_prompt": "Use bash.",
        "call_format": "fenced",
        "max_turns": 3,
        "max_new_tokens": 40,
        "max_recoveries": 1,
    }
    return AgentConfig.model_validate(values | changes)


def make_chat(model_dir: Path, config: AgentConfig, renderer: str = "chatml") -> Chat:
    """The chat of a renderer over the tokenizer in `model_dir`."""
    model = ModelConfig(source="path", name="t", path=str(model_dir), renderer=renderer)
    return Chat(model_dir, model, config)


def ids_of(chat: Chat, text: str) -> list[int]:
    """The tokens of `text`, control tokens included."""
    return chat._tokenizer.encode(text)


class Model(Protocol):
    """Answers prompts in one chat's tokens."""

    chat: Chat

    async def __call__(
        self, prompt: list[int], number: int, most: int, left: float
    ) -> Generated: ...


class ScriptedModel:
    """Replies in turn, with a logprob of its own for each token; remembers the prompts.

    Replies whose number is in `cut` are ended by the length limit.
    """

    def __init__(self, chat: Chat, replies: Sequence[str], cut: Sequence[int] = ()) -> None:
        self.chat = chat
        self.replies = [ids_of(chat, reply) for reply in replies]
        self.logprobs = [
            [-(1 + number) - index / 1000 for index in range(len(ids))]
            for number, ids in enumerate(self.replies)
        ]
        self.cut = cut
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []

    async def __call__(self, prompt: list[int], number: int, most: int, left: float) -> Generated:
        del left
        self.prompts.append(prompt)
        self.limits.append(most)
        reason = "length" if number in self.cut else "stop"
        return Generated(self.replies[number], self.logprobs[number], reason)


class RecordingShell:
    """Answers every command; remembers them."""

    def __init__(
        self, output: str | Sequence[str] = "ok", delay: float = 0.0, broken: bool = False
    ) -> None:
        self.commands: list[str] = []
        self.outputs = [output] if isinstance(output, str) else list(output)
        self.delay, self.broken = delay, broken

    async def run(self, command: str, timeout_s: float, output_limit: int) -> CommandResult:
        del output_limit
        if self.broken:
            raise SandboxError("gone")
        self.commands.append(command)
        await asyncio.sleep(min(self.delay, timeout_s))
        return CommandResult(self.outputs[(len(self.commands) - 1) % len(self.outputs)], 0)


def play(
    model: Model,
    config: AgentConfig,
    shell: RecordingShell,
    seconds: float = 30.0,
    max_model_len: int = 4096,
) -> AgentResult:
    """One episode of the task "Do it."."""

    async def main() -> AgentResult:
        deadline = asyncio.get_running_loop().time() + seconds
        agent = BashAgent(model.chat, config, model, max_model_len)
        return await agent.run("Do it.", shell, deadline)

    return asyncio.run(main())


def parts(sample: Sample) -> list[tuple[bool, list[int], list[float]]]:
    """A sample's runs of sampled and of given tokens, in order."""
    runs: list[tuple[bool, list[int], list[float]]] = []
    for token, sampled, logprob in zip(
        sample.token_ids, sample.sampled, sample.logprobs, strict=True
    ):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, [], []))
        runs[-1][1].append(token)
        runs[-1][2].append(logprob)
    return runs
