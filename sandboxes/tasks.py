"""Harbor task packages: strict loading, and pinning by content.

Invariants:
- A loaded package is one this project can run: single-step, Linux, graded in its
  own sandbox, with every file it needs.
- No key of task.toml is ignored: what Harbor does not know, or would drop without
  a word, is refused with file, key and the nearest known key.
- No file of a package lies outside it, and all their names are UTF-8.
- Its limits and sizes are numbers above 0.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import typing
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harbor.models.task.config import NetworkMode, TaskConfig, TaskOS, VerifierEnvironmentMode
from harbor.models.task.task import strip_canary
from harbor.publisher.packager import Packager
from pydantic import BaseModel, ValidationError

from rl.config_file import read_toml
from rl.errors import TaskPackageError

CONFIG_NAME = "task.toml"
REQUIRED = (CONFIG_NAME, "instruction.md", "tests/test.sh")
_PACKAGE = f"a Harbor package is a folder with {', '.join(REQUIRED)}"
_FOLDER = f"name a folder whose child folders are packages; {_PACKAGE}"
# Older spellings that Harbor itself understands, by the path of their table.
RENAMED = {"": {"version"}, "environment": {"memory", "storage", "allow_internet"}}
# Old sizes that Harbor drops without a word unless they are strings such as "2G".
SIZES = {"memory": "memory_mb", "storage": "storage_mb"}


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

    @property
    def environment_dir(self) -> Path:
        """The build context."""
        return self.path / "environment"


def load_package(path: Path, name: str | None = None) -> TaskPackage:
    """Load the package in the folder `path`.

    Raises:
        TaskPackageError: it is incomplete, has unknown keys, or asks for what
            can't be done here.
    """
    root = Path(os.path.realpath(path))
    for required in REQUIRED:
        if not (root / required).is_file():
            raise TaskPackageError(f"has no {required}", str(path), _PACKAGE)
    _refuse_unfit_paths(root)
    config = _load_config(root / CONFIG_NAME)
    environment, docker = config.environment, root / "environment" / "Dockerfile"
    if not docker.is_file() and not environment.docker_image:
        raise TaskPackageError(
            "has neither environment/Dockerfile nor docker_image", str(path), "add one of them"
        )
    solution = root / "solution" / "solve.sh"
    asked = "network_mode" in environment.model_fields_set
    return TaskPackage(
        name=name or root.name,
        digest=_digest(root),
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
    )


def load_folder(path: Path) -> list[TaskPackage]:
    """Load every package that is a child of `path`, sorted by name.

    Raises:
        TaskPackageError: one is wrong, or there is none.
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
    return [load_package(child) for child in children]


def verify_digest(package: TaskPackage, expected: str) -> None:
    """Check that the files on disk now are those that `expected` pins.

    Raises:
        TaskPackageError: they are not.
    """
    actual = _digest(package.path)
    if actual != expected:
        raise TaskPackageError(
            f"content has changed: digest {actual}, expected {expected}",
            str(package.path),
            "restore the package, or pin and gate the new content",
        )


def _digest(root: Path) -> str:
    """Harbor's content digest, which honours the package's .gitignore."""
    try:
        return Packager.compute_content_hash(root)[0]
    except (OSError, ValueError, RuntimeError) as error:
        raise TaskPackageError(
            f"its content can't be pinned: {error}",
            str(root),
            "correct or remove the file that this names, or .gitignore",
        ) from None


def _load_config(path: Path) -> TaskConfig:
    data = read_toml(path, TaskPackageError)
    problems = list(_problems(data, TaskConfig, ""))
    if problems:
        raise TaskPackageError("\n  - ".join(problems), str(path), "correct or remove these keys")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            config = TaskConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"'{_dotted(item['loc'])}': {item['msg']}" for item in error.errors()]
        raise TaskPackageError("\n  - ".join(lines), str(path), "correct these values") from None
    except ArithmeticError:  # Harbor's own arithmetic on a size such as "1e999G"
        raise TaskPackageError(
            "a size is beyond any number", str(path), "correct 'memory' or 'storage'"
        ) from None
    _refuse_unsupported(config, path)
    _refuse_nothing_left(config, path)
    return config


