"""Harbor task packages: strict loading, and pinning by content.

Invariants:
- A loaded package is one this project can run: single-step, Linux, graded in its
  own sandbox, with every file it needs.
- No key of task.toml is ignored without a word (`sandboxes.task_config`).
- No file of a package lies outside it, and all their names are UTF-8.
- Its limits and sizes are numbers above 0.
- A folder is loaded whole: every package that is wrong is named, not only the first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harbor.models.task.config import NetworkMode, TaskConfig, VerifierEnvironmentMode
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import strip_canary
from harbor.models.task.verifier_mode import (
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)

from rl.errors import TaskPackageError
from sandboxes.contents import differences, read_contents, shown
from sandboxes.task_config import read_config

CONFIG_NAME = "task.toml"
REQUIRED = (CONFIG_NAME, "instruction.md", "tests/test.sh")
SHOWN_REFUSALS = 20
_PACKAGE = f"a Harbor package is a folder with {', '.join(REQUIRED)}"
_FOLDER = f"name a folder whose child folders are packages; {_PACKAGE}"


@dataclass(frozen=True, slots=True)
class TaskPackage:
    """One task, pinned by `digest`; paths are absolute."""

    name: str
    digest: str
    path: Path
    family: str
    instruction: str
    workdir: str | None
    cpus: float | None
    memory_mb: int | None
    network: str | None
    dockerfile: Path | None
    docker_image: str | None
    verifier_timeout_s: float
    agent_timeout_s: float | None
    test_script: Path
    solution_script: Path | None
    verifier_env: dict[str, str] = field(default_factory=dict[str, str])
    config: TaskConfig = field(default_factory=TaskConfig, repr=False, compare=False)
    files: dict[str, str] = field(default_factory=dict[str, str], repr=False, compare=False)
    """git's mode and the sha256 of every file; see `sandboxes.contents`."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Keys of task.toml that have no effect, one line each."""

    @property
    def environment_dir(self) -> Path:
        """The build context."""
        return self.path / "environment"

    @property
    def separate_verifier(self) -> bool:
        """Whether the verifier runs in a sandbox of its own."""
        return resolve_task_verifier_mode(self.config) == VerifierEnvironmentMode.SEPARATE

    @property
    def tests_in_image(self) -> bool:
        """Whether the image of the verifier's own sandbox brings the tests."""
        definition = resolve_verifier_environment_definition(self.config, TaskPaths(self.path))
        return definition is not None and definition.bundled_tests

    @property
    def tier(self) -> int | None:
        """How hard the task is meant to be, where its metadata says so by a number."""
        tier = self.config.metadata.get("tier")
        return tier if isinstance(tier, int) and not isinstance(tier, bool) else None


def load_package(path: Path, name: str | None = None) -> TaskPackage:
    """Load the package in the folder `path`.

    Raises:
        TaskPackageError: it is incomplete, has unknown keys, or asks for what
            can't be done here.
    """
    root = Path(os.path.realpath(path))
    for required in REQUIRED:
        if not (root / required).is_file():
            raise TaskPackageError(f"has no {required}", _printable(path), _PACKAGE)
    contents = read_contents(root)
    config, warnings = read_config(root / CONFIG_NAME)
    environment, docker = config.environment, root / "environment" / "Dockerfile"
    if not docker.is_file() and not environment.docker_image:
        raise TaskPackageError(
            "has neither environment/Dockerfile nor docker_image", str(path), "add one of them"
        )
    solution = root / "solution" / "solve.sh"
    asked = "network_mode" in environment.model_fields_set
    return TaskPackage(
        name=name or root.name,
        digest=contents.digest,
        path=root,
        family=str(config.metadata.get("family", "")),
        instruction=_read_instruction(root / "instruction.md"),
        workdir=environment.workdir,
        cpus=environment.cpus,
        memory_mb=environment.memory_mb,
        network=NetworkMode(environment.network_mode).value if asked else None,
        dockerfile=docker if docker.is_file() else None,
        docker_image=environment.docker_image,
        verifier_timeout_s=config.verifier.timeout_sec,
        agent_timeout_s=config.agent.timeout_sec,
        test_script=root / "tests" / "test.sh",
        solution_script=solution if solution.is_file() else None,
        verifier_env=dict(config.verifier.env),
        config=config,
        files=contents.files,
        warnings=warnings,
    )


def survey_folder(path: Path) -> tuple[list[TaskPackage], list[TaskPackageError]]:
    """Every package that is a child of `path`, sorted by name, and why others are none.

    Raises:
        TaskPackageError: there is no such folder, or no package in it.
    """
    if not path.is_dir():
        raise TaskPackageError("no such folder of task packages", str(path), _FOLDER)
    children = sorted(
        child.parent
        for child in path.glob(f"*/{CONFIG_NAME}")
        if not child.parent.name.startswith(".")  # one that is being written
    )
    if not children:
        raise TaskPackageError(
            f"holds no task package (no child folder has a {CONFIG_NAME})", str(path), _FOLDER
        )
    packages: list[TaskPackage] = []
    refused: list[TaskPackageError] = []
    for child in children:
        try:
            packages.append(load_package(child))
        except TaskPackageError as error:
            refused.append(error)
    return packages, refused


def load_folder(path: Path) -> list[TaskPackage]:
    """Load every package that is a child of `path`, sorted by name.

    Raises:
        TaskPackageError: some are wrong, each named, or there is none.
    """
    packages, refused = survey_folder(path)
    if refused:
        raise together(refused, path)
    return packages


def together(refused: Sequence[TaskPackageError], path: Path) -> TaskPackageError:
    """One error for the packages of the folder `path` that can't be loaded."""
    if len(refused) == 1:
        return refused[0]
    lines = [f"{error.where}: {error.what}" for error in refused[:SHOWN_REFUSALS]]
    if len(refused) > SHOWN_REFUSALS:
        lines.append(f"and {len(refused) - SHOWN_REFUSALS} more")
    return TaskPackageError(
        "\n  - ".join([f"{len(refused)} task packages can't be used", *lines]),
        str(path),
        "correct these packages or leave them out",
    )


def verify_digest(package: TaskPackage, expected: str) -> None:
    """Check that the files on disk now are those that `expected` pins.

    Raises:
        TaskPackageError: they are not; it names those that changed since the
            package was loaded.
    """
    contents = read_contents(package.path)
    if contents.digest == expected:
        return
    changes = shown(differences(package.files, contents.files)) if package.files else ""
    since = f"; since it was loaded, {changes}" if changes else ""
    raise TaskPackageError(
        f"content has changed: digest {contents.digest}, expected {expected}{since}",
        str(package.path),
        "restore the package, or pin and gate the new content",
    )


def _read_instruction(path: Path) -> str:
    try:
        text = strip_canary(path.read_text(encoding="utf-8")).strip()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 ({error.reason} at byte {error.start})"
        raise TaskPackageError(what, str(path), "save the file as UTF-8") from None
    if not text:
        raise TaskPackageError("is empty", str(path), "write what the agent is to do")
    return text


def _printable(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
