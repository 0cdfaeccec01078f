"""TRL's update: `GRPOTrainer.training_step` on given completions, then clip and AdamW.

How it is driven: the trainer is made as its users make it, with the base model, a
`LoraConfig` and a `GRPOConfig`, and fp32 without recomputed activations, like the other
contenders. Its `_generate_and_score_completions` is replaced by one that returns what it
would have returned for the given attempts: prompts and completions padded to the
batch's longest, their masks, the tool mask and the advantages. From there on everything
is TRL's own: shuffling, the split into micro-batches, the fused head, the loss, and
accelerate's backward. No old or reference logprobs are asked for (one iteration,
beta 0), so each token passes through the model once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.training.padded import CLIP, CLIP_NORM, LEARNING_RATE, centred, lora_config
from benchmarks.training.workload import Attempt


class Trl:
    """The contender."""

    def __init__(self, model_dir: Path, budget: int) -> None:
        """Load the model; `budget` is of padded tokens per micro-batch."""
        self._model_dir, self._budget = model_dir, budget
        self._trainers: dict[tuple[int, int], Any] = {}

    def prepare(self, groups: list[list[Attempt]]) -> None:
        """Make the trainer that `update` needs for batches like `groups`."""
        self._trainer(groups)

    def update(self, groups: list[list[Attempt]]) -> None:
        """One optimizer step on all of `groups`."""
        trainer, steps = self._trainer(groups)
        batch = _batch(groups)

        def given(_: Any) -> dict[str, Any]:
            return dict(batch)

        trainer._generate_and_score_completions = given
        trainer._buffered_inputs, trainer._step = None, 0
        trainer.current_gradient_accumulation_steps = steps
        trainer.model.train()
        weights = [w for w in trainer.model.parameters() if w.requires_grad]
        for _ in range(steps):
            trainer.training_step(trainer.model, [], batch["num_items_in_batch"])
        clip_grad_norm_(weights, CLIP_NORM)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    def _trainer(self, groups: list[list[Attempt]]) -> tuple[Any, int]:
        """A trainer for batches of this shape, and its micro-batches per update."""
        attempts = [attempt for group in groups for attempt in group]
        longest = max(len(attempt.prompt) + len(attempt.tail) for attempt in attempts)
        rows = min(len(attempts), max(1, self._budget // longest))
        while len(attempts) % rows:  # TRL's micro-batches are all of one size
            rows -= 1
        steps = len(attempts) // rows
        if (rows, steps) not in self._trainers:
            self._trainers.clear()  # one model at a time
            self._trainers[rows, steps] = self._make(rows, steps, len(groups[0]))
        return self._trainers[rows, steps], steps

    def _make(self, rows: int, steps: int, generations: int) -> Any:
        words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        )
        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            steps_per_generation=steps,
            num_generations=generations,
            learning_rate=LEARNING_RATE,
            epsilon=CLIP,
            beta=0.0,
            scale_rewards="none",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        base: Any = AutoModelForCausalLM.from_pretrained(str(self._model_dir), dtype=torch.float32)
        trainer = GRPOTrainer(
            model=base,
            reward_funcs=_no_reward,
            args=settings,
            train_dataset=datasets.Dataset.from_list([{"prompt": "x"}] * rows * steps),
            processing_class=tokenizer,
            peft_config=lora_config(),
        )
        trainer.create_optimizer()
        return trainer


def _no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    """Never asked: the attempts come with their advantages."""
    return [None] * len(completions)


def _batch(groups: list[list[Attempt]]) -> dict[str, Any]:
    """What TRL's generation hands to its loss: prompts left, completions right of a seam."""
    attempts = [attempt for group in groups for attempt in group]
    prompts = [torch.tensor(attempt.prompt) for attempt in attempts]
    tails = [torch.tensor(attempt.tail) for attempt in attempts]
    sampled = [torch.tensor(attempt.sampled).long() for attempt in attempts]
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence(
            [torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left"
        ),
        "completion_ids": pad_sequence(tails, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(t) for t in tails], batch_first=True),
        "tool_mask": pad_sequence(sampled, batch_first=True),
        "advantages": torch.tensor([a for group in groups for a in centred(group)]),
        "num_items_in_batch": torch.stack([bits.sum() for bits in sampled]).sum(),
    }
