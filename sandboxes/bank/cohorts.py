"""Named, frozen sets of the bank's packages.

Invariants:
- A cohort is fixed by its code: the same names, in the same order, with the same
  digests on every machine.  A test pins a fingerprint of each.
- Its packages differ by digest and by instruction.
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
    """

    name: str
    seed: int
    per_family: tuple[tuple[int, int], ...]

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
    seen: set[str] = set()
    counts = dict(cohort.per_family)
    return tuple(
        draw_package(family, cohort.seed, turn, turn, seen)
        for family in FAMILIES.values()
        for turn in range(counts.get(family.tier, 0))
    )


# 6 families of tier 1, 7 of tier 2 and 10 of tier 3: 24 + 42 + 50 = 116 packages.
SCREEN116 = Cohort("screen116", seed=116, per_family=((1, 4), (2, 6), (3, 5)))

COHORTS: dict[str, Cohort] = {SCREEN116.name: SCREEN116}
