"""Groups are admitted one by one and handed over as exactly one batch."""

from __future__ import annotations

import pytest

from rl.errors import CampaignError, ConfigurationError, EvidenceError, StalenessViolation
from rl.learner.losses import advantages
from rl.learner.prime.batches import PendingBatch
from rl.records import Group
from tests.support.prime_config import TEMPERATURE, prime_campaign, sampled_group


def pending(budget: int = 64, ranks: int = 1) -> PendingBatch:
    return PendingBatch(prime_campaign(), budget, ranks)


def test_tokens_are_aligned_with_their_logprobs_and_advantages() -> None:
    batch = pending()
    group = sampled_group("g0")
    batch.add(1, 0, group)
    ((micro,),) = batch.ranks_of(1, ["g0"])
    values = advantages(group.rewards, "mean")
    by_length = {
        len(episode.samples[0].token_ids): (episode.samples[0], value)
        for episode, value in zip(group.episodes, values, strict=True)
    }
    start = 0
    for length in micro.sequence_lengths:
        sample, value = by_length[length]
        span = slice(start, start + length)
        assert micro.input_ids[span] == sample.token_ids
        assert micro.loss_mask[span] == sample.sampled
        assert micro.inference_logprobs[span] == sample.logprobs
        assert micro.advantages[span] == [value * on for on in sample.sampled]
        start += length
    assert set(micro.temperatures) == {TEMPERATURE}


def mixed() -> Group:
    group = sampled_group("g0", version=1)
    episodes = [group.episodes[0].model_copy(update={"version": 0}), *group.episodes[1:]]
    return group.model_copy(update={"episodes": episodes})


def doubled() -> Group:
    group = sampled_group("g0", version=1)
    return group.model_copy(update={"episodes": [group.episodes[0]] * 2})


@pytest.mark.parametrize(
    ("update", "version", "group", "error", "what"),
    [
        (3, 1, sampled_group("g0", 1), StalenessViolation, "comes before update 2"),
        (3, 2, sampled_group("g0", 0), StalenessViolation, "2 updates stale"),
        (2, 1, sampled_group("g0", 2), StalenessViolation, "-1 updates stale"),
        (2, 1, mixed(), StalenessViolation, "holds episodes of"),
        (2, 1, doubled(), EvidenceError, "an attempt twice"),
        (2, 1, sampled_group("g0", 1, prompt=90), ConfigurationError, "micro_batch_tokens"),
    ],
)
def test_what_may_not_be_trained_on_is_refused(
    update: int, version: int, group: Group, error: type[CampaignError], what: str
) -> None:
    batch = pending()
    with pytest.raises(error, match=what):
        batch.add(update, version, group)
    assert batch.groups == []


def test_a_group_counts_once() -> None:
    batch = pending()
    batch.add(1, 0, sampled_group("g0"))
    with pytest.raises(EvidenceError, match="accumulated already"):
        batch.add(1, 0, sampled_group("g0"))


def test_a_step_is_of_exactly_the_groups_that_came() -> None:
    batch = pending()
    batch.add(1, 0, sampled_group("g0"))
    for ids in ([], ["g0", "g1"], ["g1"], ["g0", "g0"]):
        with pytest.raises(EvidenceError, match="were accumulated"):
            batch.ranks_of(1, ids)
    assert batch.ranks_of(1, ["g0"])


def test_a_batch_without_a_sampled_token_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no sampled token"):
        pending().ranks_of(1, [])
