from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.errors import ConfigurationError, EvidenceError, StalenessViolation
from rl.learner.packing import pack, training_sequences
from rl.learner.peft_learner import NonFiniteError, PeftLearner, learning_rate
from rl.records import Group, Sample
from tests.unit.rl.learner.tiny_policy import (
    TEMPERATURE,
    VOCABULARY,
    gradients,
    make_config,
    make_episode,
    make_group,
    random_group,
    trained,
    write_adapter,
)


def fresh_model(model_dir: Path, learner: PeftLearner, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(write_adapter(learner.export(), folder))).eval()


def logprobs_of(model: Any, token_ids: list[int], temperature: float) -> list[float]:
    """Of every token after the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1] / temperature
    every = torch.log_softmax(logits.double(), dim=-1)
    return [float(row[token]) for row, token in zip(every, token_ids[1:], strict=True)]


def relabelled(group: Group, model: Any, temperature: float = TEMPERATURE) -> Group:
    """The same group with the logprobs that `model` gives its sampled tokens."""
    episodes = []
    for episode in group.episodes:
        (sample,) = episode.samples
        own = [0.0, *logprobs_of(model, sample.token_ids, temperature)]
        kept = [x if s else 0.0 for x, s in zip(own, sample.sampled, strict=True)]
        episodes.append(
            episode.model_copy(update={"samples": [sample.model_copy(update={"logprobs": kept})]})
        )
    return group.model_copy(update={"episodes": episodes})


def one_shot_gradients(model: Any, groups: list[Group], kl: float) -> dict[str, torch.Tensor]:
    """Summed trust-region gradients, sample by sample through the model's own forward."""
    total = torch.zeros(())
    for group in groups:
        mean = sum(group.rewards) / len(group.rewards)
        for episode in group.episodes:
            (sample,) = episode.samples
            ids = torch.tensor([sample.token_ids])
            logits = model(input_ids=ids).logits[0, :-1] / TEMPERATURE
            own = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
            keep = torch.tensor(sample.sampled[1:])
            mu = torch.tensor(sample.logprobs[1:])
            log_ratio = (own - mu)[keep]
            moved = (own.exp() - mu.exp())[keep].detach()
            advantage = (episode.reward or 0.0) - mean
            k = (moved <= 0.2 if advantage > 0 else moved >= -0.2).float()
            total = total + (-k * advantage * log_ratio.exp() + kl * log_ratio**2).sum()
    total.backward()
    return {n: p.grad for n, p in sorted(model.named_parameters()) if p.grad is not None}


@pytest.mark.parametrize("budget", [8192, 70, 1])
@pytest.mark.parametrize("share", [True, False])
def test_streamed_gradients_in_any_order_equal_the_one_shot_ones(
    model_dir, tmp_path, budget, share
):
    learner = trained(model_dir, 1, PeftLearner(make_config(micro_batch_tokens=budget), model_dir))
    reference = fresh_model(model_dir, learner, tmp_path / "adapter")
    for name, weight in reference.named_parameters():
        weight.requires_grad_("lora_" in name)
    groups = [random_group(f"g{i}", 40 + i, version=1) for i in range(3)]
    wanted = one_shot_gradients(reference, groups, kl=1e-3)
    learner._policy.shares_prefixes = share
    for order, early in ((groups, 0), (groups[::-1], 0), (groups, 3)):
        for group in order:
            learner.accumulate_attempts(2, group.group_id, group.episodes[:early])
        for group in order:
            learner.accumulate(2, group)
        found = gradients(learner)
        learner.discard()
        for gradient, (name, other) in zip(found, wanted.items(), strict=True):
            error = float((gradient - other).norm() / other.norm())
            assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_sharing_a_prefix_changes_neither_logprobs_nor_gradients(model_dir, checkpointing):
    config = make_config(gradient_checkpointing=checkpointing)
    learner = trained(model_dir, 2, PeftLearner(config, model_dir))
    group = random_group("g", 77, version=2)
    sequences = training_sequences(group, "mean")
    found: list[tuple[dict[Any, float], list[torch.Tensor]]] = []
    for share in (True, False):
        (batch,) = pack(sequences, 8192, share)
        assert (len(batch.segments) > len(sequences)) == share
        with torch.no_grad():
            scores = learner._policy.scores(batch, TEMPERATURE)
        keys = zip(batch.sampler_logprobs.tolist(), batch.targets.tolist(), strict=True)
        learner._policy.shares_prefixes = share
        learner.accumulate(3, group)
        found.append((dict(zip(keys, scores.logprobs.tolist(), strict=True)), gradients(learner)))
        learner.discard()
    (shared, shared_gradients), (plain, plain_gradients) = found
    assert shared == pytest.approx(plain, abs=1e-4)
    for a, b in zip(shared_gradients, plain_gradients, strict=True):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm())


