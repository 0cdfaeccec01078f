"""From groups to micro-batches.

Invariants:
- Every sampled token of every sample is predicted exactly once, except one that
  opens its sequence: nothing precedes it, so nothing can predict it.
- Rows are padded on the right only. Under causal attention no real token sees
  padding, so no attention mask is needed and none is made.
- A micro-batch holds at most `budget` padded tokens, or a single sequence.
- The tokens of `prefix` are computed once and precede every row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.errors import EngineError, EvidenceError
from rl.learner.losses import AdvantageKind, advantages
from rl.records import EpisodeRecord, Group, Sample

PAD = 0  # id of padding; any valid id would do, no real token attends to it
# Below this many shared tokens the split attention costs more than it saves.
SHORTEST_PREFIX = 16


@dataclass(frozen=True)
class TrainingSequence:
    """One sample with what its loss needs."""

    token_ids: list[int]
    predicted: list[int]  # positions >= 1 whose token was sampled, ascending
    sampler_logprobs: list[float]  # of the predicted positions, nats
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass: P prefix tokens, then S rows of L tokens."""

    prefix: Tensor  # (P,) int64
    rows: Tensor  # (S, L) int64, padded on the right
    sources: Tensor  # (n,) int64: index, in prefix followed by flattened rows, that predicts
    targets: Tensor  # (n,) int64: the token ids predicted
    sampler_logprobs: Tensor  # (n,) float32, nats
    advantages: Tensor  # (n,) float32

    @property
    def padded_tokens(self) -> int:
        """Token positions that the model computes."""
        return self.prefix.numel() + self.rows.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`."""
        return MicroBatch(
            *(
                tensor.to(device)
                for tensor in (
                    self.prefix,
                    self.rows,
                    self.sources,
                    self.targets,
                    self.sampler_logprobs,
                    self.advantages,
                )
            )
        )


def training_sequences(
    group: Group, kind: AdvantageKind, skip: Collection[str] = ()
) -> list[TrainingSequence]:
    """The sequences of `group` that predict at least one sampled token.

    Args:
        group: all of it; every reward counts in the advantages.
        kind: see `advantages`.
        skip: attempts whose sequences are left out.

    Raises:
        EvidenceError: an episode is not graded.
        EngineError: a sampled token's logprob is not a finite number at most 0.
    """
    for episode in group.episodes:
        _check_graded(episode)
    values = advantages(group.rewards, kind)
    return [
        sequence
        for episode, advantage in zip(group.episodes, values, strict=True)
        if episode.attempt_id not in skip
        for sequence in episode_sequences(episode, advantage)
    ]


def episode_sequences(episode: EpisodeRecord, advantage: float) -> list[TrainingSequence]:
    """The sequences of one attempt; raises as `training_sequences`."""
    _check_graded(episode)
    where = f"attempt {episode.attempt_id}"
    sequences = [_sequence(sample, advantage, where) for sample in episode.samples]
    return [sequence for sequence in sequences if sequence.predicted]


def pack(
    sequences: Sequence[TrainingSequence], budget: int, share_prefix: bool
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` padded tokens; a longer sequence stands alone.

    Args:
        sequences: in any order; of one group if a shared prefix is to be found.
        budget: padded tokens per micro-batch.
        share_prefix: compute the sequences' longest common prefix once per batch.
    """
    shared = _shared_prefix(sequences) if share_prefix else []
    ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids))
    batches: list[list[TrainingSequence]] = []
    for sequence in ordered:
        # Ascending lengths: the newcomer is the longest, so it sets the rows' length.
        length = len(sequence.token_ids) - len(shared)
        if batches and len(shared) + (len(batches[-1]) + 1) * length <= budget:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    # A row alone gains nothing from a split attention.
    return [_tensors(batch, len(shared) if len(batch) > 1 else 0) for batch in batches]


def _check_graded(episode: EpisodeRecord) -> None:
    if episode.outcome != "graded":
        raise EvidenceError(
            f"episode is {episode.outcome}, only graded ones are trained on",
            f"group {episode.group_id}, attempt {episode.attempt_id}",
        )


def _sequence(sample: Sample, advantage: float, where: str) -> TrainingSequence:
    predicted = [t for t, sampled in enumerate(sample.sampled) if sampled and t > 0]
    logprobs = [sample.logprobs[t] for t in predicted]
    bad = [value for value in logprobs if not (math.isfinite(value) and value <= 0)]
    if bad:
        raise EngineError(f"the sampler's logprob {bad[0]} is no logprob", where)
    return TrainingSequence(sample.token_ids, predicted, logprobs, advantage)


def _shared_prefix(sequences: Sequence[TrainingSequence]) -> list[int]:
    """The longest common prefix that leaves a token to every sequence, if it is worth it."""
    if len(sequences) < 2:
        return []
    # The least and the greatest differ first where any two of them do.
    low = min(sequence.token_ids for sequence in sequences)
    high = max(sequence.token_ids for sequence in sequences)
    limit = min(len(sequence.token_ids) for sequence in sequences) - 1
    length = 0
    while length < limit and low[length] == high[length]:
        length += 1
    return low[:length] if length >= SHORTEST_PREFIX else []


def _tensors(batch: list[TrainingSequence], prefix: int) -> MicroBatch:
    length = max(len(sequence.token_ids) for sequence in batch) - prefix
    rows = torch.full((len(batch), length), PAD, dtype=torch.int64)
    sources: list[int] = []
    targets: list[int] = []
    for index, sequence in enumerate(batch):
        suffix = sequence.token_ids[prefix:]
        rows[index, : len(suffix)] = torch.tensor(suffix, dtype=torch.int64)
        for t in sequence.predicted:
            before = t - 1
            sources.append(before if before < prefix else before + index * length)
            targets.append(sequence.token_ids[t])
    logprobs = [value for sequence in batch for value in sequence.sampler_logprobs]
    weights = [sequence.advantage for sequence in batch for _ in sequence.predicted]
    return MicroBatch(
        prefix=torch.tensor(batch[0].token_ids[:prefix], dtype=torch.int64),
        rows=rows,
        sources=torch.tensor(sources, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(weights, dtype=torch.float32),
    )
