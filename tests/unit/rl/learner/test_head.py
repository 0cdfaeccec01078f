from __future__ import annotations

import pytest
import torch

from rl.learner import head
from rl.learner.head import score


def reference(states, targets, linear, temperature):
    every = torch.log_softmax(linear(states) / temperature, dim=-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_chunks_equal_the_whole_log_softmax(monkeypatch, bias, temperature, chunk):
    monkeypatch.setattr(head, "HEAD_CHUNK", chunk)
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 50, bias=bias).requires_grad_(False)
    states = torch.randn(9, 8, requires_grad=True)
    targets = torch.randint(50, (9,))
    found, found_entropy = score(states, targets, linear, temperature)
    wanted, wanted_entropy = reference(states, targets, linear, temperature)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(found_entropy, wanted_entropy, atol=1e-6)
    assert not found_entropy.requires_grad
    weights = torch.randn(9)
    (ours,) = torch.autograd.grad((found * weights).sum(), states)
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), states)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_nothing_vocabulary_sized_is_kept_for_the_backward_pass():
    linear = torch.nn.Linear(8, 1000, bias=False).requires_grad_(False)
    states = torch.randn(600, 8, requires_grad=True)
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score(states, torch.zeros(600, dtype=torch.int64), linear, 0.7)
    assert kept == [(600, 8)]


def test_an_impossible_token_adds_nothing_to_the_entropy():
    linear = torch.nn.Linear(2, 3).requires_grad_(False)
    linear.bias[2] = -torch.inf
    _, entropy = score(torch.zeros(1, 2), torch.tensor([0]), linear, 1.0)
    assert 0 < float(entropy) < 0.7


def test_a_half_precision_head_gives_full_precision_logprobs():
    linear = torch.nn.Linear(8, 50, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    states = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = score(states, torch.arange(5), linear, 1.0)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert states.grad is not None
    assert torch.isfinite(states.grad).all()