def test_the_on_policy_ratio_is_one(model_dir, tmp_path):
    learner = trained(model_dir, 2)
    model = fresh_model(model_dir, learner, tmp_path / "adapter")
    learner.accumulate(3, relabelled(random_group("g", 5, version=2), model))
    metrics = learner.step(3)
    assert metrics.ratio_min == pytest.approx(1, abs=1e-4)
    assert metrics.ratio_max == pytest.approx(1, abs=1e-4)
    assert metrics.mismatch_kl < 1e-8
    assert metrics.clipped_fraction == 0


def test_a_sampler_at_another_temperature_shows_as_mismatch(model_dir, tmp_path):
    learner = trained(model_dir, 1)
    model = fresh_model(model_dir, learner, tmp_path / "adapter")
    learner.accumulate(2, relabelled(random_group("g", 5, version=1), model, temperature=1.0))
    assert learner.step(2).mismatch_kl > 1e-3


def test_metrics_count_what_was_accumulated(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    groups = [random_group("a", 1), random_group("b", 2)]
    flat = groups[1].model_copy(
        update={
            "episodes": [e.model_copy(update={"reward": 1.0}) for e in groups[1].episodes],
        }
    )
    learner.accumulate(1, groups[0])
    learner.accumulate(1, flat)
    metrics = learner.step(1)
    samples = [s for g in groups for e in g.episodes for s in e.samples]
    assert metrics.sampled_tokens == sum(s.sampled_tokens for s in samples)
    assert metrics.total_tokens == sum(len(s.token_ids) for s in samples)
    assert (metrics.episodes, metrics.zero_variance_groups) == (8, 1)
    assert metrics.reward_mean == pytest.approx(0.75)
    assert metrics.staleness == {0: 8}
    assert metrics.lr == pytest.approx(5e-3)  # first of two warm-up updates
    assert 0 < metrics.entropy < math.log(VOCABULARY)


def test_a_fresh_adapter_is_the_base_and_comes_from_the_seed(model_dir):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    learner = PeftLearner(make_config(), model_dir)
    assert torch.equal(torch.get_rng_state(), before)
    exported = learner.export()
    assert exported.probe.logprobs == learner.probe_base().logprobs == exported.probe.base_logprobs
    torch.manual_seed(2)
    assert PeftLearner(make_config(), model_dir).export() == exported


def test_the_base_is_left_alone_by_training(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    base = learner.probe_base()
    trained(model_dir, 2, learner)
    assert learner.probe_base() == base
    assert learner.export().probe.logprobs != base.logprobs
    assert learner.export().probe.base_logprobs == base.logprobs


def test_an_export_loads_unchanged_in_peft_with_equal_logits(model_dir, tmp_path):
    learner = trained(model_dir, 2)
    exported = learner.export()
    model = fresh_model(model_dir, learner, tmp_path / "adapter")
    found = logprobs_of(model, exported.probe.token_ids, temperature=1.0)
    assert found == pytest.approx(exported.probe.logprobs, abs=1e-5)
    assert set(exported.files) == {"adapter_config.json", "adapter_model.safetensors"}
    text = exported.files["adapter_config.json"].decode()
    assert '"base_model_name_or_path": "tiny-llama"' in text
    assert str(model_dir) not in text


def test_a_resumed_learner_equals_the_uninterrupted_one_bit_for_bit(model_dir):
    whole = trained(model_dir, 4).export()
    first = trained(model_dir, 2)
    second = PeftLearner(make_config(), model_dir)
    second.load_state(first.state())
    resumed = trained(model_dir, 2, second).export()
    assert resumed == whole
    assert resumed.version == 4


def test_a_state_of_another_adapter_is_refused_and_changes_nothing(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    before = learner.export()
    other = PeftLearner(make_config(lora={"rank": 2, "alpha": 4}), model_dir)
    with pytest.raises(EvidenceError, match="other layers or shapes"):
        learner.load_state(other.state())
    assert learner.export() == before


def test_state_is_refused_while_groups_wait_for_the_step(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    learner.accumulate(1, random_group("g", 1))
    with pytest.raises(EvidenceError, match="accumulated already"):
        learner.state()


@pytest.mark.parametrize(("update", "version"), [(3, 0), (3, 3), (2, 1), (4, 2)])
def test_a_group_outside_the_bound_or_for_another_update_is_refused(model_dir, update, version):
    learner = trained(model_dir, 2)
    before = learner.export()
    with pytest.raises(StalenessViolation):
        learner.accumulate(update, random_group("g", 1, version))
    assert not gradients(learner)
    assert learner.export() == before


def test_one_update_of_staleness_is_counted(model_dir):
    learner = trained(model_dir, 2)
    learner.accumulate(3, random_group("a", 1, version=1))
    learner.accumulate(3, random_group("b", 2, version=2))
    assert learner.step(3).staleness == {0: 4, 1: 4}


def test_a_group_of_mixed_versions_is_refused(model_dir):
    learner = trained(model_dir, 1)
    group = random_group("g", 1, version=1)
    mixed = [group.episodes[0].model_copy(update={"version": 0}), *group.episodes[1:]]
    with pytest.raises(StalenessViolation, match="holds episodes of"):
        learner.accumulate(2, group.model_copy(update={"episodes": mixed}))


def test_a_group_is_accumulated_only_once(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    learner.accumulate(1, random_group("g", 1))
    with pytest.raises(EvidenceError, match="accumulated already"):
        learner.accumulate(1, random_group("g", 1))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_update_leaves_everything_as_it_was(model_dir, where, monkeypatch):
    learner = trained(model_dir, 2)
    before = learner.state()
    learner.accumulate(3, random_group("a", 1, version=2))
    if where == "loss":
        group = random_group("b", 2, version=2)
        scores = learner._policy.scores
        with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="nan"):
            patch.setattr(
                learner._policy, "scores", lambda b, t: scores(b, t / math.nan if t else t)
            )
            learner.accumulate(3, group)
    else:
        weight = learner._policy.parameters[0]
        assert weight.grad is not None
        weight.grad.view(-1)[0] = math.inf
        with pytest.raises(NonFiniteError, match="inf"):
            learner.step(3)
    assert not gradients(learner)
    assert learner.state() == before
    trained(model_dir, 1, learner)
    assert learner.export() == trained(model_dir, 3).export()


def test_a_step_without_sampled_tokens_is_refused(model_dir):
    learner = PeftLearner(make_config(), model_dir)
    with pytest.raises(EvidenceError, match="no sampled token"):
        learner.step(1)
    assert learner.version == 0


def test_a_group_without_advantage_costs_no_backward_but_counts(model_dir):
    learner = PeftLearner(make_config(loss={"name": "ppo_clip"}), model_dir)
    group = random_group("g", 1)
    flat = [e.model_copy(update={"reward": 0.0}) for e in group.episodes]
    learner.accumulate(1, group.model_copy(update={"episodes": flat}))
    assert not gradients(learner)
    metrics = learner.step(1)
    assert (metrics.grad_norm, metrics.zero_variance_groups) == (0.0, 1)
    assert learner.export().probe.logprobs == learner.probe_base().logprobs


def test_a_missing_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no model directory"):
        PeftLearner(make_config(), tmp_path)


def test_the_learning_rate_rises_linearly_and_stays():
    assert [learning_rate(1.0, 4, t) for t in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(1.0, 0, 1) == 1.0


def test_rewarding_one_token_makes_it_likely(model_dir):
    learner = PeftLearner(
        make_config(optimizer={"lr": 2e-2}, loss={"name": "trust_region"}), model_dir
    )
    prompt, wanted = list(range(20)), 7
    draw = torch.Generator().manual_seed(0)
    means: list[float] = []
    for update in range(1, 13):
        (batch,) = pack(
            training_sequences(bandit_group(prompt, [0] * 2, [-1.0] * 2, wanted, update), "mean"),
            8192,
            share_prefix=False,
        )
        hidden = learner._policy._hidden(batch).index_select(0, batch.sources[:1])
        with torch.no_grad():
            every = torch.log_softmax(learner._policy._head(hidden)[0] / TEMPERATURE, dim=-1)
        means.append(float(every[wanted].exp()))
        drawn = torch.multinomial(every.exp(), 64, replacement=True, generator=draw).tolist()
        drawn[0] = wanted  # an exploration guarantee, so that the test is short
        learner.accumulate(
            update, bandit_group(prompt, drawn, [float(every[d]) for d in drawn], wanted, update)
        )
        learner.step(update)
    assert means[0] < 0.2
    assert means[-1] > 0.8


def bandit_group(
    prompt: list[int], drawn: list[int], logprobs: list[float], wanted: int, update: int
) -> Group:
    """One sampled token per attempt; reward 1 for the wanted one."""
    return make_group(
        [
            make_episode(
                [
                    Sample(
                        token_ids=[*prompt, token],
                        sampled=[False] * len(prompt) + [True],
                        logprobs=[0.0] * len(prompt) + [min(logprob, 0.0)],
                    )
                ],
                float(token == wanted),
                "bandit",
                index,
                update - 1,
            )
            for index, (token, logprob) in enumerate(zip(drawn, logprobs, strict=True))
        ]
    )
