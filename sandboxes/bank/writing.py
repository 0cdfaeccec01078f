"""Packages on disk.

Invariant: a package's folder appears whole or not at all; one that is there with the
same content is kept, one with other content is replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from sandboxes.bank.families import BankPackage
from sandboxes.bank.task import Files


def write_packages(root: Path, packages: Sequence[BankPackage]) -> list[Path]:
    """Write packages below `root`, which is made if need be; returns their folders."""
    root.mkdir(parents=True, exist_ok=True)
    return [_place(root / package.name, package.files) for package in packages]


def _place(path: Path, files: Files) -> Path:
    """Write a package aside and rename it into place, unless it is there already."""
    if _is_there(path, files):
        return path
    aside = path.parent / f".{path.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    for name, (content, mode) in files.items():
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)
    if path.exists():
        shutil.rmtree(path)
    os.replace(aside, path)
    return path


def _is_there(path: Path, files: Files) -> bool:
    found = {item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file()}
    return found == set(files) and all(
        (path / name).read_bytes() == content for name, (content, _) in files.items()
    )
