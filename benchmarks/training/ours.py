"""Our update: `PeftLearner`, group by group, as the trainer drives it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.training.padded import ALPHA, CLIP_NORM, LEARNING_RATE, RANK
from benchmarks.training.workload import Attempt
from rl.config import CampaignConfig
from rl.config_file import parse_config
from rl.learner.peft_learner import PeftLearner
from rl.records import EpisodeRecord, Group, Sample

SAMPLER_LOGPROB = -2.0  # nats; its value changes what is clipped, not what is computed


class Ours:
    """The contender."""

    def __init__(self, model_dir: Path, budget: int, threads: int) -> None:
        """Load the model; `budget` is of computed tokens per micro-batch."""
        self._learner = PeftLearner(_config(budget, threads), model_dir)

    def prepare(self, groups: list[list[Attempt]]) -> None:
        """Nothing is needed beforehand."""

    def update(self, groups: list[list[Attempt]]) -> None:
        """One optimizer step on all of `groups`."""
        version = self._learner.version
        for index, attempts in enumerate(groups):
            self._learner.accumulate(version + 1, _group(f"g{index}", version, attempts))
        self._learner.step(version + 1)


def _group(group_id: str, version: int, attempts: list[Attempt]) -> Group:
    episodes = [
        EpisodeRecord(
            attempt_id=f"{group_id}-{index}",
            group_id=group_id,
            task_name="task",
            task_digest="0" * 64,
            version=version,
            replica=0,
            outcome="graded",
            reward=attempt.reward,
            stop_reason="completed",
            samples=[
                Sample(
                    token_ids=attempt.prompt + attempt.tail,
                    sampled=[False] * len(attempt.prompt) + attempt.sampled,
                    logprobs=[0.0] * len(attempt.prompt)
                    + [SAMPLER_LOGPROB if bit else 0.0 for bit in attempt.sampled],
                )
            ],
            started_at=0.0,
        )
        for index, attempt in enumerate(attempts)
    ]
    return Group(group_id=group_id, task_name="task", version=version, episodes=episodes)


def _config(budget: int, threads: int) -> CampaignConfig:
    return parse_config(
        {
            "name": "train-step",
            "seed": 0,
            "model": {"source": "path", "name": "model", "path": "x", "dtype": "float32"},
            "tasks": {"train": 4, "heldout": 2},
            "agent": {
                "system_prompt": "x",
                "max_turns": 1,
                "max_new_tokens": 8,
                "temperature": 1.0,
            },
            "episodes": {"concurrency": 8, "deadline_s": 300.0},
            "schedule": {"updates": 8, "batch_size": 8, "group_size": 4},
            "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 128},
            "trainer": {
                "device": "cpu",
                "threads": threads,
                "lora": {"rank": RANK, "alpha": ALPHA},
                "optimizer": {"lr": LEARNING_RATE, "clip_norm": CLIP_NORM},
                "loss": {"name": "ppo_clip"},
                "micro_batch_tokens": budget,
            },
            "heldout": {"attempts": 1},
            "limits": {"watchdog_s": 1000},
        },
        "benchmarks.train_step",
    )
