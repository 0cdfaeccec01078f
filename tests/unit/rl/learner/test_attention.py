from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from rl.learner.attention import TreeAttention, block_mask, flex, sees, supports_sharing
from rl.learner.packing import TrainingSequence, pack
from rl.learner.peft_learner import PeftLearner
from rl.learner.tree import Tree, plant
from tests.unit.rl.learner.tiny_policy import TEMPERATURE, gradients, make_config, trained
from tests.unit.rl.learner.token_trees import sequences

CPU = torch.device("cpu")
EXACT = 1e-5  # relative, fp32
VANISHING = 1e-2  # of the largest gradient of all weights


def dense_mask(tree: Tree) -> torch.Tensor:
    """(N, N): whether query sees key, straight from the sequences."""
    mask = torch.zeros(len(tree.token_ids), len(tree.token_ids), dtype=torch.bool)
    for index in range(len(tree.paths)):
        places = tree.places(index)
        for depth, query in enumerate(places):
            mask[query, places[: depth + 1]] = True
    return mask


def heads(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grouped-query states, six heads on two."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, count, length, 16) for count in (6, 2, 2)]
    query, key, value = (torch.randn(shape, generator=draw) for shape in shapes)
    return query, key, value


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To a relative error of `EXACT`."""
    return float((found - wanted).detach().norm()) <= EXACT * float(wanted.detach().norm())


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_the_tree_is_attended_to_as_a_dense_mask_says(drawn):
    tree = plant(drawn)
    states = [state.requires_grad_() for state in heads(len(tree.token_ids))]
    found = TreeAttention(tree.segments, CPU)(*states, scale=0.3)
    doubles = [state.double() for state in states]
    wanted = scaled_dot_product_attention(
        *doubles, attn_mask=dense_mask(tree), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert equal(found, wanted)
    weights = torch.randn(found.shape)
    ours = torch.autograd.grad((found * weights).sum(), states)
    theirs = torch.autograd.grad((wanted * weights).sum(), states)
    # Together: a query that sees one key alone has no gradient but rounding.
    assert equal(*(torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs)))


@pytest.mark.filterwarnings("ignore")  # uncompiled, it says that it is slow
@settings(max_examples=4, deadline=None)
@given(sequences())
def test_flex_attention_with_the_tree_s_blocks_equals_the_cpu_kernels(drawn):
    # Long enough for whole blocks, partial ones and skipped ones.
    tree = plant([[*[1] * 150, *drawn[0]], *drawn, [*[2] * 200, *drawn[-1]]])
    mask, length = block_mask(tree.segments, CPU), len(tree.token_ids)
    query, key, value = heads(length)
    found = flex(query, key, value, mask, 0.3).transpose(1, 2)
    assert equal(found, TreeAttention(tree.segments, CPU)(query, key, value, 0.3))
    reference = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    assert torch.equal(mask.to_dense(), reference.to_dense())
    assert torch.equal(mask.kv_num_blocks, reference.kv_num_blocks)
    assert mask.full_kv_num_blocks is not None
    assert reference.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks, reference.full_kv_num_blocks)


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_the_mask_function_is_the_dense_mask(drawn):
    tree = plant(drawn)
    ends = torch.tensor([s.end for s in tree.segments for _ in range(s.start, s.stop)])
    places, none = torch.arange(len(tree.token_ids)), torch.tensor(0)
    assert torch.equal(sees(ends)(none, none, places[:, None], places), dense_mask(tree))


def weighted(learner: PeftLearner, drawn: list[list[int]], budget: int, share: bool) -> Any:
    """Logprobs by sequence and place, and the adapter's gradients of their weighted sum."""
    chosen = [
        TrainingSequence(
            ids, [*range(1, len(ids))], [-float(index)] * (len(ids) - 1), 1.0 + index / 4
        )
        for index, ids in enumerate(drawn)
        if len(ids) > 1
    ]
    batches = pack(chosen, budget, share)
    logprobs: dict[float, list[float]] = {}
    for batch in batches:
        scores = learner._policy.scores(batch, TEMPERATURE)
        (scores.logprobs * batch.advantages).sum().backward()
        pairs = zip(batch.sampler_logprobs.tolist(), scores.logprobs.tolist(), strict=True)
        for index, logprob in pairs:
            logprobs.setdefault(-index, []).append(logprob)
    found = gradients(learner)
    learner.discard()
    return logprobs, found


@pytest.fixture(scope="module", params=[False, True], ids=["kept", "checkpointed"])
def learner(request, model_dir):
    config = make_config(gradient_checkpointing=request.param)
    return trained(model_dir, 2, PeftLearner(config, model_dir))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=sequences().filter(lambda drawn: any(len(ids) > 1 for ids in drawn)))
@example(drawn=[[17, 17, 0], [17, 17, 0]])  # equal keys and values: no gradient in queries
def test_a_shared_tree_changes_neither_logprobs_nor_gradients(learner, drawn):
    learner._policy.shares_prefixes = False
    wanted, wanted_gradients = weighted(learner, drawn, budget=1, share=False)
    learner._policy.shares_prefixes = True
    for budget in (8192, 90):
        found, found_gradients = weighted(learner, drawn, budget, share=True)
        assert found.keys() == wanted.keys()
        for index, logprobs in wanted.items():
            assert found[index] == pytest.approx(logprobs, rel=EXACT, abs=EXACT)
        # A gradient that vanishes by symmetry is rounding of the others, and nothing else.
        largest = max(float(wanted.abs().max()) for wanted in wanted_gradients)
        for a, b in zip(found_gradients, wanted_gradients, strict=True):
            scale = max(float(b.abs().max()), VANISHING * largest)
            assert float((a - b).abs().max()) <= EXACT * scale


def test_models_with_windows_or_capped_attention_share_nothing():
    class Config:
        layer_types = ("full_attention", "full_attention")
        sliding_window = 128
        use_sliding_window = False
        attn_logit_softcapping = None

    assert supports_sharing(Config)
    for name, value in (
        ("layer_types", ("full_attention", "linear_attention")),
        ("use_sliding_window", True),
        ("attn_logit_softcapping", 30.0),
    ):
        assert not supports_sharing(type("Other", (Config,), {name: value}))
