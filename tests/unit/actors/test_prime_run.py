"""A run of the stand-in for prime-rl: what is taken of it, and how its failures show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine_guard import process_start
from actors.prime_run import PrimeRun, parse_ref
from rl.config import CampaignConfig
from rl.errors import (
    CampaignError,
    ConfigurationError,
    DeadlineExceeded,
    EvidenceError,
    TrainerError,
)
from rl.learner.prime.files import PrimeFiles, StepManifest
from rl.learner.prime.wire import MicroBatch, WireSequence, distribute
from rl.records import AdapterBytes, Probe, UpdateMetrics
from tests.support.prime_config import prime_campaign, sampled_group, stand_in, write_shape

Open = Callable[..., PrimeRun]
NEVER_S = 2.0  # for what never comes
AFTER_WEIGHTS_S = 4.0  # for what never comes after weights that do


class DigestProber:
    """A probe that depends on the bytes alone, without a model."""

    def probe(self, files: dict[str, bytes]) -> Probe:
        digest = hashlib.sha256(files["adapter_model.safetensors"]).digest()
        return Probe(token_ids=[1, 2], logprobs=[-float(digest[0])])


def share(ranks: int = 1) -> list[list[MicroBatch]]:
    sequences = [
        WireSequence([1, 2, 3 + i], [False, True, True], [0.0, 1.0, 1.0], [0.0, -1.0, -0.5])
        for i in range(3)
    ]
    return distribute(sequences, 8, ranks, 0.7)


def step(run: PrimeRun, ranks: int = 1) -> UpdateMetrics:
    version = run.adapter.version
    return run.step([sampled_group(f"g{version}", version)], share(ranks))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Makes runs in one directory, and stops them at the end."""
    runs: list[PrimeRun] = []
    model_dir = write_shape(tmp_path / "model")

    def make(
        fault: str = "",
        inspect_fault: str = "",
        config: CampaignConfig | None = None,
        ranks: int = 1,
    ) -> PrimeRun:
        files = PrimeFiles(tmp_path / "prime")
        run = PrimeRun(
            config or prime_campaign(gpus=float(ranks)),
            model_dir,
            files,
            tmp_path / "logs" / "prime-rl.log",
            stand_in(files.config, fault, inspect_fault, ranks),
            DigestProber(),
        )
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.stop()


def test_it_starts_with_the_weights_of_version_0(opened: Open, tmp_path: Path) -> None:
    run = opened()
    run.start(None, None)
    assert run.adapter.version == 0
    assert run.checkpoint is None
    written = json.loads((tmp_path / "prime" / "trainer.json").read_text())
    assert written["resume"] is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_gives_weights_metrics_and_a_complete_manifest(
    opened: Open, tmp_path: Path, ranks: int
) -> None:
    run = opened(ranks=ranks)
    run.start(None, None)
    before = run.adapter.sha256
    metrics = step(run, ranks)
    assert metrics.update == run.adapter.version == 1
    assert metrics.sampled_tokens == 6
    assert run.adapter.sha256 != before
    path = tmp_path / "prime" / "complete" / "step_1.json"
    manifest = StepManifest.model_validate_json(path.read_bytes())
    assert manifest.adapter_sha256 == run.adapter.sha256
    assert manifest.checkpoint == run.checkpoint
    assert manifest.group_ids == ["g0"]
    assert len(manifest.batch_sha256) == ranks


def test_weights_outlive_their_removal_upstream(opened: Open, tmp_path: Path) -> None:
    run = opened()
    run.start(None, None)
    kept: dict[int, AdapterBytes] = {0: run.adapter}
    for version in (1, 2, 3):
        step(run)
        kept[version] = run.adapter
    assert not (tmp_path / "prime" / "broadcasts" / "step_1").exists()
    assert len({adapter.sha256 for adapter in kept.values()}) == 4


def resumable(opened: Open) -> tuple[AdapterBytes, Any, str]:
    """State after update 2 of a run that made 3, and the weights of update 3."""
    run = opened()
    run.start(None, None)
    step(run)
    step(run)
    adapter, ref = run.adapter, run.checkpoint
    step(run)
    run.stop()
    return adapter, ref, run.adapter.sha256


