"""The embedded bank: Harbor packages made by code, offline, the same everywhere.

Invariants:
- `write_bank(root, families, count, seed)` gives the same bytes, and so the same
  content digests, on every machine.
- A package appears whole or not at all; one that is there with the same content
  is kept, one with other content is replaced.
- All instructions of a bank are distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sandboxes.bank import families as _families
from sandboxes.bank.families import BankPackage, draw_package, family_named
from sandboxes.bank.writing import write_packages

# The one-command families: what `write_bank` draws from when it is not told.
FAMILIES: tuple[str, ...] = tuple(
    family.name for family in _families.FAMILIES.values() if family.tier == 1
)
ALL_FAMILIES: tuple[str, ...] = tuple(_families.FAMILIES)


def write_bank(root: Path, families: Sequence[str], count: int, seed: int) -> list[Path]:
    """Write `count` packages below `root`, balanced over `families` in turn.

    Args:
        root: folder of the packages; made if need be.
        families: names out of `ALL_FAMILIES`; empty means `FAMILIES`.
        count: number of packages.
        seed: which tasks.

    Returns:
        The package folders, in the bank's order.

    Raises:
        ConfigurationError: a family is unknown, or has fewer distinct tasks.
    """
    chosen = [family_named(name) for name in tuple(families) or FAMILIES]
    seen: set[str] = set()
    packages: list[BankPackage] = []
    for index in range(count):
        turn, at = divmod(index, len(chosen))
        packages.append(draw_package(chosen[at], seed, index, turn, seen))
    return write_packages(root, packages)
