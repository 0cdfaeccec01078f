"""Groups as they arrive, until a whole batch can be written.

Invariants:
- A group is refused unless it is for the next update, of one version, and within
  the staleness bound; a batch is written only of exactly the groups asked for.
- What is trained on are the sequences and advantages of `rl.learner.packing`, the
  same that the other backend trains on.
- No sequence is cut: one beyond the token budget is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.config import CampaignConfig
from rl.errors import ConfigurationError, EvidenceError, StalenessViolation
from rl.learner.packing import TrainingSequence, training_sequences
from rl.learner.prime.wire import MicroBatch, WireSequence, distribute
from rl.records import Group


class PendingBatch:
    """The groups of the update after `version`.

    Args:
        config: the campaign's.
        budget: tokens of one micro-batch.
        ranks: data-parallel ranks.
    """

    def __init__(self, config: CampaignConfig, budget: int, ranks: int) -> None:
        self._config = config
        self._budget = budget
        self._ranks = ranks
        self._groups: dict[str, Group] = {}
        self._sequences: dict[str, list[WireSequence]] = {}

    @property
    def groups(self) -> list[Group]:
        """In order of arrival."""
        return list(self._groups.values())

    def add(self, update: int, version: int, group: Group) -> None:
        """Take a group for `update`, while the trainer is at `version`.

        Raises:
            StalenessViolation: not the next update, mixed versions, or a version
                beyond the bound or from the future.
            EvidenceError: the group twice, or an episode that is not graded.
            EngineError: a sampler's logprob that is none.
            ConfigurationError: a sequence beyond the token budget.
        """
        where = f"update {update}, group {group.group_id}"
        self.check_next(update, version)
        staleness = version - group.version
        bound = self._config.schedule.max_staleness
        if not 0 <= staleness <= bound:
            raise StalenessViolation(
                f"version {group.version} is {staleness} updates stale, the bound is {bound}", where
            )
        mixed = sorted({episode.version for episode in group.episodes} - {group.version})
        if mixed:
            raise StalenessViolation(
                f"group of version {group.version} holds episodes of {mixed}", where
            )
        if group.group_id in self._groups:
            raise EvidenceError("the group was accumulated already", where)
        attempts = [episode.attempt_id for episode in group.episodes]
        if len(set(attempts)) < len(attempts):
            raise EvidenceError("the group holds an attempt twice", where)
        kind = self._config.trainer.loss.advantage
        sequences = [wire_sequence(one) for one in training_sequences(group, kind)]
        longest = max((len(one.input_ids) for one in sequences), default=0)
        if longest > self._budget:
            raise ConfigurationError(
                f"a sequence of {longest} tokens, beyond the {self._budget} of a micro-batch",
                where,
                "raise trainer.micro_batch_tokens",
            )
        self._groups[group.group_id] = group
        self._sequences[group.group_id] = sequences

    def check_next(self, update: int, version: int) -> None:
        """Raise `StalenessViolation` unless `update` follows `version`."""
        if update != version + 1:
            raise StalenessViolation(
                f"version {version} comes before update {version + 1}", f"update {update}"
            )

    def ranks_of(self, update: int, group_ids: Sequence[str]) -> list[list[MicroBatch]]:
        """The batch of exactly these groups, by rank.

        Raises:
            EvidenceError: other groups were added, or there is nothing to train on.
        """
        where = f"update {update}"
        if sorted(group_ids) != sorted(self._groups):
            raise EvidenceError(
                f"a step with groups {sorted(group_ids)}, but {sorted(self._groups)} "
                "were accumulated",
                where,
            )
        sequences = [one for found in self._sequences.values() for one in found]
        if not any(any(one.loss_mask) for one in sequences):
            raise EvidenceError("no sampled token to train on", where)
        temperature = self._config.agent.temperature
        return distribute(sequences, self._budget, self._ranks, temperature)


def wire_sequence(sequence: TrainingSequence) -> WireSequence:
    """One entry per token, aligned to the token itself."""
    length = len(sequence.token_ids)
    mask, values, logprobs = [False] * length, [0.0] * length, [0.0] * length
    for position, logprob in zip(sequence.predicted, sequence.sampler_logprobs, strict=True):
        mask[position] = True
        values[position] = float(sequence.advantage)
        logprobs[position] = float(logprob)
    return WireSequence(list(sequence.token_ids), mask, values, logprobs)