def test_a_resumed_run_goes_on_as_one_that_never_stopped(opened: Open, tmp_path: Path) -> None:
    adapter, ref, third = resumable(opened)
    again = opened()
    again.start(adapter, ref)
    assert again.adapter.version == 2
    assert again.adapter.sha256 == adapter.sha256
    assert not (tmp_path / "prime" / "checkpoints" / "step_3").exists()
    assert not (tmp_path / "prime" / "complete" / "step_3.json").exists()
    metrics = step(again)
    assert metrics.update == 3
    assert again.adapter.sha256 == third


def test_a_resume_without_its_checkpoint_is_refused_before_anything_goes(
    opened: Open, tmp_path: Path
) -> None:
    adapter, ref, _ = resumable(opened)
    (tmp_path / "prime" / "checkpoints" / "step_2" / "trainer" / ".metadata").unlink()
    again = opened()
    with pytest.raises(EvidenceError, match="cannot resume after update 2"):
        again.start(adapter, ref)
    assert (tmp_path / "prime" / "checkpoints" / "step_3").is_dir()
    assert again.processes() == []


def test_a_resume_from_other_weights_is_refused(opened: Open) -> None:
    adapter, ref, _ = resumable(opened)
    again = opened("other_weights@0")
    with pytest.raises(EvidenceError, match="starts from other weights"):
        again.start(adapter, ref)
    assert again.processes() == []


@pytest.mark.parametrize(
    ("fault", "error", "what"),
    [
        ("dies@2", TrainerError, r"exited with code 0; the weights of step 2[\s\S]*out of memory"),
        ("partial@2", TrainerError, "out of contract"),
        ("vanishes@2", TrainerError, "can't be read"),
        ("no_weights@2", DeadlineExceeded, "the weights of step 2"),
        ("no_stable@2", DeadlineExceeded, "the weights of step 2"),
        ("no_row@2", DeadlineExceeded, "the metrics of step 2"),
        ("not_finite@2", TrainerError, "no loss/mean"),
        ("no_checkpoint@2", TrainerError, "checkpoint is not whole"),
    ],
)
def test_a_failed_step_makes_no_version_and_leaves_no_process(
    opened: Open, tmp_path: Path, fault: str, error: type[CampaignError], what: str
) -> None:
    run = opened(fault)
    run.start(None, None)
    step(run)
    tree = run.processes()
    if error is DeadlineExceeded:
        limit = AFTER_WEIGHTS_S if fault.startswith("no_row") else NEVER_S
        run._config = prime_campaign(update_timeout_s=limit)
    with pytest.raises(error, match=what):
        step(run)
    assert run.adapter.version == 1
    assert not (tmp_path / "prime" / "complete" / "step_2.json").exists()
    assert run.processes() == []
    assert all(process_start(pid) is None for pid in tree)


@pytest.mark.parametrize(
    ("fault", "error", "what"),
    [
        ("partial@0", TrainerError, "out of contract"),
        ("no_stable@0", DeadlineExceeded, "the weights of step 0"),
    ],
)
def test_a_failed_start_leaves_no_process(
    opened: Open, fault: str, error: type[CampaignError], what: str
) -> None:
    limit = {"start_timeout_s": NEVER_S} if error is DeadlineExceeded else {}
    run = opened(fault, config=prime_campaign(prime=limit))
    with pytest.raises(error, match=what):
        run.start(None, None)
    assert run.processes() == []


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("crash", "exited with code 3: no CUDA here"),
        ("silent", "no answer"),
        ("missing", "No module named 'prime_rl'"),
        ("reordered", "inference_logprobs where advantages is expected"),
        ("other_commit", "trainer/rl/train.py differ"),
        ("refused", "refuses the configuration"),
        ("bent", "optim.max_norm is None instead of 1.0"),
    ],
)
def test_another_installation_is_refused_before_it_trains(
    opened: Open, tmp_path: Path, fault: str, what: str
) -> None:
    run = opened(inspect_fault=fault)
    with pytest.raises(ConfigurationError, match=what):
        run.start(None, None)
    assert run.processes() == []
    assert not (tmp_path / "logs" / "prime-rl.log").exists()


def test_a_field_that_is_added_at_the_end_is_no_mismatch(opened: Open) -> None:
    run = opened(inspect_fault="extended")
    run.start(None, None)
    assert run.adapter.version == 0


def test_another_backends_checkpoint_is_no_reference() -> None:
    with pytest.raises(EvidenceError, match="no reference"):
        parse_ref(b"PK\x03\x04", "update-0002")