def _refuse_unsupported(config: TaskConfig, path: Path) -> None:
    verifier = config.verifier
    reasons = {
        "steps: tasks of several steps": bool(config.steps),
        "environment.os: systems other than Linux": config.environment.os != TaskOS.LINUX,
        "environment.gpus: GPUs": bool(config.environment.gpus),
        "environment.tpu: TPUs": config.environment.tpu is not None,
        "environment.mcp_servers: MCP servers": bool(config.environment.mcp_servers),
        "verifier.environment: separate verifier environments": verifier.environment is not None
        or verifier.environment_mode == VerifierEnvironmentMode.SEPARATE,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise TaskPackageError(
            "; ".join(f"{reason} cannot be run" for reason in found),
            str(path),
            "leave the package out, or rewrite it without them",
        )


def _refuse_nothing_left(config: TaskConfig, path: Path) -> None:
    """Refuse limits and sizes that leave nothing to run in."""
    environment = config.environment
    numbers = {
        "verifier.timeout_sec": config.verifier.timeout_sec,
        "agent.timeout_sec": config.agent.timeout_sec,
        "environment.build_timeout_sec": environment.build_timeout_sec,
        "environment.cpus": environment.cpus,
        "environment.memory_mb": environment.memory_mb,
        "environment.storage_mb": environment.storage_mb,
    }
    wrong = [
        f"'{key}' = {value} is no finite number above 0"
        for key, value in numbers.items()
        if value is not None and not (math.isfinite(value) and value > 0)
    ]
    if wrong:
        raise TaskPackageError("\n  - ".join(wrong), str(path), "correct or remove these keys")


def _problems(data: dict[str, Any], model: type[BaseModel], table: str) -> Iterator[str]:
    """One line for each key that Harbor would ignore."""
    known = {*model.model_fields, *RENAMED.get(_without_index(table), ())}
    for key, value in data.items():
        dotted = f"{table}.{key}" if table else key
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.4)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"
            yield f"unknown key '{dotted}'; {hint}"
        elif key in SIZES and key not in model.model_fields and not isinstance(value, str):
            yield f"'{dotted}' = {value!r} would be dropped; did you mean '{SIZES[key]}' (MiB)?"
        elif key in model.model_fields:
            child = _model_in(model.model_fields[key].annotation)
            if child is not None:
                for inner, where in _tables(value, dotted):
                    yield from _problems(inner, child, where)


def _tables(value: object, where: str) -> list[tuple[dict[str, Any], str]]:
    """The tables in a value: itself, or those of a list."""
    if isinstance(value, dict):
        return [(typing.cast(dict[str, Any], value), where)]
    if isinstance(value, list):
        items = typing.cast(list[object], value)
        return [
            (typing.cast(dict[str, Any], item), f"{where}[{at}]")
            for at, item in enumerate(items)
            if isinstance(item, dict)
        ]
    return []


@functools.cache
def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `X`, `X | None` or `list[str | X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _without_index(table: str) -> str:
    return table.removeprefix("verifier.")


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _read_instruction(path: Path) -> str:
    try:
        text = strip_canary(path.read_text(encoding="utf-8")).strip()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 ({error.reason} at byte {error.start})"
        raise TaskPackageError(what, str(path), "save the file as UTF-8") from None
    if not text:
        raise TaskPackageError("is empty", str(path), "write what the agent is to do")
    return text


def _refuse_unfit_paths(root: Path) -> None:
    """Refuse what can't be pinned: names that are no text, links that lead nowhere inside."""
    for path in (root, *root.rglob("*")):
        shown = os.fsencode(path).decode(errors="backslashreplace")
        if shown != str(path):
            raise TaskPackageError("its name is not UTF-8", shown, "rename it")
        if not path.is_symlink():
            continue
        try:
            target = path.resolve()
        except (RuntimeError, OSError):  # Python 3.12 has the first for a loop, 3.13 the second
            raise TaskPackageError("a symlink loop", shown, "remove the link") from None
        if not target.is_relative_to(root):
            raise TaskPackageError(
                "a symlink leaves the package", shown, "replace it by a copy of what it names"
            )
