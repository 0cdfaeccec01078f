"""A tiny model that has seen noisy demonstrations: bad at the tasks, able to learn.

Its base is low by construction: it has seen the campaign's own tasks, most often
with a plausible wrong command, so that rewards differ within a group and
reinforcement has something to find.  It generalises to nothing.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from rl.agent.chat import Chat
from rl.agent_config import AgentConfig
from rl.config import ModelConfig
from rl.learner.stand_in import make_tiny_model
from tests.support.campaigns import FAMILIES, SMALL_TASKS, SYSTEM

RIGHT_SHARE = 0.4
STEPS = 150
WRONG_VERBS = ("ls", "cat", "echo", "wc")
BATCH = 24


def make_warm_model(directory: Path, seed: int = 0) -> Path:
    """Make the tiny model and train it on demonstrations, 30% of them right."""
    import torch
    from transformers import AutoModelForCausalLM

    tasks = asks_and_commands()
    wrong = " ".join(WRONG_VERBS)
    corpus = [SYSTEM, f"system user assistant bash {wrong}", *(" ".join(pair) for pair in tasks)]
    make_tiny_model(directory, corpus, seed)
    agent = AgentConfig(system_prompt=SYSTEM, call_format="fenced", max_turns=1, max_new_tokens=24)
    chat = Chat(
        directory,
        ModelConfig(source="path", name="tiny", path=str(directory), renderer="chatml"),
        agent,
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(seed)
    for _ in range(STEPS):
        pairs = [(ask, _reply(right, rng)) for ask, right in rng.choices(tasks, k=BATCH)]
        ids, labels = _batch(chat, pairs)
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(directory)
    return directory


def asks_and_commands() -> list[tuple[str, str]]:
    """Instruction and right command of every task that `small_config` draws on."""
    from sandboxes.bank import write_bank

    tasks: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for package in write_bank(Path(folder), FAMILIES, SMALL_TASKS, 0):
            ask = (package / "instruction.md").read_text(encoding="utf-8").strip()
            tasks.append((ask, (package / "solution" / "solve.sh").read_text().splitlines()[-1]))
    return tasks


def _reply(command: str, rng: random.Random) -> str:
    """The right command, or a plausible one that does not do the task."""
    if rng.random() >= RIGHT_SHARE:
        command = " ".join([rng.choice(WRONG_VERBS), *command.split(" ")[-2:]])
    return f"```bash\n{command}\n```"


def _batch(chat: Chat, pairs: list[tuple[str, str]]) -> tuple[Any, Any]:
    """Right-padded ids and labels, the prompt masked."""
    import torch

    rows = []
    for ask, reply in pairs:
        prompt = chat.opening(ask)
        answer = [*chat._tokenizer.encode(reply), chat.stop_token_ids[0]]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in rows])
    return ids, labels
