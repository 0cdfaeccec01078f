"""The part of a Dockerfile that a local sandbox can follow.

Invariants:
- An instruction, flag or variable that can't be followed is refused by name,
  never skipped.
- COPY takes files of the build context only; a source that leaves it is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rl.errors import TaskPackageError

SUPPORTED = "FROM, WORKDIR, ENV, COPY, RUN"
_VARIABLE = re.compile(r"\\?\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Copy:
    """COPY of host files to an absolute path; `into` says that the target is a folder."""

    sources: tuple[Path, ...]
    target: str
    into: bool


@dataclass(frozen=True, slots=True)
class Run:
    """RUN of a shell command in `workdir` under `env`."""

    command: str
    workdir: str
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MakeDir:
    """A folder that WORKDIR makes."""

    path: str


Step = Copy | Run | MakeDir


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Dockerfile as steps."""

    image: str
    steps: tuple[Step, ...]
    env: dict[str, str]
    workdir: str


EMPTY_RECIPE = Recipe("", (), {}, "/")


def parse_dockerfile(path: Path) -> Recipe:
    """Read the Dockerfile at `path`; its folder is the build context.

    Raises:
        TaskPackageError: it is unreadable or asks for what can't be followed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskPackageError(f"cannot be read: {error}", str(path)) from None
    parser = _Parser(path)
    for number, line in _logical_lines(text):
        parser.take(line, f"{path}:{number}")
    if not parser.image:
        raise TaskPackageError("has no FROM", str(path))
    return Recipe(parser.image, tuple(parser.steps), parser.env, parser.workdir)


class _Parser:
    """State while reading: environment, working directory, steps so far."""

    def __init__(self, path: Path) -> None:
        self.context = path.parent.resolve()
        self.image = ""
        self.env: dict[str, str] = {}
        self.workdir = "/"
        self.steps: list[Step] = []

    def take(self, line: str, where: str) -> None:
        """Follow one instruction."""
        name, _, value = line.partition(" ")
        name, value = name.upper(), value.strip()
        if name == "FROM":
            if self.image:
                raise TaskPackageError("several FROM (build stages) cannot be followed", where)
            self.image = value
        elif not self.image:
            raise TaskPackageError(f"{name} before FROM", where)
        elif name == "WORKDIR":
            self.workdir = self._absolute(self._expand(value.strip("\"'"), where))
            self.steps.append(MakeDir(self.workdir))
        elif name == "ENV":
            self._take_env(value, where)
        elif name == "COPY":
            self._take_copy(value, where)
        elif name == "RUN":
            self._take_run(value, where)
        else:
            raise TaskPackageError(
                f"{name} cannot be followed in a local sandbox",
                where,
                f"supported: {SUPPORTED}; use the modal provider for anything else",
            )

    def _take_env(self, value: str, where: str) -> None:
        words = _words(value, where)
        if words and "=" not in words[0]:
            key, _, rest = value.partition(" ")
            words = [f"{key}={rest.strip()}"]
        for word in words:
            key, equals, content = word.partition("=")
            if not equals:
                raise TaskPackageError(f"ENV needs KEY=VALUE, not '{word}'", where)
            self.env[key] = self._expand(content, where)

    def _take_copy(self, value: str, where: str) -> None:
        if value.startswith("["):
            words = [str(word) for word in _json_words(value, where)]
        else:
            words = _words(value, where)
        flags = [word for word in words if word.startswith("--")]
        if flags:
            raise TaskPackageError(f"COPY {flags[0]} cannot be followed", where)
        if len(words) < 2:
            raise TaskPackageError("COPY needs a source and a target", where)
        *names, target = (self._expand(word, where) for word in words)
        sources = [path for name in names for path in self._sources(name, where)]
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1
        self.steps.append(Copy(tuple(sources), self._absolute(target), into))

    def _take_run(self, value: str, where: str) -> None:
        if value.startswith("--"):
            raise TaskPackageError(f"RUN {value.split()[0]} cannot be followed", where)
        if "<<" in value.split("\n")[0] and re.search(r"<<-?['\"]?\w", value):
            raise TaskPackageError("RUN with a here-document cannot be followed", where)
        command = shlex.join(_json_words(value, where)) if value.startswith("[") else value
        self.steps.append(Run(command, self.workdir, tuple(self.env.items())))

    def _sources(self, name: str, where: str) -> list[Path]:
        """The files that a COPY source names, all inside the context."""
        name = name.lstrip("/")
        wild = any(char in name for char in "*?[")
        found = sorted(self.context.glob(name)) if wild else [self.context / name]
        for path in found:
            if not path.resolve().is_relative_to(self.context):
                raise TaskPackageError(f"COPY source '{name}' leaves the folder", where)
        if not found or not all(path.exists() for path in found):
            raise TaskPackageError(f"COPY source '{name}' does not exist", where)
        return found

    def _absolute(self, path: str) -> str:
        joined = PurePosixPath(self.workdir) / path
        parts: list[str] = []
        for part in joined.parts[1:]:
            if part == "..":
                parts = parts[:-1]
            else:
                parts.append(part)
        return "/" + "/".join(parts)

    def _expand(self, text: str, where: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            if match.group().startswith("\\"):
                return match.group()[1:]
            name = match.group(1) or match.group(2)
            if name == "PATH" and name not in self.env:
                return DEFAULT_PATH
            if name not in self.env:
                raise TaskPackageError(f"variable ${name} has no value", where)
            return self.env[name]

        return _VARIABLE.sub(value_of, text)


DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; comments and joins resolved."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or (not line and not pending):
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1].rstrip() + " "
            continue
        found.append((start, pending + line))
        pending = ""
    if pending.strip():
        found.append((start, pending.strip()))
    return found


def _words(value: str, where: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise TaskPackageError(f"cannot be parsed: {error}", where) from None


def _json_words(value: str, where: str) -> list[str]:
    try:
        words: object = json.loads(value)
    except ValueError as error:
        raise TaskPackageError(f"cannot be parsed: {error}", where) from None
    if not isinstance(words, list):
        raise TaskPackageError("cannot be parsed: a list is expected", where)
    return [str(word) for word in words]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
