"""Named, frozen sets of the bank's packages.

Invariants:
- A cohort is fixed by its code: the same names, in the same order, with the same
  digests on every machine.  A test pins a fingerprint of each.
- Its packages differ by digest and by instruction, from those of the cohort that it is
  apart from, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from sandboxes.bank.families import FAMILIES, BankPackage, draw_package
from sandboxes.bank.writing import write_packages


@dataclass(frozen=True, slots=True)
class CohortTask:
    """One line of a cohort's listing; `digest` is Harbor's content digest."""

    name: str
    family: str
    tier: int
    digest: str


@dataclass(frozen=True, slots=True)
class Cohort:
    """A frozen set of packages.

    Attributes:
        name: what commands call it.
        seed: which tasks.
        per_family: how many packages each family of a tier gives.
        first: number of each family's first package in its name.
        apart_from: the cohort whose tasks it does not repeat, if there is one.
    """

    name: str
    seed: int
    per_family: tuple[tuple[int, int], ...]
    first: int = 0
    apart_from: Cohort | None = None

    def tasks(self) -> tuple[CohortTask, ...]:
        """What it consists of, in its order; nothing is written."""
        return tuple(
            CohortTask(item.name, item.family, item.tier, item.digest) for item in _packages(self)
        )

    def write(self, root: Path) -> list[Path]:
        """Write its packages below `root`; those that are there already are kept.

        Returns:
            The package folders, in the cohort's order.
        """
        return write_packages(root, _packages(self))


@functools.cache
def _packages(cohort: Cohort) -> tuple[BankPackage, ...]:
    other = () if cohort.apart_from is None else _packages(cohort.apart_from)
    seen = {package.instruction for package in other}
    counts = dict(cohort.per_family)
    return tuple(
        draw_package(family, cohort.seed, cohort.first + turn, turn, seen)
        for family in FAMILIES.values()
        for turn in range(counts.get(family.tier, 0))
    )


# 6 families of tier 1, 7 of tier 2 and 10 of tier 3: 24 + 42 + 50 = 116 packages.
SCREEN116 = Cohort("screen116", seed=116, per_family=((1, 4), (2, 6), (3, 5)))

# As many again that are new: 18 + 42 + 40 = 100 packages.
SCREEN100 = Cohort(
    "screen100", seed=100, per_family=((1, 3), (2, 6), (3, 4)), first=100, apart_from=SCREEN116
)

COHORTS: dict[str, Cohort] = {cohort.name: cohort for cohort in (SCREEN116, SCREEN100)}
