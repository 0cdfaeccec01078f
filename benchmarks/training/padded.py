"""The plain loop: PEFT, rows padded to one length, the loss over the model's own logits.

What a person writes first: `model(input_ids, attention_mask).logits` of whole rows,
`log_softmax`, gather, a clipped ratio, backward, clip, AdamW. A micro-batch holds as
many whole rows as fit into the token budget.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.training.workload import Attempt

RANK, ALPHA, LEARNING_RATE, CLIP_NORM, CLIP = 16, 32, 1e-5, 1.0, 0.2


def lora_model(model_dir: Path) -> Any:
    """The base in fp32 with a fresh adapter on every linear layer."""
    base: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    return peft.get_peft_model(base, lora_config())


def lora_config() -> peft.LoraConfig:
    """The adapter that every contender trains."""
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        lora_dropout=0.0,
    )


def centred(group: list[Attempt]) -> list[float]:
    """Advantages: rewards less their mean."""
    mean = sum(attempt.reward for attempt in group) / len(group)
    return [attempt.reward - mean for attempt in group]


class Padded:
    """The contender."""

    def __init__(self, model_dir: Path, budget: int) -> None:
        """Load the model; `budget` is of padded tokens per micro-batch."""
        self._model = lora_model(model_dir).train()
        self._weights = [w for w in self._model.parameters() if w.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=LEARNING_RATE)
        self._budget = budget

    def prepare(self, groups: list[list[Attempt]]) -> None:
        """Nothing is needed beforehand."""

    def update(self, groups: list[list[Attempt]]) -> None:
        """One optimizer step on all of `groups`."""
        total = sum(sum(attempt.sampled) for group in groups for attempt in group)
        for group in groups:
            pairs = list(zip(group, centred(group), strict=True))
            longest = max(len(attempt.prompt) + len(attempt.tail) for attempt in group)
            rows = max(1, self._budget // longest)
            for start in range(0, len(pairs), rows):
                (self._loss(pairs[start : start + rows]) / total).backward()
        clip_grad_norm_(self._weights, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, pairs: list[tuple[Attempt, float]]) -> Tensor:
        ids = pad_sequence(
            [torch.tensor(attempt.prompt + attempt.tail) for attempt, _ in pairs], batch_first=True
        )
        lengths = torch.tensor([len(attempt.prompt) + len(attempt.tail) for attempt, _ in pairs])
        present = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        sampled = pad_sequence(
            [torch.tensor([False] * len(a.prompt) + a.sampled) for a, _ in pairs], batch_first=True
        )
        logits = self._model(input_ids=ids, attention_mask=present, use_cache=False).logits
        every = torch.log_softmax(logits[:, :-1], dim=-1)
        logprobs = every.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.tensor([advantage for _, advantage in pairs])[:, None]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        return (per_token * sampled[:, 1:]).sum()
