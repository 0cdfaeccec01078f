"""A tiny random Llama and groups sampled from it, for the learner's tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl.config import CampaignConfig
from rl.config_file import parse_config
from rl.learner.peft_learner import PeftLearner
from rl.records import AdapterBytes, EpisodeRecord, Group, Sample

VOCABULARY = 64
TEMPERATURE = 0.7


def write_model(path: Path) -> Path:
    """A grouped-query Llama of two layers with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.15,
                max_position_embeddings=128,
                tie_word_embeddings=False,
            )
        )
    model.save_pretrained(str(path))
    return path


def make_config(**trainer: Any) -> CampaignConfig:
    """A campaign whose trainer section is completed by `trainer`."""
    return parse_config(
        {
            "name": "tiny",
            "seed": 5,
            "model": {"source": "path", "name": "tiny-llama", "path": "x", "dtype": "float32"},
            "tasks": {"train": 4, "heldout": 2},
            "agent": {
                "system_prompt": "x",
                "max_turns": 1,
                "max_new_tokens": 8,
                "temperature": TEMPERATURE,
            },
            "episodes": {"concurrency": 8, "deadline_s": 300.0},
            "schedule": {"updates": 8, "batch_size": 8, "group_size": 4},
            "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 128},
            "trainer": {
                "device": "cpu",
                "threads": 1,
                "lora": {"rank": 4, "alpha": 8},
                "optimizer": {"lr": 1e-2, "warmup_updates": 2},
                **trainer,
            },
            "heldout": {"attempts": 1},
            "limits": {"watchdog_s": 1000},
        },
        "test",
    )


def make_episode(
    samples: list[Sample], reward: float, group_id: str = "g", index: int = 0, version: int = 0
) -> EpisodeRecord:
    """A graded episode."""
    return EpisodeRecord(
        attempt_id=f"{group_id}-{index}",
        group_id=group_id,
        task_name="task",
        task_digest="0" * 64,
        version=version,
        replica=0,
        outcome="graded",
        reward=reward,
        stop_reason="completed",
        samples=samples,
        started_at=0.0,
    )


def make_group(episodes: list[EpisodeRecord]) -> Group:
    """The group of `episodes`, of the first one's id and version."""
    first = episodes[0]
    return Group(
        group_id=first.group_id,
        task_name=first.task_name,
        version=first.version,
        episodes=episodes,
    )


def random_group(group_id: str, seed: int, version: int = 0, prompt: int = 24) -> Group:
    """Four attempts with one prompt, random tokens and plausible sampler logprobs."""
    draw = random.Random(seed)
    head = [draw.randrange(VOCABULARY) for _ in range(prompt)]
    episodes: list[EpisodeRecord] = []
    for index in range(4):
        length = draw.randrange(1, 9)
        tail = [draw.randrange(VOCABULARY) for _ in range(length)]
        sampled = [True] * length
        if length > 3:
            sampled[2] = False  # a synthetic closer in the middle
        sample = Sample(
            token_ids=head + tail,
            sampled=[False] * prompt + sampled,
            logprobs=[0.0] * prompt + [draw.uniform(-6, -2) if s else 0.0 for s in sampled],
        )
        episodes.append(make_episode([sample], float(index % 2), group_id, index, version))
    return make_group(episodes)


def trained(model_dir: Path, updates: int, learner: PeftLearner | None = None) -> PeftLearner:
    """A learner `updates` further, on groups that depend on the update alone."""
    learner = learner or PeftLearner(make_config(), model_dir)
    for update in range(learner.version + 1, learner.version + updates + 1):
        for index in range(2):
            learner.accumulate(update, random_group(f"g{index}", 10 * update + index, update - 1))
        learner.step(update)
    return learner


def gradients(learner: PeftLearner) -> list[torch.Tensor]:
    """Copies of the gradients accumulated so far."""
    return [weight.grad.clone() for weight in learner._policy.parameters if weight.grad is not None]


def write_adapter(adapter: AdapterBytes, path: Path) -> Path:
    """The adapter as a PEFT directory."""
    path.mkdir()
    for name, content in adapter.files.items():
        (path / name).write_bytes(content)
    return path
