"""The actor of the prime-rl backend, with the stand-in for prime-rl and a real model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import actors.prime_trainer
from actors.prime_run import PrimeRun
from actors.prime_trainer import PrimeTrainer
from actors.trainer import Trainer
from rl.errors import EvidenceError, StalenessViolation, TrainerError
from rl.learner.checkpoint import latest, load
from rl.learner.fresh import verify_fresh
from rl.records import AdapterBytes
from tests.support.prime_config import prime_campaign, sampled_group, stand_in
from tests.unit.rl.learner.tiny_policy import write_model

Open = Callable[..., PrimeTrainer]


class Put:
    """An adapter as it would lie in the object store."""

    @staticmethod
    def put(adapter: AdapterBytes) -> AdapterBytes:
        return adapter


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def opened(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes actors of one campaign, and ends them."""
    monkeypatch.setattr(actors.prime_trainer, "AdapterRef", Put)
    made: list[PrimeTrainer] = []

    def make(fault: str = "", resume: Path | None = None, **trainer) -> PrimeTrainer:
        command = stand_in(tmp_path / "prime-rl" / "trainer.json", fault)
        config = prime_campaign(**trainer)
        actor = PrimeTrainer(config, model_dir, tmp_path / "checkpoints", resume, command)
        made.append(actor)
        return actor

    yield make
    for actor in made:
        if actor._run is not None:
            actor._run.stop()


def running(actor: PrimeTrainer) -> PrimeRun:
    assert actor._run is not None
    return actor._run


def one_update(actor: PrimeTrainer) -> AdapterBytes:
    version = actor.ready()
    ids = [f"g{version}-0", f"g{version}-1"]
    for group_id in ids:
        actor.accumulate(version + 1, sampled_group(group_id, version))
    metrics, adapter = actor.step(version + 1, ids)
    assert metrics.update == version + 1
    assert metrics.episodes == 8
    assert isinstance(adapter, AdapterBytes)
    return adapter


def save(actor: PrimeTrainer) -> Path:
    digest = actor._config.digest()
    return Path(actor.checkpoint({"updates_done": actor.ready()}, digest))


def test_it_speaks_the_other_backends_protocol() -> None:
    methods = {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(Trainer, inspect.isfunction)
        if not name.startswith("_")
    }
    for name, signature in methods.items():
        assert inspect.signature(getattr(PrimeTrainer, name)) == signature


def test_version_0_is_the_base_model(opened: Open) -> None:
    actor = opened()
    assert actor.ready() == 0
    probe = running(actor).adapter.probe
    assert probe.logprobs == pytest.approx(probe.base_logprobs, abs=1e-5)
    assert repr(actor) == "PrimeTrainer version 0/4 idle"


def test_an_update_changes_the_probe_and_attempts_are_not_worked_on_early(opened: Open) -> None:
    actor = opened()
    actor.ready()
    group = sampled_group("g0-0")
    assert actor.accumulate_attempts(1, "g0-0", group.episodes[:2]) == 0
    actor.drop("g0-0")
    probe = one_update(actor).probe
    assert max(abs(a - b) for a, b in zip(probe.logprobs, probe.base_logprobs, strict=True)) > 0.01
    assert one_update(actor).probe.base_logprobs == probe.base_logprobs


def test_its_checkpoint_is_loaded_afresh_and_resumed_from(opened: Open, tmp_path: Path) -> None:
    first = opened()
    one_update(first)
    path = save(first)
    assert latest(tmp_path / "checkpoints") == path
    assert verify_fresh(path, first._model_dir, first._config) is not None
    wanted = one_update(first)
    running(first).stop()
    again = opened(resume=path)
    assert again.ready() == 1
    assert load(path).learner.adapter.probe == running(again).adapter.probe
    assert one_update(again).sha256 == wanted.sha256


def test_checkpoints_of_both_are_kept_and_removed_together(opened: Open, tmp_path: Path) -> None:
    actor = opened()
    for _ in range(3):
        one_update(actor)
        save(actor)
    ours = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    theirs = sorted(path.name for path in (tmp_path / "prime-rl" / "checkpoints").iterdir())
    assert (ours, theirs) == (["update-0003"], ["step_3"])


def test_a_resume_whose_other_half_is_gone_is_refused(opened: Open, tmp_path: Path) -> None:
    actor = opened()
    one_update(actor)
    path = save(actor)
    running(actor).stop()
    for shard in (tmp_path / "prime-rl" / "checkpoints" / "step_1" / "trainer").glob("*.distcp"):
        shard.unlink()
    with pytest.raises(EvidenceError, match="cannot resume after update 1"):
        opened(resume=path).ready()


def test_a_refused_step_changes_nothing(opened: Open) -> None:
    actor = opened()
    actor.ready()
    actor.accumulate(1, sampled_group("a"))
    with pytest.raises(StalenessViolation):
        actor.step(2, ["a"])
    with pytest.raises(StalenessViolation):
        actor.accumulate(1, sampled_group("b", version=1))
    with pytest.raises(EvidenceError):
        actor.step(1, ["a", "b"])
    metrics, _ = actor.step(1, ["a"])
    assert metrics.episodes == 4


def test_an_adapter_that_lacks_a_layer_is_refused(opened: Open) -> None:
    actor = opened("missing_layer@1")
    actor.ready()
    actor.accumulate(1, sampled_group("a"))
    with pytest.raises(TrainerError, match=r"does not fit the model, at .*up_proj"):
        actor.step(1, ["a"])
    assert actor.ready() == 0
