"""The part of a Dockerfile that a local sandbox can follow.

Invariants:
- An instruction, flag or variable that can't be followed is refused by name,
  never skipped.
- COPY and ADD take files of the build context only; a source that leaves it is
  refused, and so is one that would come from the network.
- An ARG has its default: there is no command line that could give it another.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rl.errors import TaskPackageError
from sandboxes.archives import is_archive
from sandboxes.rootfs import known_directories

SUPPORTED = "FROM, RUN, COPY, ADD (local), ENV, ARG, WORKDIR, USER"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:[-+])([^}]*))?\})")
_HERE_DOCUMENT = re.compile(r"<<-?['\"]?[A-Za-z_]")
_REMOTE = re.compile(r"[a-z+]+://|git@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Copy:
    """COPY of host files to an absolute path; `into` says that the target is a folder."""

    sources: tuple[Path, ...]
    target: str
    into: bool


@dataclass(frozen=True, slots=True)
class Unpack:
    """ADD of a local archive, unpacked below an absolute path."""

    archive: Path
    target: str


@dataclass(frozen=True, slots=True)
class Run:
    """RUN of a shell command in `workdir` under `env`, as `user` (empty: root)."""

    command: str
    workdir: str
    env: tuple[tuple[str, str], ...]
    user: str = ""


@dataclass(frozen=True, slots=True)
class MakeDir:
    """A folder that WORKDIR makes."""

    path: str


Step = Copy | Unpack | Run | MakeDir


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Dockerfile as steps; `user` is who commands run as (empty: root)."""

    image: str
    steps: tuple[Step, ...]
    env: dict[str, str]
    workdir: str
    user: str = ""


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
    directive = re.match(r"#\s*escape\s*=\s*(\S+)", text, re.IGNORECASE)
    if directive and directive.group(1) != "\\":
        raise TaskPackageError("another escape character cannot be followed", f"{path}:1")
    parser = _Parser(path)
    for number, line in _logical_lines(text):
        parser.take(line, f"{path}:{number}")
    if not parser.image:
        raise TaskPackageError("has no FROM", str(path))
    return Recipe(parser.image, tuple(parser.steps), parser.env, parser.workdir, parser.user)


