"""Where task packages come from, pinned: the file `task-source.json`.

Invariants:
- A source is pinned before it is used: a repository by its full commit, every
  package of every cohort by its content digest.
- The file is strict: an unknown key, a doubled key or a digest that is none is
  refused, and nothing that has a secret in it is accepted.
- Folders that this project derives (from a repository, from its own bank) appear
  under their final name only when they are complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, ValidationError, field_validator

from rl.errors import ConfigurationError
from rl.files import disk_errors
from rl.values import Commit, Section, Sha256, Text
from sandboxes.contents import differences, shown
from sandboxes.git_source import aside, fetch_files

SHIPPED = Path(__file__).with_name("task-source.json")
SCHEMA_VERSION = 1
_REMEDY = "docs/tasks.md describes the file; `rl.prepare tasks --from FOLDER --pins` prints one"

CohortName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
PackageName = Annotated[str, StringConstraints(pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]{0,200}$")]
FolderInside = Annotated[
    str, StringConstraints(pattern=r"^(\.|[^./\x00][^/\x00]*(/[^./\x00][^/\x00]*)*)$")
]


class GitSource(Section):
    """A git repository at one commit."""

    kind: Literal["git"] = Field(default="git", description="git: a repository at a commit")
    url: Text = Field(description="where it is fetched from: file, git, http, https or ssh")
    commit: Commit = Field(description="the full commit hash")
    folder: FolderInside = Field(
        default=".", description="folder in the repository whose child folders are packages"
    )

    @field_validator("url")
    @classmethod
    def _without_secrets(cls, url: str) -> str:
        if re.match(r"^[\w.+-]+@[\w.-]+:", url):  # ssh's short form
            return url
        parts = urlsplit(url)
        if parts.scheme not in ("file", "git", "http", "https", "ssh"):
            raise ValueError("must be a file, git, http, https or ssh URL")
        if parts.password is not None or (parts.username and parts.scheme != "ssh"):
            raise ValueError("holds a user's name or password; leave it to git's credentials")
        return url


class FolderSource(Section):
    """A folder on this machine."""

    kind: Literal["folder"] = Field(default="folder", description="folder: on this machine")
    path: Text = Field(description="the folder; relative to the file that names it")


class EmbeddedSource(Section):
    """The bank that this project makes itself."""

    kind: Literal["embedded"] = Field(default="embedded", description="embedded: made by code")


Source = Annotated[GitSource | FolderSource | EmbeddedSource, Field(discriminator="kind")]


class TaskSource(Section):
    """The task source: where from, and what exactly."""

    schema_version: Literal[1] = Field(description="1")
    source: Source = Field(description="where the packages come from")
    cohorts: dict[CohortName, dict[PackageName, Sha256]] = Field(
        min_length=1, description="for each cohort its packages, each with its content digest"
    )

    def cohort(self, name: str) -> dict[str, str]:
        """The digests of one cohort's packages by name.

        Raises:
            ConfigurationError: there is no such cohort.
        """
        if name not in self.cohorts:
            raise ConfigurationError(
                f"no cohort '{name}'", "task source", f"known: {', '.join(sorted(self.cohorts))}"
            )
        return self.cohorts[name]


def read_task_source(path: Path) -> TaskSource:
    """Read and check a task source file; a relative folder in it becomes absolute.

    Raises:
        ConfigurationError: it is missing, no JSON, or not as it must be.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise ConfigurationError(what, str(path), _REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not valid JSON: {error}", str(path), _REMEDY) from None
    try:
        source = TaskSource.model_validate(data)
    except ValidationError as error:
        lines = [
            f"'{'.'.join(map(str, item['loc']))}': {item['msg']}" for item in error.errors()[:10]
        ]
        raise ConfigurationError("\n  - ".join(lines), str(path), _REMEDY) from None
    if isinstance(source.source, FolderSource):
        folder = (path.parent / Path(source.source.path).expanduser()).resolve()
        return source.model_copy(update={"source": FolderSource(path=str(folder))})
    return source


def obtain(source: TaskSource, cohort: str, root: Path) -> Path:
    """The folder in which the packages of `cohort` lie, fetched or made if need be.

    Args:
        source: the task source.
        cohort: one of its cohorts.
        root: directory under which repositories and packages are kept.

    Raises:
        ConfigurationError: there is no such cohort, commit or folder.
        InfrastructureError: the repository can't be reached, or the disk is full.
    """
    pins = source.cohort(cohort)
    origin = source.source
    if isinstance(origin, FolderSource):
        folder = Path(origin.path)
        if not folder.is_dir():
            raise ConfigurationError(
                "no such folder of task packages", str(folder), "correct source.path"
            )
        return folder
    if isinstance(origin, GitSource):
        name = hashlib.sha256(f"{origin.url}\0{origin.folder}".encode()).hexdigest()[:8]
        folder = root / "tasks" / f"git-{origin.commit[:12]}-{name}"
        fetch_files(origin.url, origin.commit, origin.folder, root / "git", folder)
        return folder
    listing = "\n".join(f"{name} {digest}" for name, digest in sorted(pins.items()))
    name = hashlib.sha256(listing.encode()).hexdigest()[:12]
    folder = root / "tasks" / f"{cohort}-{name}"
    if not folder.exists():
        _write_embedded(cohort, folder)
    return folder


def pin_embedded() -> TaskSource:
    """The embedded bank's cohorts, pinned as its code makes them now."""
    from sandboxes.bank.cohorts import COHORTS

    return TaskSource(
        schema_version=SCHEMA_VERSION,
        source=EmbeddedSource(),
        cohorts={
            name: {task.name: task.digest for task in cohort.tasks()}
            for name, cohort in COHORTS.items()
        },
    )


def _write_embedded(cohort: str, folder: Path) -> None:
    """Make a cohort of the embedded bank."""
    from sandboxes.bank.cohorts import COHORTS

    if cohort not in COHORTS:
        raise ConfigurationError(
            f"the embedded bank has no cohort '{cohort}'",
            "task source",
            f"known: {', '.join(sorted(COHORTS))}",
        )
    with aside(folder) as temporary:
        COHORTS[cohort].write(temporary)


def draw_bank(families: Sequence[str], count: int, seed: int, parent: Path) -> Path:
    """A folder with `count` packages of the embedded bank, named by its content.

    Raises:
        ConfigurationError: a family is unknown, or what is there has been changed.
    """
    from sandboxes.bank import write_bank
    from sandboxes.tasks import load_folder

    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".bank-", dir=parent))
        try:
            write_bank(temporary, families, count, seed)
            drawn = {package.name: package.files for package in load_folder(temporary)}
            name = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:12]
            folder = parent / f"embedded-{name}"
            if not folder.exists():
                temporary.chmod(0o755)
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    found = {package.name: package.files for package in load_folder(folder)}
    changes = [
        f"{package}/{change}"
        for package in sorted(drawn.keys() | found.keys())
        for change in differences(drawn.get(package, {}), found.get(package, {}))
    ]
    if changes:
        raise ConfigurationError(
            f"the task packages have changed since they were made: {shown(changes)}",
            str(folder),
            f"remove them and run again: rm -r {folder}",
        )
    return folder


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused if it has a key twice: all but the last would be dropped."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found
