"""The manifest of a checkpoint: what it is, and every file by size and sha256.

Invariants:
- Each byte of a manifest counts: `seal` is the sha256 of the file itself with zeros
  in the seal's place, so a manifest that was altered anywhere is refused.
- A manifest names exactly the parts of a checkpoint, by plain names: nothing that it
  names lies outside the checkpoint's directory.
- A directory whose name says which update it is holds the manifest of that update.
"""

from __future__ import annotations

import hashlib
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from rl.errors import EvidenceError, first_problem
from rl.records import Probe, Record

MANIFEST: Final = "manifest.json"
ADAPTER: Final = "adapter"
OPTIMIZER: Final = "optimizer.pt"
SCHEDULER: Final = "scheduler.json"
_UNSEALED: Final = "0" * 64
_NAME = re.compile(r"update-(\d{4,})")
# Those that the bytes of a checkpoint, or what comes of them, may depend on.
_PACKAGES: Final = ("torch", "transformers", "peft", "safetensors", "numpy")


class FileEntry(Record):
    """One file of a checkpoint."""

    bytes: int = Field(ge=0, description="size")
    sha256: str = Field(description="digest of the content, hex")


class CheckpointManifest(Record):
    """What a checkpoint is and what it consists of."""

    update: int = Field(ge=0, description="the last update that is in it; also the version")
    config_digest: str = Field(description="digest of the campaign's configuration")
    versions: dict[str, str] = Field(description="Python and packages that wrote it")
    adapter_sha256: str = Field(description="over the adapter's sorted names and contents")
    probe: Probe = Field(description="the adapter's logprobs of the probe tokens")
    files: dict[str, FileEntry] = Field(description="by path relative to the checkpoint")
    seal: str = Field(
        default=_UNSEALED,
        pattern=r"^[0-9a-f]{64}$",
        description="sha256 of this file with zeros in the seal's place",
    )

    def sealed(self) -> CheckpointManifest:
        """The same with its seal."""
        bare = self.model_copy(update={"seal": _UNSEALED})
        return bare.model_copy(update={"seal": hashlib.sha256(bare.content()).hexdigest()})

    def content(self) -> bytes:
        """The manifest's file."""
        return self.model_dump_json(indent=2).encode() + b"\n"


def directory_name(update: int) -> str:
    """The name of the checkpoint of `update`."""
    return f"update-{update:04d}"


def update_of(path: Path) -> int | None:
    """The update that a directory's name claims; None if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None or directory_name(int(match[1])) != path.name:
        return None
    return int(match[1])


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a checkpoint depends on."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


def read_manifest(directory: Path) -> CheckpointManifest:
    """The manifest of the checkpoint at `directory`.

    Raises:
        EvidenceError: there is none, or it is not as it was written.
    """
    file = directory / MANIFEST
    if file.is_symlink():
        raise damaged(file, "is a symbolic link")
    try:
        content = file.read_bytes()
        manifest = CheckpointManifest.model_validate_json(content)
    except FileNotFoundError:
        raise damaged(file, "is missing: no complete checkpoint") from None
    except OSError as error:
        raise damaged(file, f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = f"is no manifest of ours: {first_problem(error)}"
        raise damaged(file, problem) from None
    unsealed = content.replace(manifest.seal.encode(), _UNSEALED.encode(), 1)
    if hashlib.sha256(unsealed).hexdigest() != manifest.seal:
        raise damaged(file, "is not as it was written: its seal does not fit")
    _check_names(file, manifest)
    claimed = update_of(directory)
    if claimed is not None and claimed != manifest.update:
        raise damaged(file, f"is of update {manifest.update}, its directory of {claimed}")
    return manifest


def damaged(file: Path, problem: str) -> EvidenceError:
    """The refusal of a checkpoint on account of `file`."""
    return EvidenceError(
        problem, str(file), "remove this checkpoint's directory to go on from the one before"
    )


def _check_names(file: Path, manifest: CheckpointManifest) -> None:
    """Refuse a manifest that lacks a part, or names what is none."""
    for name in (OPTIMIZER, SCHEDULER):
        if name not in manifest.files:
            raise damaged(file, f"names no {name}")
    others = set(manifest.files) - {OPTIMIZER, SCHEDULER}
    if not others:
        raise damaged(file, "names no file of an adapter")
    for name in sorted(others):
        folder, _, plain = name.partition("/")
        if folder != ADAPTER or plain in ("", ".", "..") or "/" in plain or "\0" in plain:
            raise damaged(file, f"names {name!r}, which is no part of a checkpoint")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
