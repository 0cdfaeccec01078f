"""The program by content: commit, changes, versions of its packages.

Invariants:
- A checkout is pinned by its commit and by the digest of whatever differs from it.
- A job runs in a copy of the sources, which has no commit: it takes the pin that its
  launcher has put beside them.
"""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from rl.errors import EvidenceError, first_problem
from rl.files import read_errors
from rl.records import Record

SUBMITTED_CODE: Final = ".submitted-code.json"  # beside the sources that a job runs
_GIT_TIMEOUT_S = 30.0  # a status of a large tree on a cold disk takes a few seconds
_PACKAGES: Final = (
    "ray",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "harbor",
    "renderers",
    "pydantic",
    "numpy",
    "zstandard",
    "modal",
)


class CodePin(Record):
    """The program by content."""

    commit: str | None = Field(description="git commit; None outside a checkout")
    dirty: bool = Field(description="whether the checkout differs from the commit")
    diff_sha256: str | None = Field(default=None, description="of the difference, if dirty")
    source_sha256: str | None = Field(
        default=None, description="of the tar in source.tar.zst: every source file; None: not kept"
    )
    packages: dict[str, str] = Field(description="version by package")


def pin_code(root: Path) -> CodePin:
    """Pin the project in `root`, a checkout or an installed copy.

    Raises:
        EvidenceError: git fails in a checkout.
    """
    packages = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    submitted = root / SUBMITTED_CODE
    if submitted.exists():  # a job runs in a copy, which its launcher has pinned
        return _submitted_pin(submitted).model_copy(update={"packages": packages})
    if not (root / ".git").exists():
        return CodePin(commit=None, dirty=False, packages=packages)
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    difference = hashlib.sha256(_git(root, "diff", "HEAD", "--binary"))
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")
    for name in sorted(filter(None, untracked)):
        path = root / name.decode(errors="surrogateescape")
        difference.update(b"\0" + name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    dirty = bool(_git(root, "status", "--porcelain").strip())
    return CodePin(
        commit=commit,
        dirty=dirty,
        diff_sha256=difference.hexdigest() if dirty else None,
        packages=packages,
    )


def _submitted_pin(path: Path) -> CodePin:
    try:
        with read_errors(path):
            return CodePin.model_validate_json(path.read_bytes())
    except ValidationError as error:
        what = f"not a valid record: {first_problem(error)}"
        raise EvidenceError(what, str(path), "submit the campaign again") from None


def _git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise EvidenceError(
            "git is not installed, so the code can't be pinned", str(root), "install git"
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = (error.stderr or b"").decode(errors="replace").strip() or str(error)
        raise EvidenceError(
            f"git {arguments[0]} failed: {detail}",
            str(root),
            f"make this work: git -C {root} {' '.join(arguments)}",
        ) from error
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_differences(old: CodePin, new: CodePin) -> list[str]:
    """What differs between two pins, in words."""
    found = [
        f"code {field}: {getattr(old, field)!r} -> {getattr(new, field)!r}"
        for field in ("commit", "diff_sha256")
        if getattr(old, field) != getattr(new, field)
    ]
    names = sorted(old.packages.keys() | new.packages.keys())
    return found + [
        f"package {name}: {old.packages.get(name)} -> {new.packages.get(name)}"
        for name in names
        if old.packages.get(name) != new.packages.get(name)
    ]
