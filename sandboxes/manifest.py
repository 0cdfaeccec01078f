"""A cohort's manifest: which packages, from where, and every file of them by its hash.

Invariants:
- A manifest is written once, whole, after every package has been verified, and is
  never changed; another one under the same name is refused with the difference.
- A byte, a file or a link that differs from the manifest, anywhere in a package,
  is refused by name, also where Harbor's content digest does not look.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from rl.errors import ConfigurationError, EvidenceError, TaskPackageError
from rl.files import create_exclusive, disk_errors, json_bytes
from rl.values import Section, Sha256, Text
from sandboxes.contents import differences, read_contents, shown
from sandboxes.source import (
    SCHEMA_VERSION,
    CohortName,
    FolderSource,
    Source,
    TaskSource,
    obtain,
)
from sandboxes.tasks import TaskPackage, load_package, survey_folder, together


class PinnedPackage(Section):
    """One package of a cohort."""

    name: Text = Field(description="its folder's name")
    digest: Sha256 = Field(description="Harbor content digest")
    family: str = Field(description="family within a bank; empty if unknown")
    tier: int | None = Field(description="how hard it is meant to be; null if unknown")
    files: dict[str, str] = Field(
        description="git's mode and the sha256 of every file (of a link: of its target's name)"
    )


class CohortManifest(Section):
    """A cohort, pinned to the byte."""

    schema_version: Literal[1] = Field(description="1")
    cohort: CohortName = Field(description="the cohort's name")
    source: Source = Field(description="where the packages come from")
    packages: tuple[PinnedPackage, ...] = Field(description="sorted by name")


@dataclass(frozen=True, slots=True)
class PreparedCohort:
    """A cohort on this machine, verified.

    Attributes:
        path: the manifest's file.
        folder: where the packages lie.
        packages: loaded, in the manifest's order.
    """

    manifest: CohortManifest
    path: Path
    folder: Path
    packages: list[TaskPackage]


@dataclass(frozen=True, slots=True)
class PinnedFolder:
    """A folder's packages as they are now.

    Attributes:
        source: pins those that can be used here, as one cohort.
        packages: these, loaded.
        left_out: why others can't be used; None if all can.
    """

    source: TaskSource
    packages: list[TaskPackage]
    left_out: TaskPackageError | None


def prepare_cohort(
    source: TaskSource, cohort: str, root: Path, loaded: Sequence[TaskPackage] = ()
) -> PreparedCohort:
    """Obtain a cohort's packages, verify each, and write or confirm the manifest.

    Args:
        source: the task source.
        cohort: one of its cohorts.
        root: directory under which packages and manifests are kept.
        loaded: packages of its folder that were loaded just now, and need not be again.

    Raises:
        TaskPackageError: a package is missing, wrong, or not what is pinned.
        ConfigurationError: the source is wrong, or the cohort was another one before.
        InfrastructureError: a repository can't be reached, or the disk is full.
    """
    pins = source.cohort(cohort)
    folder = obtain(source, cohort, root)
    path = root / "cohorts" / f"{cohort}.json"
    known = read_manifest(path) if path.exists() else None
    if known is not None:
        _refuse_other_source(known, source, pins, path)
        verify(known, folder)
    packages = _load(pins, folder, {package.path: package for package in loaded})
    manifest = CohortManifest(
        schema_version=SCHEMA_VERSION,
        cohort=cohort,
        source=source.source,
        packages=tuple(_pinned(package) for package in packages),
    )
    if known is None:
        _write(path, manifest)
    return PreparedCohort(manifest, path, folder, packages)


def pin_folder(folder: Path, cohort: str | None = None) -> PinnedFolder:
    """Pin the packages of a folder as they are now.

    Args:
        folder: its child folders are Harbor packages.
        cohort: the name they get together; by default the folder's own.

    Raises:
        TaskPackageError: there is no package that can be used.
        ConfigurationError: the name is no cohort's.
    """
    root = folder.resolve()
    found, refused = survey_folder(root)
    packages = [package for package in found if package.path.parent == root]
    refused += [_link_out(package.path, root) for package in found if package not in packages]
    left_out = together(refused, root) if refused else None
    if left_out is not None and not packages:
        raise left_out
    pins = {package.name: package.digest for package in packages}
    name = cohort or re.sub(r"[^a-z0-9._-]+", "-", root.name.lower()).strip("._-") or "tasks"
    try:
        source = TaskSource(
            schema_version=SCHEMA_VERSION,
            source=FolderSource(path=str(root)),
            cohorts={name: pins},
        )
    except ValidationError as error:
        item = error.errors()[0]
        raise ConfigurationError(
            f"can't be a cohort's or a package's name: {item['msg']}",
            str(item["input"]),
            "give --cohort a name of a-z, 0-9, '.', '_' and '-', or rename the package's folder",
        ) from None
    return PinnedFolder(source, packages, left_out)


def read_manifest(path: Path) -> CohortManifest:
    """Read a manifest.

    Raises:
        EvidenceError: it can't be read, or is none.
    """
    try:
        return CohortManifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        what = str(error).splitlines()[0]
        remedy = "remove it and prepare the tasks again"
        raise EvidenceError(f"no valid manifest: {what}", str(path), remedy) from None


def verify(manifest: CohortManifest, folder: Path) -> None:
    """Check every file of every package in `folder` against the manifest.

    Raises:
        TaskPackageError: naming the files that differ.
    """
    wrong: list[TaskPackageError] = []
    for package in manifest.packages:
        path = folder / package.name
        if not path.is_dir():
            wrong.append(TaskPackageError("the package is missing", str(path)))
            continue
        try:
            found = read_contents(path.resolve()).files
        except TaskPackageError as error:
            wrong.append(error)
            continue
        changes = differences(package.files, found)
        if changes:
            wrong.append(
                TaskPackageError(
                    f"not what cohort '{manifest.cohort}' pins: {shown(changes)}",
                    str(path),
                    f"restore these files ({_how_to_restore(manifest, folder)})",
                )
            )
    if wrong:
        raise together(wrong, folder)


def _load(pins: dict[str, str], folder: Path, loaded: dict[Path, TaskPackage]) -> list[TaskPackage]:
    """The pinned packages, each checked against its digest."""
    root = folder.resolve()
    packages: list[TaskPackage] = []
    wrong: list[TaskPackageError] = []
    for name, digest in sorted(pins.items()):
        try:
            package = loaded.get(root / name) or load_package(root / name, name)
        except TaskPackageError as error:
            wrong.append(error)
            continue
        if package.path.parent != root:
            wrong.append(_link_out(package.path, root))
        elif package.digest != digest:
            wrong.append(
                TaskPackageError(
                    f"content digest {package.digest}, pinned {digest}",
                    str(package.path),
                    "restore the package, or pin its new content in the task source",
                )
            )
        packages.append(package)
    if wrong:
        raise together(wrong, folder)
    return packages


def _link_out(path: Path, root: Path) -> TaskPackageError:
    what = "a link leaves the folder of task packages"
    return TaskPackageError(what, str(path), f"copy the package into {root}")


def _pinned(package: TaskPackage) -> PinnedPackage:
    return PinnedPackage(
        name=package.name,
        digest=package.digest,
        family=package.family,
        tier=package.tier,
        files=package.files,
    )


def _refuse_other_source(
    known: CohortManifest, source: TaskSource, pins: dict[str, str], path: Path
) -> None:
    """Refuse to take another cohort for the one that the manifest describes."""
    before = {package.name: package.digest for package in known.packages}
    changes: list[str] = []
    if known.source != source.source:
        changes.append(f"source {_in_words(known.source)}, now {_in_words(source.source)}")
    changes += [f"package {name} is no longer in it" for name in sorted(before.keys() - pins)]
    changes += [f"package {name} is new in it" for name in sorted(pins.keys() - before)]
    changes += [
        f"package {name} had digest {before[name]}, now {pins[name]}"
        for name in sorted(before.keys() & pins)
        if before[name] != pins[name]
    ]
    if changes:
        raise ConfigurationError(
            f"cohort '{known.cohort}' was another one before: {shown(changes)}",
            str(path),
            "a manifest is never overwritten: name another --cohort or --root, or remove the file",
        )


def _write(path: Path, manifest: CohortManifest) -> None:
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    create_exclusive(path, json_bytes(manifest))


def _in_words(source: Source) -> str:
    return source.model_dump_json()


def _how_to_restore(manifest: CohortManifest, folder: Path) -> str:
    if manifest.source.kind == "folder":
        return "or pin the new content as another --cohort"
    return f"remove them all and run again: rm -r {folder}"


def listing(packages: Sequence[PinnedPackage]) -> list[str]:
    """One line for each package: name, family, tier and digest, between tabs."""
    return [
        f"{package.name}\t{package.family or '-'}\t"
        f"{'-' if package.tier is None else package.tier}\t{package.digest}"
        for package in packages
    ]
