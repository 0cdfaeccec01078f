"""Copies of `rl.schedule` with a seeded bug, and the hunt for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import rl.schedule
from rl.schedule.evals import EvalPlan
from tests.support.schedule_model.explore import explore, walk
from tests.support.schedule_model.setting import Faults, Machines, Setting, shared_config

SOURCES = Path(rl.schedule.__path__[0])
# A mutated scheduler speaks the same commands, so that the model understands it.
SHARED_MODULE = "rl.schedule.commands"

WALKS = 25
EVALS = EvalPlan(frozenset({0, 2, 3}), cells=3, retries=1)


@dataclass(frozen=True)
class Edit:
    """Text that stands once in a file of `rl.schedule`, and what takes its place."""

    file: str
    old: str
    new: str


class NotOnce(AssertionError):
    """The text that a mutant replaces is not there, or is there more than once."""


@contextmanager
def mutated(name: str, edits: tuple[Edit, ...], directory: Path) -> Generator[Machines]:
    """The state machines of a mutated copy, imported as a package of its own."""
    package = f"mutant_{name}"
    sources = {path.name: path.read_text() for path in sorted(SOURCES.glob("*.py"))}
    for edit in edits:
        count = sources[edit.file].count(edit.old)
        if count != 1:
            raise NotOnce(f"{name}: {edit.file} holds this {count} times:\n{edit.old}")
        sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
    for file, text in sources.items():
        kept = text.replace(SHARED_MODULE, "<shared>")
        own = kept.replace("rl.schedule.", f"{package}.").replace("<shared>", SHARED_MODULE)
        (directory / file).write_text(own)
    spec = importlib.util.spec_from_file_location(
        package, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        yield Machines(
            importlib.import_module(f"{package}.scheduler").Scheduler,
            importlib.import_module(f"{package}.ledger").VersionLedger,
        )
    finally:
        for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
            del sys.modules[module]


def hunt(machines: Machines) -> str:
    """The first rule that these machines break in random and small campaigns; "" if none."""
    try:
        for seed in range(WALKS):
            for setting, faults in _campaigns(machines):
                walk(setting, faults, seed)
        for setting, faults in _small_campaigns(machines):
            explore(setting, faults)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _campaigns(machines: Machines) -> list[tuple[Setting, Faults]]:
    """Versions that lose every replica; zero variance and refills; many slots; no staleness."""
    replicas = Faults(losses=6, failed_loads=6, restarts=12)
    some = Faults(masks=4, losses=3, failed_loads=3, restarts=6, suspicions=2, drivers=1)
    many = Faults(
        masks=20, cancels=3, losses=6, failed_loads=4, restarts=12, suspicions=6, drivers=2
    )
    return [
        (Setting(shared_config(6, 6, 2, 2), 3, 2, machines=machines), replicas),
        (Setting(shared_config(3, 4, 2, 1, refill=2), 3, 2, (0.0, 1.0), machines), some),
        (
            Setting(shared_config(4, 9, 3, 2, refill=1, retries=2), 20, 3, (0.0, 1.0), machines),
            many,
        ),
        (Setting(shared_config(3, 8, 4, 0, min_group=3), 7, 3, machines=machines), many),
        (
            Setting(shared_config(5, 4, 2, 1), 4, 2, machines=machines, evals=EVALS),
            many,
        ),
    ]


def _small_campaigns(machines: Machines) -> list[tuple[Setting, Faults]]:
    """A retry, also in an evaluation; and a version that loses its last replica while
    another is served.
    """
    return [
        (
            Setting(shared_config(2, 2, 2, 1), 2, 2, machines=machines, evals=EVALS),
            Faults(masks=1),
        ),
        (Setting(shared_config(3, 2, 2, 1), 2, 2, machines=machines), Faults(masks=1)),
        (
            Setting(shared_config(2, 2, 2, 1), 1, 2, machines=machines),
            Faults(losses=1, failed_loads=1, restarts=1),
        ),
    ]