class _Parser:
    """State while reading: environment, arguments, directory, user, steps so far."""

    def __init__(self, path: Path) -> None:
        self.context = path.parent.resolve()
        self.image = ""
        self.env: dict[str, str] = {}
        self.args: dict[str, str] = {}
        self.workdir = "/"
        self.user = ""
        self.steps: list[Step] = []
        self.directories = known_directories()
        self.take_by_name = {
            "FROM": self._take_from,
            "RUN": self._take_run,
            "COPY": self._take_copy,
            "ADD": self._take_add,
            "ENV": self._take_env,
            "ARG": self._take_arg,
            "WORKDIR": self._take_workdir,
            "USER": self._take_user,
        }

    def take(self, line: str, where: str) -> None:
        """Follow one instruction."""
        name, *rest = line.split(None, 1)
        name, value = name.upper(), rest[0].strip() if rest else ""
        if name not in self.take_by_name:
            raise TaskPackageError(
                f"{name} cannot be followed in a local sandbox",
                where,
                f"supported: {SUPPORTED}; use the modal provider for anything else",
            )
        if not self.image and name not in ("FROM", "ARG"):
            raise TaskPackageError(f"{name} before FROM", where)
        if not value:
            raise TaskPackageError(f"{name} of nothing", where)
        self.take_by_name[name](value, where)

    def _take_from(self, value: str, where: str) -> None:
        if self.image:
            raise TaskPackageError("several FROM (build stages) cannot be followed", where)
        if value.startswith("--"):
            raise TaskPackageError(f"FROM {value.split()[0]} cannot be followed", where)
        self.image = self._words(value, where)[0]
        self.args = {}  # what stands before FROM holds for FROM only

    def _take_workdir(self, value: str, where: str) -> None:
        self.workdir = self._absolute(self._one(value, where))
        self.steps.append(MakeDir(self.workdir))
        self._know(self.workdir)

    def _take_user(self, value: str, where: str) -> None:
        self.user = self._one(value, where)

    def _take_arg(self, value: str, where: str) -> None:
        for word in self._words(value, where):
            key, _, content = word.partition("=")
            self.args[key] = content

    def _take_env(self, value: str, where: str) -> None:
        if "=" not in value.split()[0]:
            key, *rest = value.split(None, 1)
            if not rest:
                raise TaskPackageError(f"ENV needs KEY=VALUE, not '{key}'", where)
            self.env[key] = self._one(rest[0], where)
            return
        fresh: dict[str, str] = {}
        for word in self._words(value, where):
            key, equals, content = word.partition("=")
            if not equals:
                raise TaskPackageError(f"ENV needs KEY=VALUE, not '{word}'", where)
            fresh[key] = content
        self.env.update(fresh)  # one ENV's variables don't see each other

    def _take_copy(self, value: str, where: str) -> None:
        names, target = self._transfer("COPY", value, where)
        sources = [path for name in names for path in self._sources("COPY", name, where)]
        self._copy(sources, target)

    def _take_add(self, value: str, where: str) -> None:
        names, target = self._transfer("ADD", value, where)
        for name in names:
            if _REMOTE.match(name):
                raise TaskPackageError(f"ADD of '{name}' needs a network", where)
        sources = [path for name in names for path in self._sources("ADD", name, where)]
        archives = [path for path in sources if path.is_file() and is_archive(path)]
        for path in archives:
            self.steps.append(Unpack(path, self._absolute(target)))
            self._know(self._absolute(target))
        plain = [path for path in sources if path not in archives]
        if plain:
            self._copy(plain, target if len(sources) == 1 else f"{target}/")

    def _transfer(self, name: str, value: str, where: str) -> tuple[list[str], str]:
        """Sources and target of COPY or ADD, variables expanded."""
        if (self.context / ".dockerignore").exists():
            raise TaskPackageError(f"{name} with a .dockerignore cannot be followed", where)
        listed = _json_words(value, where) if value.startswith("[") else None
        words = listed or self._words(value, where)
        flags = [word for word in words if word.startswith("--")]
        if flags:
            raise TaskPackageError(f"{name} {flags[0]} cannot be followed", where)
        if len(words) < 2:
            raise TaskPackageError(f"{name} needs a source and a target", where)
        *names, target = words if listed is None else [self._one(word, where) for word in words]
        return names, target

    def _copy(self, sources: list[Path], target: str) -> None:
        goal = self._absolute(target)
        into = target.endswith(("/", "/.")) or target in (".", "..") or len(sources) > 1
        into = into or goal in self.directories
        self.steps.append(Copy(tuple(sources), goal, into))
        if into or sources[0].is_dir():
            self._know(goal)

    def _know(self, directory: str) -> None:
        """Remember a directory that the steps so far have made."""
        self.directories |= {directory, *map(str, PurePosixPath(directory).parents)}

    def _take_run(self, value: str, where: str) -> None:
        if value.startswith("--"):
            raise TaskPackageError(f"RUN {value.split()[0]} cannot be followed", where)
        if _HERE_DOCUMENT.search(value):
            raise TaskPackageError("RUN with a here-document cannot be followed", where)
        command = shlex.join(_json_words(value, where)) if value.startswith("[") else value
        env = {**self.args, **self.env}
        self.steps.append(Run(command, self.workdir, tuple(env.items()), self.user))

    def _sources(self, instruction: str, name: str, where: str) -> list[Path]:
        """The files that a source names, all inside the context."""
        name = name.lstrip("/")
        wild = any(char in name for char in "*?[")
        found = sorted(self.context.glob(name)) if wild else [self.context / name]
        for path in found:
            if not path.resolve().is_relative_to(self.context):
                raise TaskPackageError(f"{instruction} source '{name}' leaves the folder", where)
        if not found or not all(path.exists() for path in found):
            raise TaskPackageError(f"{instruction} source '{name}' does not exist", where)
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

    def _words(self, text: str, where: str) -> list[str]:
        """The words of `text`, quotes and escapes resolved, variables put in."""
        found: list[str] = []
        word: str | None = None
        quote, at = "", 0
        while at < len(text):
            char, at = text[at], at + 1
            if char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote, word = char, word or ""
            elif char == "\\" and quote != "'" and text[at : at + 1]:
                literal = not quote or text[at] in '"$\\'
                word = (word or "") + ("" if literal else char) + text[at]
                at += 1
            elif char == "$" and quote != "'":
                value, at = self._variable(text, at - 1, where)
                word = (word or "") + value
            elif char.isspace() and not quote:
                found += [] if word is None else [word]
                word = None
            else:
                word = (word or "") + char
        if quote:
            raise TaskPackageError(f"cannot be parsed: no closing {quote}", where)
        return [*found, *([] if word is None else [word])]

    def _variable(self, text: str, at: int, where: str) -> tuple[str, int]:
        """The value of $X, ${X}, ${X:-word} or ${X:+word} at `at`, and where it ends."""
        match = _VARIABLE.match(text, at)
        if match is None:
            if text[at + 1 : at + 2] == "{":
                raise TaskPackageError(f"'{text[at:].split()[0]}' cannot be followed", where)
            return "$", at + 1
        values = {"PATH": DEFAULT_PATH, **self.args, **self.env}
        name, operator = match.group(1) or match.group(2), match.group(3)
        value = values.get(name)
        if operator is not None:
            other = " ".join(self._words(match.group(4), where))
            chosen = (value or other) if operator == ":-" else (other if value else "")
            return chosen, match.end()
        if value is None:
            raise TaskPackageError(f"variable ${name} has no value", where)
        return value, match.end()

    def _one(self, value: str, where: str) -> str:
        """The whole of `value` as one word."""
        return " ".join(self._words(value, where))


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; comments and joins resolved."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        if line.lstrip().startswith("#") or not line:
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1]
            continue
        found.append((start, (pending + line).strip()))
        pending = ""
    if pending.strip():
        found.append((start, pending.strip()))
    return found


def _json_words(value: str, where: str) -> list[str]:
    try:
        words: object = json.loads(value)
    except ValueError as error:
        raise TaskPackageError(f"cannot be parsed: {error}", where) from None
    if not isinstance(words, list):
        raise TaskPackageError("cannot be parsed: a list is expected", where)
    return [str(word) for word in words]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
