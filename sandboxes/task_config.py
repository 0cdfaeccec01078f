"""Reads task.toml so that no key of it is ignored without a word.

Harbor ignores keys that it doesn't know and drops some that it does.  The rule
(docs/tasks.md gives its reasons), each finding with key and line:
- error: an unknown key in a table that says how the task runs; anywhere, one that
  resembles a known key; a value that Harbor would drop.
- warning: an unknown key that only describes (the top level, `[task]`); a key that
  Harbor knows and our own loop does not act on.
- nothing: whatever stands in a free table such as `[metadata]` or an `env`.
"""

from __future__ import annotations

import difflib
import functools
import math
import posixpath
import typing
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.constants import MAIN_SERVICE_NAME
from harbor.models.task.artifacts import effective_artifact_service, normalize_artifact_entries
from harbor.models.task.config import (
    ArtifactConfig,
    Author,
    EnvironmentConfig,
    PackageInfo,
    TaskConfig,
    TaskOS,
    VerifierEnvironmentMode,
)
from harbor.models.task.verifier_mode import resolve_task_verifier_mode
from pydantic import BaseModel, ValidationError

from rl.config_file import read_toml
from rl.errors import TaskPackageError
from sandboxes.toml_lines import KeyPath, key_lines

# Older spellings that Harbor itself understands.
RENAMED: dict[type[BaseModel], set[str]] = {
    TaskConfig: {"version"},
    EnvironmentConfig: {"memory", "storage"},
}
# Old sizes that Harbor drops without a word unless they are strings such as "2G".
SIZES = {"memory": "memory_mb", "storage": "storage_mb"}
DESCRIPTIVE: tuple[type[BaseModel], ...] = (TaskConfig, PackageInfo, Author)
RESEMBLANCE = 0.6  # of two spellings: difflib's own measure of a close match
HINT_RESEMBLANCE = 0.4  # enough for a question, not for a verdict
# What Harbor acts on and our own episode loop does not.
UNUSED = (
    ("environment", "healthcheck"),
    ("environment", "skills_dir"),
    ("agent", "user"),
    ("agent", "network_mode"),
    ("verifier", "user"),
    ("verifier", "network_mode"),
    ("verifier", "collect"),
    ("solution", "env"),
)
# Where a verifier's tests and its reward lie.
DECIDING = ("/tests", "/logs/verifier")


@dataclass(frozen=True, slots=True)
class Finding:
    """One key that would be ignored."""

    path: KeyPath
    what: str
    fatal: bool


def read_config(path: Path) -> tuple[TaskConfig, tuple[str, ...]]:
    """The configuration in the file `path`, and warnings, one line each.

    Raises:
        TaskPackageError: naming every wrong key with its line.
    """
    data = read_toml(path, TaskPackageError)
    findings = [*_unknown(data, TaskConfig, ()), *_contradicting(data), *_unused(data)]
    places = _Places(path)
    errors = [f"{places.line(found.path)}{found.what}" for found in findings if found.fatal]
    if errors:
        raise TaskPackageError("\n  - ".join(errors), str(path), "correct or remove these keys")
    warned = tuple(f"{places.line(found.path)}{found.what}" for found in findings)
    config = _validated(data, path, places)
    _refuse_unsupported(config, path, places)
    _refuse_nothing_left(config, path, places)
    return config, warned


