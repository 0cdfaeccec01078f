"""A tiny model that has seen noisy demonstrations: bad at the tasks, able to learn.

Its base is low by construction: most of what it was shown is a plausible wrong
command, so that reinforcement has something to find.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from rl.agent.chat import Chat
from rl.config import AgentConfig, ModelConfig
from tests.support.campaigns import FAMILIES, SYSTEM
from tests.support.tiny_model import make_tiny_model

BANK = 240
RIGHT_SHARE = 0.3
STEPS = 220
BATCH = 32


def make_warm_model(directory: Path, seed: int = 0) -> Path:
    """Make the tiny model and train it on demonstrations, 30% of them right."""
    import torch
    from transformers import AutoModelForCausalLM

    pairs = demonstrations(seed)
    corpus = [SYSTEM, "system user assistant", *(f"{ask}\n{reply}" for ask, reply in pairs)]
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
        ids, labels = _batch(chat, rng.choices(pairs, k=BATCH))
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(directory)
    return directory


def demonstrations(seed: int) -> list[tuple[str, str]]:
    """Instruction and reply, 30% of the replies right."""
    from sandboxes.bank import write_bank

    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        # Another seed than any campaign's, so that no task of a campaign is shown.
        for package in write_bank(Path(folder), FAMILIES, BANK, 10_000 + seed):
            ask = (package / "instruction.md").read_text(encoding="utf-8").strip()
            right = (package / "solution" / "solve.sh").read_text().splitlines()[-1]
            command = right if rng.random() < RIGHT_SHARE else _wrong(right, rng)
            pairs.append((ask, f"```bash\n{command}\n```"))
    return pairs


def _wrong(command: str, rng: random.Random) -> str:
    """A plausible command that does not do the task."""
    _, *arguments = command.split(" ")
    verb = rng.choice(["ls", "cat", "echo", "cp"])
    return " ".join([verb, *arguments[-2:]])


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
