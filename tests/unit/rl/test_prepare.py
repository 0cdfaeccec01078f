"""Models are complete or refused; splits are disjoint, stratified and repeatable."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from rl.config import ModelConfig, TasksConfig
from rl.errors import ConfigurationError, InfrastructureError, TaskPackageError
from rl.learner import base_model
from rl.prepare import prepare_model, prepare_tasks
from rl.records import TaskRef
from rl.split import apportion, split
from tests.support.packages import write_package

DIGEST = "a" * 64


def ref(index: int, family: str = "copy") -> TaskRef:
    digest = hashlib.sha256(f"{family}-{index}".encode()).hexdigest()
    return TaskRef(
        name=f"{family}-{index}", digest=digest, path=f"t{index}", family=family, instruction="do"
    )


def tasks_config(train: int, heldout: int, seed: int = 0) -> TasksConfig:
    return TasksConfig(train=train, heldout=heldout, seed=seed)


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}", encoding="utf-8")
    return path


def local_model(path: Path) -> ModelConfig:
    return ModelConfig(source="path", name="tiny", path=str(path))


def converted_model(root: Path) -> tuple[ModelConfig, Path]:
    """A finished conversion, as the converter leaves it."""
    config = ModelConfig(source="packaged", name="tiny", sha256=DIGEST, dtype="float32")
    out = model_directory(root / "models" / f"tiny-float32-{DIGEST[:8]}")
    files = {path.name: hashlib.sha256(b"{}").hexdigest() for path in out.iterdir()}
    manifest = {"source_sha256": DIGEST, "dtype": "float32", "files": files}
    (out / "conversion.json").write_text(json.dumps(manifest), encoding="utf-8")
    return config, out


# --- models ------------------------------------------------------------------


def test_local_model_is_returned_with_its_digests(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "tiny")
    model = prepare_model(local_model(directory), tmp_path)
    assert model.path == directory
    assert model.files["config.json"] == hashlib.sha256(b"{}").hexdigest()
    assert set(model.files) == {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_local_model_is_refused(tmp_path: Path, name: str) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / name).unlink()
    with pytest.raises(ConfigurationError, match=name.removeprefix("model")) as caught:
        prepare_model(local_model(directory), tmp_path)
    assert caught.value.where == str(directory)


def test_missing_local_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such model directory"):
        prepare_model(local_model(tmp_path / "nothing"), tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "tiny")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"model-2\.safetensors is missing"):
        prepare_model(local_model(directory), tmp_path)


def test_finished_conversion_is_not_made_again(tmp_path: Path) -> None:
    config, out = converted_model(tmp_path)
    assert prepare_model(config, tmp_path).path == out


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest", "other source"])
def test_damaged_conversion_is_refused_with_a_remedy(tmp_path: Path, damage: str) -> None:
    config, out = converted_model(tmp_path)
    manifest = out / "conversion.json"
    if damage == "changed":
        (out / "config.json").write_text("[]", encoding="utf-8")
    elif damage == "missing":
        (out / "config.json").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        text = manifest.read_text(encoding="utf-8")
        manifest.write_text(text.replace(DIGEST, "b" * 64), encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        prepare_model(config, tmp_path)
    assert f"rm -r {out}" in caught.value.remedy


def test_refusal_of_the_converter_arrives_typed(tmp_path: Path) -> None:
    config = ModelConfig(source="packaged", name="no-such-model", sha256=DIGEST)
    with pytest.raises(ConfigurationError, match="no such packaged model"):
        prepare_model(config, tmp_path)


def test_wrong_digest_of_the_packaged_file_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(source="packaged", name="smollm2-135m-instruct", sha256=DIGEST)
    with pytest.raises(ConfigurationError, match="sha256"):
        prepare_model(config, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def exit_badly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_death_of_the_child_is_an_infrastructure_error() -> None:
    with pytest.raises(InfrastructureError, match="exit code -9"):
        base_model._in_child(exit_badly)


def test_hub_out_of_reach_names_cache_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = ModelConfig(source="hub", name="some/model", revision="c" * 40)
    with pytest.raises(InfrastructureError, match="can't be reached") as caught:
        prepare_model(config, tmp_path)
    assert str(tmp_path) in caught.value.what
    assert "hf download some/model" in caught.value.remedy


@pytest.mark.parametrize("name", ["a b/c/d", "../x", "a" * 100, "x--y"])
def test_a_name_that_no_repository_can_have_is_refused(tmp_path: Path, name: str) -> None:
    config = ModelConfig(source="hub", name=name, revision="c" * 40)
    with pytest.raises(ConfigurationError, match="no repositories of such a name") as caught:
        prepare_model(config, tmp_path)
    assert caught.value.where == name and "model.name" in caught.value.remedy


def test_the_home_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    path = "~no-such-user/x"
    tasks = TasksConfig(source="path", path=path, train=1, heldout=1)
    for key, attempt in (
        ("model.path", lambda: prepare_model(local_model(Path(path)), tmp_path)),
        ("tasks.path", lambda: prepare_tasks(tasks, tmp_path)),
    ):
        with pytest.raises(ConfigurationError, match="no home directory") as caught:
            attempt()
        assert caught.value.where == path and key in caught.value.remedy


@pytest.mark.parametrize("index", ["[" * 100_000, '{"weight_map": {"a": 5}}', "[]", '"x"'])
def test_an_odd_index_of_shards_is_refused(tmp_path: Path, index: str) -> None:
    directory = model_directory(tmp_path / "tiny")
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"index of shards|5 is missing"):
        prepare_model(local_model(directory), tmp_path)


# --- tasks -------------------------------------------------------------------


def test_split_is_disjoint_and_of_the_sizes_asked_for() -> None:
    tasks = [ref(i, family) for family in ("copy", "move", "touch") for i in range(10)]
    train, heldout = split(tasks, tasks_config(18, 6), "bank")
    assert (len(train), len(heldout)) == (18, 6)
    assert len({task.digest for task in (*train, *heldout)}) == 24
    for family in ("copy", "move", "touch"):
        assert sum(task.family == family for task in train) == 6
        assert sum(task.family == family for task in heldout) == 2


def test_split_depends_on_content_and_seed_alone() -> None:
    tasks = [ref(i, family) for family in ("copy", "move") for i in range(10)]
    config = tasks_config(8, 4)
    assert split(tasks, config, "a") == split(tasks[::-1], config, "b")
    assert split(tasks, config, "a") != split(tasks, tasks_config(8, 4, seed=1), "a")


def test_tasks_of_equal_content_count_once() -> None:
    twins = [ref(1), ref(1).model_copy(update={"name": "twin"}), ref(2)]
    with pytest.raises(ConfigurationError, match=r"3 tasks are wanted.* 2 different ones"):
        split(twins, tasks_config(2, 1), "bank")


@pytest.mark.parametrize(
    ("total", "sizes", "wanted"),
    [
        (6, [10, 10, 10], [2, 2, 2]),
        (5, [10, 5, 0], [3, 2, 0]),
        (3, [1, 1, 1], [1, 1, 1]),
        (1, [1, 99], [0, 1]),
        (0, [], []),
    ],
)
def test_apportioning_never_exceeds_a_family(
    total: int, sizes: list[int], wanted: list[int]
) -> None:
    assert apportion(total, sizes) == wanted


def test_embedded_tasks_are_made_once_and_the_same(tmp_path: Path) -> None:
    config = TasksConfig(train=12, heldout=6, seed=3)
    first = prepare_tasks(config, tmp_path)
    again = prepare_tasks(config, tmp_path)
    assert first == again
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == [first.root.name]
    assert all((first.root / task.path / "task.toml").is_file() for task in first.train)


def test_changed_embedded_task_is_refused(tmp_path: Path) -> None:
    config = TasksConfig(train=12, heldout=6, seed=3)
    tasks = prepare_tasks(config, tmp_path)
    (tasks.root / tasks.train[0].path / "instruction.md").write_text("other", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="have changed") as caught:
        prepare_tasks(config, tmp_path)
    assert "rm -r" in caught.value.remedy


def test_package_linked_from_elsewhere_is_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path / "bank")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "linked").symlink_to(package)
    config = TasksConfig(source="path", path=str(tmp_path / "tasks"), train=1, heldout=1)
    with pytest.raises(TaskPackageError, match="leaves the folder") as caught:
        prepare_tasks(config, tmp_path)
    assert caught.value.where == str(package) and caught.value.remedy


def test_missing_or_empty_folder_of_tasks_is_refused(tmp_path: Path) -> None:
    missing = TasksConfig(source="path", path=str(tmp_path / "none"), train=1, heldout=1)
    with pytest.raises(ConfigurationError, match="no such folder"):
        prepare_tasks(missing, tmp_path)
    empty = TasksConfig(source="path", path=str(tmp_path), train=1, heldout=1)
    with pytest.raises(TaskPackageError, match="holds no task package"):
        prepare_tasks(empty, tmp_path)