class _Places:
    """Where keys stand in a file, found out when somebody asks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @functools.cached_property
    def _lines(self) -> dict[KeyPath, int]:
        return key_lines(self._path.read_text(encoding="utf-8"))

    def line(self, path: KeyPath) -> str:
        """`line N: ` for a key, or for the nearest table around it."""
        while path and path not in self._lines:
            path = path[:-1]
        return f"line {self._lines[path]}: " if path else ""


def _validated(data: dict[str, Any], path: Path, places: _Places) -> TaskConfig:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return TaskConfig.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{places.line(item['loc'])}'{_dotted(item['loc'])}': {item['msg']}"
            for item in error.errors()
        ]
        raise TaskPackageError("\n  - ".join(lines), str(path), "correct these values") from None
    except ArithmeticError:  # Harbor's own arithmetic on a size such as "1e999G"
        raise TaskPackageError(
            "a size is beyond any number", str(path), "correct 'memory' or 'storage'"
        ) from None


def _unknown(data: dict[str, Any], model: type[BaseModel], table: KeyPath) -> Iterator[Finding]:
    """The keys below `table` that Harbor would ignore."""
    known = {*model.model_fields, *RENAMED.get(model, ())}
    for key, value in data.items():
        path = (*table, key)
        if key not in known:
            yield _unknown_key(path, known, model)
        elif key in SIZES and key not in model.model_fields and not isinstance(value, str):
            what = f"'{_dotted(path)}' = {value!r} would be dropped; did you mean '{SIZES[key]}'"
            yield Finding(path, f"{what} (MiB)?", fatal=True)
        elif key in model.model_fields:
            child = _model_in(_annotations(model)[key])
            if child is not None:
                for inner, where in _tables(value, path):
                    yield from _unknown(inner, child, where)


def _unknown_key(path: KeyPath, known: set[str], model: type[BaseModel]) -> Finding:
    key = str(path[-1])
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=HINT_RESEMBLANCE)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"
    alike = difflib.get_close_matches(key, sorted(known), n=1, cutoff=RESEMBLANCE)
    fatal = bool(alike) or model not in DESCRIPTIVE
    what = f"unknown key '{_dotted(path)}'"
    return Finding(path, f"{what}; {hint}" if fatal else f"{what} is ignored", fatal)


def _contradicting(data: dict[str, Any]) -> Iterator[Finding]:
    """Old spellings that Harbor drops because the new one is there as well."""
    if {"version", "schema_version"} <= data.keys():
        what = "'version' is dropped, because 'schema_version' is there too"
        yield Finding(("version",), what, fatal=data["version"] != data["schema_version"])
    environment: Any = data.get("environment")
    if isinstance(environment, dict) and "allow_internet" in environment:
        newer = [key for key in ("network_mode", "allowed_hosts") if key in environment]
        if newer:
            what = f"'environment.allow_internet' is dropped, because '{newer[0]}' is there too"
            yield Finding(("environment", "allow_internet"), what, fatal=True)


def _unused(data: dict[str, Any]) -> Iterator[Finding]:
    """Keys that Harbor knows and our own episode loop passes over."""
    for path in UNUSED:
        value: Any = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            yield Finding(path, f"'{_dotted(path)}' is not acted on here", fatal=False)
    verifier: Any = data.get("verifier")
    if data.get("artifacts") and not _defines_a_sandbox(verifier):
        what = "'artifacts' is not acted on here: the verifier has no sandbox of its own"
        yield Finding(("artifacts",), what, fatal=False)


def _defines_a_sandbox(verifier: object) -> bool:
    table = typing.cast(dict[str, Any], verifier) if isinstance(verifier, dict) else {}
    return "environment" in table or table.get("environment_mode") == "separate"


def _is_separate(config: TaskConfig) -> bool:
    return resolve_task_verifier_mode(config) == VerifierEnvironmentMode.SEPARATE


def _is_unfit(artifact: str | ArtifactConfig) -> bool:
    """Whether an artifact would lie where the verifier's own files do, or has no sandbox."""
    (entry,) = normalize_artifact_entries([artifact])
    source = PurePosixPath(posixpath.normpath("/" + entry.source.lstrip("/")))
    places = [PurePosixPath(place) for place in DECIDING]
    overlaps = any(source.is_relative_to(at) or at.is_relative_to(source) for at in places)
    return overlaps or effective_artifact_service(entry) != MAIN_SERVICE_NAME


def _refuse_unsupported(config: TaskConfig, path: Path, places: _Places) -> None:
    environment = config.environment
    reasons: dict[KeyPath, tuple[str, bool]] = {
        ("steps",): ("tasks of several steps", bool(config.steps)),
        ("environment", "os"): ("systems other than Linux", environment.os != TaskOS.LINUX),
        ("environment", "gpus"): ("GPUs", bool(environment.gpus)),
        ("environment", "tpu"): ("TPUs", environment.tpu is not None),
        ("environment", "mcp_servers"): ("MCP servers", bool(environment.mcp_servers)),
        ("artifacts",): (
            "artifacts that decide the reward, or of another service,",
            _is_separate(config) and any(map(_is_unfit, config.artifacts)),
        ),
    }
    found = [
        f"{places.line(key)}{_dotted(key)}: {reason} cannot be run"
        for key, (reason, applies) in reasons.items()
        if applies
    ]
    if found:
        raise TaskPackageError(
            "; ".join(found), str(path), "leave the package out, or rewrite it without them"
        )


def _refuse_nothing_left(config: TaskConfig, path: Path, places: _Places) -> None:
    """Refuse limits and sizes that leave nothing to run in."""
    environment = config.environment
    numbers: dict[KeyPath, float | None] = {
        ("verifier", "timeout_sec"): config.verifier.timeout_sec,
        ("agent", "timeout_sec"): config.agent.timeout_sec,
        ("environment", "build_timeout_sec"): environment.build_timeout_sec,
        ("environment", "cpus"): environment.cpus,
        ("environment", "memory_mb"): environment.memory_mb,
        ("environment", "storage_mb"): environment.storage_mb,
    }
    wrong = [
        f"{places.line(key)}'{_dotted(key)}' = {value} is no finite number above 0"
        for key, value in numbers.items()
        if value is not None and not (math.isfinite(value) and value > 0)
    ]
    if wrong:
        raise TaskPackageError("\n  - ".join(wrong), str(path), "correct or remove these keys")


def _tables(value: object, where: KeyPath) -> list[tuple[dict[str, Any], KeyPath]]:
    """The tables in a value: itself, or those of a list."""
    if isinstance(value, dict):
        return [(typing.cast(dict[str, Any], value), where)]
    if isinstance(value, list):
        items = typing.cast(list[object], value)
        return [
            (typing.cast(dict[str, Any], item), (*where, at))
            for at, item in enumerate(items)
            if isinstance(item, dict)
        ]
    return []


@functools.cache
def _annotations(model: type[BaseModel]) -> dict[str, Any]:
    """The types of a model's fields, those named by a string included."""
    return typing.get_type_hints(model)


@functools.cache
def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `X`, `X | None` or `list[str | X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _dotted(path: Sequence[int | str]) -> str:
    """`a.b[0].c`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
