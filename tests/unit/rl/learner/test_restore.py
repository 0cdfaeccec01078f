"""A checkpoint whose files are whole, and not this learner's, is refused by the file's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.errors import EvidenceError
from rl.learner.checkpoint import save_checkpoint
from rl.learner.peft_learner import PeftLearner, seed_process
from rl.learner.restore import restore
from rl.learner.state import LearnerState, files_sha256
from tests.unit.rl.learner.tiny_policy import make_config, random_group

DIGEST = "a" * 64
WEIGHTS = "adapter/adapter_model.safetensors"


def trained(model_dir: Path, updates: int, rank: int = 4) -> PeftLearner:
    learner = PeftLearner(make_config(lora={"rank": rank, "alpha": 8}), model_dir)
    for update in range(1, updates + 1):
        learner.accumulate(update, random_group("g", update, update - 1))
        learner.step(update)
    return learner


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> LearnerState:
    return trained(model_dir, 1).state()


@pytest.fixture(scope="module")
def foreign(model_dir: Path) -> LearnerState:
    return trained(model_dir, 1, rank=2).state()


def with_weights(state: LearnerState, weights: bytes) -> LearnerState:
    files = state.adapter.files | {"adapter_model.safetensors": weights}
    changes = {"files": files, "sha256": files_sha256(files)}
    return replace(state, adapter=state.adapter.model_copy(update=changes))


def assert_refused(
    model_dir: Path, root: Path, state: LearnerState, file: str, problem: str
) -> None:
    path = save_checkpoint(root, state.adapter.version, state, {}, DIGEST)
    learner = PeftLearner(make_config(), model_dir)
    before = learner.state()
    with pytest.raises(EvidenceError, match=problem) as caught:
        restore(learner, path, DIGEST)
    assert caught.value.where == str(path / file)
    assert learner.state() == before


def test_a_checkpoint_of_ours_is_restored(model_dir, ours, tmp_path) -> None:
    path = save_checkpoint(tmp_path, 1, ours, {}, DIGEST)
    learner = PeftLearner(make_config(), model_dir)
    restore(learner, path, DIGEST)
    assert learner.state() == ours


def test_another_model_s_adapter_is_refused(model_dir, ours, foreign, tmp_path) -> None:
    weights = foreign.adapter.files["adapter_model.safetensors"]
    state = with_weights(ours, weights)
    assert_refused(model_dir, tmp_path, state, WEIGHTS, "other layers or shapes")


def test_another_adapter_s_moments_are_refused(model_dir, ours, foreign, tmp_path) -> None:
    state = replace(ours, optimizer=foreign.optimizer)
    assert_refused(model_dir, tmp_path, state, "optimizer.pt", "moments of other weights")


def test_an_optimizer_of_another_version_is_refused(model_dir, ours, tmp_path) -> None:
    state = replace(ours, optimizer=trained(model_dir, 2).state().optimizer)
    assert_refused(model_dir, tmp_path, state, "optimizer.pt", "adapter of version 1, optimizer of")


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04" + b"\0" * 60])
def test_an_optimizer_that_is_none_is_refused(model_dir, ours, content, tmp_path) -> None:
    state = replace(ours, optimizer=content)
    assert_refused(model_dir, tmp_path, state, "optimizer.pt", "no optimizer's state of ours")


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff" * 64])
def test_weights_that_are_none_are_refused(model_dir, ours, content, tmp_path) -> None:
    assert_refused(model_dir, tmp_path, with_weights(ours, content), WEIGHTS, "can't be loaded")


def test_two_runs_of_one_seed_write_the_same_bytes(model_dir) -> None:
    states = []
    for noise in (1, 2):  # whatever the process drew before
        torch.manual_seed(noise)
        seed_process(5)
        states.append(trained(model_dir, 2).state())
    assert states[0] == states[1]
