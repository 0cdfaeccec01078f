"""Loading and pinning of task packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.errors import TaskPackageError
from sandboxes.bank import write_bank
from sandboxes.tasks import load_folder, load_package, verify_digest


@pytest.fixture
def package_dir(tmp_path: Path) -> Path:
    return write_bank(tmp_path / "bank", ["rm"], 1, seed=0)[0]


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_package_is_read_whole(package_dir: Path) -> None:
    package = load_package(package_dir)
    assert package.name == package_dir.name
    assert package.family == "rm"
    assert package.instruction.startswith("Delete the file ")
    assert (package.cpus, package.memory_mb, package.network) == (0.125, 128, "no-network")
    assert package.verifier_timeout_s == 60.0
    assert package.agent_timeout_s == 600.0
    assert package.solution_script is not None
    assert package.dockerfile is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory = 0.125\n", ["environment.memory", "memory_mb", "dropped"]),
        ("memroy_mb = 5\n", ["environment.memroy_mb", "did you mean 'memory_mb'"]),
        ("[agent.extra]\nx = 1\n", ["agent.extra"]),
        ("[verifier.environment]\ncpu = 1\n", ["verifier.environment.cpu", "'cpus'"]),
        ("[[steps]]\nname = 'a'\nagnet = {}\n", ["steps[0].agnet", "'agent'"]),
        ("[solutions]\n", ["solutions", "'solution'"]),
    ],
)
def test_key_that_would_be_ignored_is_refused_by_name(
    package_dir: Path, text: str, words: list[str]
) -> None:
    _append(package_dir / "task.toml", text)
    with pytest.raises(TaskPackageError) as caught:
        load_package(package_dir)
    for word in ("task.toml", *words):
        assert word in str(caught.value)


def test_old_size_as_text_is_accepted(package_dir: Path) -> None:
    path = package_dir / "task.toml"
    path.write_text(path.read_text().replace("memory_mb = 128", 'memory = "2G"'))
    assert load_package(package_dir).memory_mb == 2048


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_file_is_named(package_dir: Path, missing: str) -> None:
    (package_dir / missing).unlink()
    with pytest.raises(TaskPackageError, match=missing):
        load_package(package_dir)


def test_broken_toml_is_refused(package_dir: Path) -> None:
    _append(package_dir / "task.toml", "= broken")
    with pytest.raises(TaskPackageError, match="not valid TOML"):
        load_package(package_dir)


def test_wrong_type_names_the_key(package_dir: Path) -> None:
    path = package_dir / "task.toml"
    path.write_text(path.read_text().replace("cpus = 0.125", 'cpus = "many"'))
    with pytest.raises(TaskPackageError, match=r"environment\.cpus"):
        load_package(package_dir)


def test_steps_are_refused(package_dir: Path) -> None:
    _append(package_dir / "task.toml", "[[steps]]\nname = 'a'\n")
    with pytest.raises(TaskPackageError, match="several steps"):
        load_package(package_dir)


def test_link_that_leaves_the_package_is_refused(package_dir: Path) -> None:
    (package_dir / "environment" / "files" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskPackageError, match="symlink leaves"):
        load_package(package_dir)


def test_one_changed_byte_breaks_the_pin(package_dir: Path) -> None:
    package = load_package(package_dir)
    verify_digest(package, package.digest)
    _append(package_dir / "tests" / "test.sh", "#")
    with pytest.raises(TaskPackageError, match="content has changed"):
        verify_digest(package, package.digest)


def test_folder_without_packages_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskPackageError, match="holds no task package"):
        load_folder(tmp_path)
    with pytest.raises(TaskPackageError, match="no such folder"):
        load_folder(tmp_path / "absent")


def test_import_is_light() -> None:
    code = (
        "import sys, sandboxes.tasks;"
        "heavy = {'litellm', 'torch', 'ray', 'vllm'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
