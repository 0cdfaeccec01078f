"""The families of tasks: for each, what one task says, holds, solves and checks.

Invariants:
- A task is a pure function of its random generator, and uses only its integer
  draws, so it is the same on every machine and version of Python.
- A check reads the outcome, never the method, and fails if a bystander changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sandboxes.bank.words import FILES, FOLDERS, SCRIPT_SUFFIXES, TEXT_SUFFIXES, THINGS


@dataclass(frozen=True, slots=True)
class Draft:
    """One task before it is written: all names are relative to the working directory.

    Attributes:
        label: words for the package's name.
        instruction: what the agent is told.
        files: set-up files and their content; bystanders among them.
        folders: set-up folders.
        solution: shell commands that solve it.
        checks: shell conditions that all hold when it is solved.
        touched: set-up files that the task itself changes; the others must not change.
        extra_entries: how many entries more the working directory holds when solved.
    """

    label: str
    instruction: str
    files: dict[str, str]
    folders: tuple[str, ...]
    solution: str
    checks: tuple[str, ...]
    touched: tuple[str, ...]
    extra_entries: int


type Builder = Callable[["Draw"], Draft]


class Draw:
    """Draws without repeats from the word lists."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._used: set[str] = set()

    def pick(self, words: tuple[str, ...]) -> str:
        """One word that this task has not used."""
        while True:
            word = words[self._random.randrange(len(words))]
            if word not in self._used:
                self._used.add(word)
                return word

    def file(self, suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> str:
        """A file name."""
        return f"{self.pick(FILES)}.{suffixes[self._random.randrange(len(suffixes))]}"

    def content(self) -> str:
        """A file's text: a few words."""
        words = [THINGS[self._random.randrange(len(THINGS))] for _ in range(3)]
        return " ".join(words) + "\n"

    def bystanders(self) -> dict[str, str]:
        """One or two files that the task does not speak of."""
        return {self.file(): self.content() for _ in range(1 + self._random.randrange(2))}


def _mkdir(draw: Draw) -> Draft:
    name = draw.pick(THINGS)
    return Draft(
        label=name,
        instruction=f"Create a directory named {name}.",
        files=draw.bystanders(),
        folders=(),
        solution=f"mkdir {name}",
        checks=(f"[ -d {name} ]", f"[ ! -L {name} ]"),
        touched=(),
        extra_entries=1,
    )


def _touch(draw: Draw) -> Draft:
    name = draw.file()
    return Draft(
        label=name,
        instruction=f"Create an empty file named {name}.",
        files=draw.bystanders(),
        folders=(),
        solution=f"touch {name}",
        checks=(f"[ -f {name} ]", f"[ ! -L {name} ]", f"[ ! -s {name} ]"),
        touched=(),
        extra_entries=1,
    )


def _rm(draw: Draw) -> Draft:
    name = draw.file()
    return Draft(
        label=name,
        instruction=f"Delete the file {name}.",
        files={name: draw.content(), **draw.bystanders()},
        folders=(),
        solution=f"rm {name}",
        checks=(f"[ ! -e {name} ]", f"[ ! -L {name} ]"),
        touched=(name,),
        extra_entries=-1,
    )


def _mv(draw: Draw) -> Draft:
    old, new = draw.file(), draw.file()
    content = draw.content()
    return Draft(
        label=f"{old} {new}",
        instruction=f"Rename the file {old} to {new}.",
        files={old: content, **draw.bystanders()},
        folders=(),
        solution=f"mv {old} {new}",
        checks=(f"[ ! -e {old} ]", *_holds(new, content)),
        touched=(old,),
        extra_entries=0,
    )


def _chmod(draw: Draw) -> Draft:
    name = draw.file(SCRIPT_SUFFIXES)
    content = f"#!/bin/sh\necho {draw.pick(THINGS)}\n"
    return Draft(
        label=name,
        instruction=f"Make the file {name} executable.",
        files={name: content, **draw.bystanders()},
        folders=(),
        solution=f"chmod +x {name}",
        checks=(*_holds(name, content), _mode_has_x(name)),
        touched=(name,),
        extra_entries=0,
    )


def _movein(draw: Draw) -> Draft:
    name, folder = draw.file(), draw.pick(FOLDERS)
    content = draw.content()
    return Draft(
        label=f"{name} {folder}",
        instruction=f"Move the file {name} into the directory {folder}.",
        files={name: content, **draw.bystanders()},
        folders=(folder,),
        solution=f"mv {name} {folder}/",
        checks=(f"[ ! -e {name} ]", *_holds(f"{folder}/{name}", content)),
        touched=(name,),
        extra_entries=-1,
    )


BUILDERS: dict[str, Builder] = {
    "mkdir": _mkdir,
    "touch": _touch,
    "rm": _rm,
    "mv": _mv,
    "chmod": _chmod,
    "movein": _movein,
}


def _holds(path: str, content: str) -> tuple[str, ...]:
    """Conditions: a regular file with exactly this content."""
    text = content.replace("\n", "\\n")
    return (
        f"[ -f {path} ]",
        f"[ ! -L {path} ]",
        f"printf '{text}' | cmp -s - {path}",
    )


def _mode_has_x(path: str) -> str:
    """Condition: its owner may execute it; asked of the mode, as root may anything."""
    return f"case $(stat -c %A {path}) in -??[xs]*) true ;; *) false ;; esac"
