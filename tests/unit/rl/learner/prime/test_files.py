"""What is removed, what is written, and from what may be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.errors import EvidenceError, TrainerError
from rl.learner.prime.files import CheckpointRef, PrimeFiles, StepManifest
from rl.learner.prime.wire import MicroBatch, WireSequence, encode


@pytest.fixture
def files(tmp_path: Path) -> PrimeFiles:
    made = PrimeFiles(tmp_path / "prime")
    made.prepare()
    return made


def fill(files: PrimeFiles, step: int) -> CheckpointRef:
    for folder in (files.rollouts, files.broadcasts):
        (folder / f"step_{step}").mkdir()
        (folder / f"step_{step}" / "STABLE").touch()
    folder = files.checkpoints / f"step_{step}" / "trainer"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_text(f"index of {step}")
    for shard in range(2):
        (folder / f"__{shard}_0.distcp").write_text(f"shard of {step}")
    ref = files.checkpoint(step)
    files.complete(manifest(ref))
    return ref


def manifest(ref: CheckpointRef) -> StepManifest:
    return StepManifest(
        update=ref.step, group_ids=["g"], batch_sha256=["0"], adapter_sha256="1", checkpoint=ref
    )


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_lies_past_the_resume_step_goes_and_nothing_else(files: PrimeFiles) -> None:
    for step in (1, 2, 3, 10):
        fill(files, step)
    for folder in (files.rollouts, files.broadcasts, files.checkpoints):
        (folder / "step_03").mkdir()
        (folder / "step_x").mkdir()
        (folder / "notes-step_9").mkdir()
    other = ["notes-step_9", "step_03", "step_x"]
    files.clear_past(2)
    assert steps(files.rollouts) == sorted([*other, "step_1", "step_2"])
    assert steps(files.broadcasts) == sorted([*other, "step_1"])
    assert steps(files.checkpoints) == sorted([*other, "step_1", "step_2"])
    assert steps(files.manifests) == ["step_1.json", "step_2.json"]


def test_a_symbolic_link_is_not_followed(files: PrimeFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "step_5").mkdir(parents=True)
    (files.rollouts / "step_4").symlink_to(outside)
    files.checkpoints.rmdir()
    files.checkpoints.symlink_to(outside)
    files.clear_past(0)
    assert (outside / "step_5").is_dir()
    assert (files.rollouts / "step_4").is_symlink()


def test_a_fresh_start_clears_everything(files: PrimeFiles) -> None:
    fill(files, 1)
    (files.broadcasts / "step_0").mkdir()
    assert len(files.clear_past(0)) == 5
    assert steps(files.broadcasts) == steps(files.manifests) == []
    assert files.clear_past(0) == []


def test_each_rank_has_its_file_and_no_other_is_left(files: PrimeFiles) -> None:
    batch = MicroBatch()
    batch.add(WireSequence([1, 2], [False, True], [0.0, 1.0], [0.0, -1.0]), 1.0)
    digests = files.write_batch(3, [[batch], [batch.silent()]])
    folder = files.rollouts / "step_3"
    assert steps(folder) == ["rank_0.bin", "rank_1.bin"]
    assert (folder / "rank_0.bin").read_bytes() == encode([batch])
    assert len(set(digests)) == 2


def test_a_whole_checkpoint_can_be_resumed_from(files: PrimeFiles) -> None:
    ref = fill(files, 2)
    assert files.require(ref) == manifest(ref)


def remove_checkpoint(files: PrimeFiles) -> None:
    for path in (files.checkpoints / "step_2" / "trainer").iterdir():
        path.unlink()


def remove_shard(files: PrimeFiles) -> None:
    (files.checkpoints / "step_2" / "trainer" / "__1_0.distcp").unlink()


def truncate_shard(files: PrimeFiles) -> None:
    (files.checkpoints / "step_2" / "trainer" / "__1_0.distcp").write_text("")


def shorten_shard(files: PrimeFiles) -> None:
    (files.checkpoints / "step_2" / "trainer" / "__1_0.distcp").write_text("sh")


def alter_index(files: PrimeFiles) -> None:
    (files.checkpoints / "step_2" / "trainer" / ".metadata").write_text("index of 9")


def remove_manifest(files: PrimeFiles) -> None:
    (files.manifests / "step_2.json").unlink()


def tear_manifest(files: PrimeFiles) -> None:
    path = files.manifests / "step_2.json"
    path.write_bytes(path.read_bytes()[:40])


def swap_manifest(files: PrimeFiles) -> None:
    path = files.manifests / "step_2.json"
    values = json.loads(path.read_text())
    values["checkpoint"]["index_sha256"] = "f" * 64
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "damage",
    [
        remove_checkpoint,
        remove_shard,
        truncate_shard,
        shorten_shard,
        alter_index,
        remove_manifest,
        tear_manifest,
        swap_manifest,
    ],
)
def test_an_impossible_resume_is_refused(files: PrimeFiles, damage) -> None:
    ref = fill(files, 2)
    damage(files)
    with pytest.raises(EvidenceError) as caught:
        files.require(ref)
    assert "the one before" in caught.value.remedy


def test_a_checkpoint_without_its_index_is_not_whole(files: PrimeFiles) -> None:
    fill(files, 1)
    (files.checkpoints / "step_1" / "trainer" / ".metadata").unlink()
    with pytest.raises(TrainerError, match="2 shards, no index"):
        files.checkpoint(1)


def test_kept_checkpoints_and_the_newest_stay(files: PrimeFiles) -> None:
    for step in (1, 2, 3, 4):
        fill(files, step)
    files.keep_checkpoints({2, 4, 5})
    assert steps(files.checkpoints) == ["step_2", "step_4"]
    assert steps(files.manifests) == ["step_2.json", "step_4.json"]


def test_a_done_step_leaves_its_checkpoint_only(files: PrimeFiles) -> None:
    fill(files, 1)
    files.forget(1)
    files.forget(1)
    assert steps(files.rollouts) == steps(files.broadcasts) == []
    assert steps(files.checkpoints) == ["step_1"]
