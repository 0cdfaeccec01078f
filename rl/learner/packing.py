"""From groups to micro-batches.

Invariants:
- Every sampled token of every sample is predicted exactly once, except one that
  opens its sequence: nothing precedes it, so nothing can predict it.
- A micro-batch is one row of tokens without padding. Tokens that its sequences have in
  common from the start stand in it once (see `tree`); a predicted token stays its
  sequence's own, with its own sampler logprob and advantage, where others predict
  from the same place.
- What comes after a sequence's last predicted token is left out.
- A micro-batch computes at most `budget` tokens, or holds a single sequence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.errors import EngineError, EvidenceError
from rl.learner.losses import AdvantageKind, advantages
from rl.learner.tree import Segment, plant, unshared
from rl.records import EpisodeRecord, Group, Sample


@dataclass(frozen=True)
class TrainingSequence:
    """One sample with what its loss needs."""

    token_ids: list[int]
    predicted: list[int]  # positions >= 1 whose token was sampled, ascending
    sampler_logprobs: list[float]  # of the predicted positions, nats
    advantage: float

    @property
    def inputs(self) -> list[int]:
        """The tokens that the model must see: those before the last predicted one."""
        return self.token_ids[: self.predicted[-1]]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass over a row of N tokens."""

    token_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64
    segments: tuple[Segment, ...]  # the row's tree
    sources: Tensor  # (n,) int64: place in the row that predicts
    targets: Tensor  # (n,) int64: the token ids predicted
    # (n,) int64: which of the batch's sequences, counted from 0, a target is of. Each has
    # a target, and all of its targets are here.
    sequences: Tensor
    sampler_logprobs: Tensor  # (n,) float32, nats
    advantages: Tensor  # (n,) float32

    @property
    def computed_tokens(self) -> int:
        """Token positions that the model computes."""
        return self.token_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`."""
        return MicroBatch(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            segments=self.segments,
            sources=self.sources.to(device),
            targets=self.targets.to(device),
            sequences=self.sequences.to(device),
            sampler_logprobs=self.sampler_logprobs.to(device),
            advantages=self.advantages.to(device),
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
    """Micro-batches of at most `budget` tokens; a longer sequence stands alone.

    Args:
        sequences: in any order; those of one group have most to share.
        budget: tokens per micro-batch.
        share_prefix: compute what sequences of a micro-batch have in common once.
            Otherwise the budget is that of the sequences as rows padded to one length.
    """
    bins = _by_tree(sequences, budget) if share_prefix else _by_length(sequences, budget)
    return [_tensors(batch, share_prefix) for batch in bins]


def _by_tree(sequences: Sequence[TrainingSequence], budget: int) -> list[list[TrainingSequence]]:
    """Neighbours in the tree of all go together, so that little of it is computed twice."""
    bins: list[list[TrainingSequence]] = []
    size = 0  # of the last bin, or more
    for sequence in sorted(sequences, key=lambda sequence: sequence.token_ids):
        size += len(sequence.inputs)
        if bins and size > budget:
            size = len(plant([other.inputs for other in (*bins[-1], sequence)]).token_ids)
        if bins and size <= budget:
            bins[-1].append(sequence)
        else:
            bins.append([sequence])
            size = len(sequence.inputs)
    return bins


def _by_length(sequences: Sequence[TrainingSequence], budget: int) -> list[list[TrainingSequence]]:
    bins: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.inputs)):
        # Ascending lengths: the newcomer is the longest, so it sets the rows' length.
        if bins and (len(bins[-1]) + 1) * len(sequence.inputs) <= budget:
            bins[-1].append(sequence)
        else:
            bins.append([sequence])
    return bins


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


def _tensors(batch: list[TrainingSequence], share: bool) -> MicroBatch:
    inputs = [sequence.inputs for sequence in batch]
    tree = plant(inputs) if share else unshared(inputs)
    sources: list[int] = []
    for index, sequence in enumerate(batch):
        places = tree.places(index)
        sources.extend(places[t - 1] for t in sequence.predicted)
    targets = [sequence.token_ids[t] for sequence in batch for t in sequence.predicted]
    logprobs = [value for sequence in batch for value in sequence.sampler_logprobs]
    weights = [sequence.advantage for sequence in batch for _ in sequence.predicted]
    owners = [index for index, sequence in enumerate(batch) for _ in sequence.predicted]
    return MicroBatch(
        token_ids=torch.tensor(tree.token_ids, dtype=torch.int64),
        position_ids=torch.tensor(tree.positions(), dtype=torch.int64),
        segments=tree.segments,
        sources=torch.tensor(sources, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        sequences=torch.tensor(owners, dtype=torch.int64),
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(weights, dtype=torch.float32),
    )
