from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as save_tensors

from rl.learner.checkpoint import Checkpoint, load, save_checkpoint
from rl.learner.compare import Comparison, compare
from rl.learner.state import LearnerState, files_sha256
from rl.records import AdapterBytes, Probe

SCHEDULER = {"updates_done": 2, "next_draw": 4, "redraw": [3], "durations": {"0": [1, 2.5]}}
WEIGHTS = {"a": np.array([[3.0, 0.0]], np.float32), "b": np.array([4.0], np.float32)}


def checkpoint(root: Path, **changes: Any) -> Checkpoint:
    """A checkpoint of update 2 in which `changes` differ from the usual one."""
    weights = save_tensors(changes.get("weights", WEIGHTS))
    files = {
        "adapter_model.safetensors": changes.get("content", weights),
        "adapter_config.json": json.dumps(changes.get("config", {"r": 8})).encode(),
    }
    adapter = AdapterBytes(
        version=2,
        files=files,
        sha256=files_sha256(files),
        probe=changes.get("probe", Probe(token_ids=[1, 2], logprobs=[-1.0])),
    )
    state = LearnerState(adapter, changes.get("optimizer", b"moments"))
    scheduler = SCHEDULER | changes.get("scheduler", {})
    return load(save_checkpoint(root, 2, state, scheduler, changes.get("digest", "a" * 64)))


def compared(tmp_path: Path, **changes: Any) -> Comparison:
    return compare(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", **changes))


def test_equal_ones_are_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.same
    assert (found.differences, found.notes) == ([], [])
    assert (found.largest_weight, found.relative_weight, found.largest_probe) == (0.0, 0.0, 0.0)


def test_durations_are_measured_and_make_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, scheduler={"durations": {"0": [1, 9.0]}})
    assert found.same
    (note,) = found.notes
    assert note.part == "scheduler" and note.what.startswith("durations")


def test_versions_of_packages_are_told_and_make_no_difference(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    older = two.manifest.model_copy(update={"versions": {"torch": "1.0"}})
    found = compare(one, replace(two, manifest=older))
    assert found.same
    assert any(note.what.endswith('and "1.0"') for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "part", "words"),
    [
        ({"digest": "b" * 64}, "configuration", "aaaaaaaaaaaa and bbbbbbbbbbbb"),
        ({"optimizer": b"others"}, "optimizer", "moments or random state"),
        ({"scheduler": {"redraw": []}}, "scheduler", "redraw: [3] and []"),
        ({"scheduler": {"next_draw": 5}}, "scheduler", "next_draw: 4 and 5"),
        ({"config": {"r": 4}}, "adapter", "r: 8 and 4"),
        ({"weights": {"a": WEIGHTS["a"]}}, "adapter", "other layers or shapes"),
        ({"content": b"none"}, "adapter", "can't be read"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, changes: dict[str, Any], part: str, words: str
) -> None:
    found = compared(tmp_path, **changes)
    assert not found.same
    (difference,) = found.differences
    assert difference.part == part
    assert words in difference.what


def test_a_change_of_weights_is_measured(tmp_path: Path) -> None:
    changed = WEIGHTS | {"b": np.array([4.5], np.float32)}
    found = compared(tmp_path, weights=changed, probe=Probe(token_ids=[1, 2], logprobs=[-1.25]))
    assert found.largest_weight == pytest.approx(0.5)
    assert found.relative_weight == pytest.approx(0.1)  # 0.5 of sqrt(3*3 + 4*4)
    assert found.largest_probe == pytest.approx(0.25)
    assert found.differences[0].what.startswith("1 of 2 tensors differ")
