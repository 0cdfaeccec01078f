"""Every family of the bank, and its tasks as packages in memory.

Invariants:
- A package is a pure function of family, seed and index: the same bytes, and so the
  same content digest, on every machine, version of Python and hash seed.
- A family has one tier: 1, one command; 2, pipelines and edits; 3, several steps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from rl.errors import ConfigurationError
from sandboxes.bank import (
    archives,
    databases,
    history,
    lines,
    logs,
    one_command,
    processes,
    repairs,
    tables,
    text_encodings,
    trees,
)
from sandboxes.bank.draw import Draw
from sandboxes.bank.task import Builder, Files, task_files

MAX_REDRAWS = 1000  # for a task that differs from all before it; beyond it the words are used up


@dataclass(frozen=True, slots=True)
class BankPackage:
    """One package, not yet written.

    Attributes:
        name: of its folder.
        family: what kind of task it is.
        tier: 1 to 3.
        digest: Harbor's content digest.
        instruction: what the agent is told.
        files: content and mode by path.
    """

    name: str
    family: str
    tier: int
    digest: str
    instruction: str
    files: Files = field(repr=False)


type _Make = Callable[[Draw], tuple[str, str, Files]]
"""Label, instruction and files of one task."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task."""

    name: str
    tier: int
    make: _Make


def _one_command(name: str) -> Family:
    def make(draw: Draw) -> tuple[str, str, Files]:
        draft = one_command.BUILDERS[name](draw)
        return draft.label, draft.instruction, one_command.draft_files(name, draft)

    return Family(name, 1, make)


def _family(name: str, tier: int, build: Builder) -> Family:
    def make(draw: Draw) -> tuple[str, str, Files]:
        task = build(draw)
        return task.label, task.instruction, task_files(name, tier, task)

    return Family(name, tier, make)


_TIERS = {
    2: (lines, trees),
    3: (history, databases, tables, archives, logs, text_encodings, repairs, processes),
}
FAMILIES: dict[str, Family] = {name: _one_command(name) for name in one_command.BUILDERS} | {
    name: _family(name, tier, build)
    for tier, modules in _TIERS.items()
    for module in modules
    for name, build in module.BUILDERS.items()
}


def family_named(name: str) -> Family:
    """The family of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigurationError(f"unknown task family '{name}'", "families", f"known: {known}")
    return FAMILIES[name]


def draw_package(family: Family, seed: int, index: int, turn: int, seen: set[str]) -> BankPackage:
    """The first package whose instruction is not in `seen`, where it is then noted.

    Args:
        family: what kind of task.
        seed: of the whole bank.
        index: which task of the bank, from 0.
        turn: which task of the family, from 0; chooses the variant.
        seen: instructions of the packages before it.

    Raises:
        ConfigurationError: the family has no further distinct task.
    """
    for again in range(MAX_REDRAWS):
        draw = Draw(f"{family.name}/{seed}/{index}/{again}", turn)
        label, instruction, files = family.make(draw)
        if instruction not in seen:
            seen.add(instruction)
            name = f"{family.name}-{index:03d}-{re.sub('[^a-z0-9]+', '-', label)}"
            return BankPackage(name, family.name, family.tier, _digest(files), instruction, files)
    raise ConfigurationError(
        f"family '{family.name}' has no further distinct task", "tasks", "ask for fewer tasks"
    )


def _digest(files: Files) -> str:
    """What Harbor's packager would compute; a test holds it to that."""
    outer = hashlib.sha256()
    for name in sorted(files):
        outer.update(f"{name}\0{hashlib.sha256(files[name][0]).hexdigest()}\n".encode())
    return outer.hexdigest()
