"""prime-rl's metrics, followed as they are written, and what becomes of them.

Invariants:
- Rows from before this process started are never read: a resumed run appends to
  the file of the run before.
- A step is done when a row of it holds `time/step`, which is written after the
  step's checkpoint.
- What prime-rl does not say is computed from our own records, never guessed. It
  leaves out values that are not finite: a missing one is an error.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from rl.config import CampaignConfig
from rl.errors import TrainerError
from rl.learner.prime.wire import MicroBatch
from rl.learner.rate import learning_rate
from rl.records import Group, UpdateMetrics

DONE: Final = "time/step"
_HALVINGS = 60  # beyond a float's precision


class MetricsRows:
    """The rows that are appended to `path` from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0
        self._by_step: dict[int, dict[str, Any]] = {}

    def finished(self, step: int) -> dict[str, Any] | None:
        """All values of `step`, once it is done.

        Raises:
            TrainerError: a line is no row.
        """
        self._read()
        row = self._by_step.get(step)
        return row if row is not None and DONE in row else None

    def _read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the rest is still being written
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                row: Any = json.loads(line)
                step = int(row["step"])
            except (ValueError, TypeError, KeyError):
                raise TrainerError(
                    f"a line is no row of metrics: {line[:80]!r}", str(self._path)
                ) from None
            self._by_step.setdefault(step, {}).update(cast(dict[str, Any], row))


def update_metrics(
    config: CampaignConfig,
    update: int,
    row: Mapping[str, Any],
    groups: Sequence[Group],
    ranks: Sequence[Sequence[MicroBatch]],
) -> UpdateMetrics:
    """The record of `update`.

    Args:
        config: the campaign's.
        update: the step.
        row: prime-rl's values of it.
        groups: that it was trained on.
        ranks: the batch that was handed over.

    Raises:
        TrainerError: a value is missing: it was not finite.
    """

    def value(key: str) -> float:
        found = row.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise TrainerError(
                f"step {update} has no {key}: it was not finite",
                "prime-rl's metrics",
                "look at the batch's logprobs and at the learning rate",
            )
        return float(found)

    batches = [batch for share in ranks for batch in share]
    rewards = [reward for group in groups for reward in group.rewards]
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    staleness: Counter[int] = Counter()
    for group in groups:
        staleness[update - 1 - group.version] += len(group.episodes)
    samples = [
        sample for group in groups for episode in group.episodes for sample in episode.samples
    ]
    prompts = [
        sample.sampled.index(True) if any(sample.sampled) else len(sample.sampled)
        for sample in samples
    ]
    total = sum(len(sample.token_ids) for sample in samples)
    low, high = ratio_bounds(value("mismatch_kl/all/max"))
    optimizer = config.trainer.optimizer
    return UpdateMetrics(
        update=update,
        # Each micro-batch's part of the mean over all loss tokens; what is given is
        # the mean over micro-batches.
        loss=value("loss/mean") * len(batches),
        grad_norm=value("optim/grad_norm"),
        # What is given is the next step's.
        lr=learning_rate(optimizer.lr, optimizer.warmup_updates, update),
        reward_mean=mean,
        reward_std=math.sqrt(squares / len(rewards)),
        episodes=len(rewards),
        zero_variance_groups=sum(group.zero_variance for group in groups),
        sequences=sum(len(batch.sequence_lengths) for batch in batches if batch.loss_tokens),
        sampled_tokens=sum(batch.loss_tokens for batch in batches),
        prompt_tokens=sum(prompts),
        tool_tokens=total - sum(prompts) - sum(sample.sampled_tokens for sample in samples),
        total_tokens=total,
        computed_tokens=sum(batch.tokens for batch in batches),
        mismatch_kl=value("mismatch_kl/all/mean"),
        ratio_min=low,
        ratio_max=high,
        clipped_fraction=value("is_masked/mean"),
        entropy=value("entropy/all/mean"),
        staleness=dict(sorted(staleness.items())),
        seconds=value("time/forward_backward"),
    )


def ratio_bounds(largest: float) -> tuple[float, float]:
    """Bounds of every token's ratio r, from the largest r - 1 - ln r of any."""
    largest = max(0.0, largest)

    def solve(outer: float) -> float:
        """ln r between 0 and `outer`, where r - 1 - ln r has grown to `largest`."""
        inner = 0.0
        for _ in range(_HALVINGS):
            middle = (inner + outer) / 2
            if math.expm1(middle) - middle < largest:
                inner = middle
            else:
                outer = middle
        return outer

    return math.exp(solve(-(largest + 1))), math.exp(solve(math.sqrt(2 * largest)))
