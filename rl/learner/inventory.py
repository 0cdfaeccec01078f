"""What lies in a folder of checkpoints: whole ones, damaged ones, and what was left over.

Invariant: nothing is changed and nothing is hashed; `checkpoint.verify` does that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rl.errors import EvidenceError
from rl.learner.durable import TEMPORARY
from rl.learner.manifest import MANIFEST, CheckpointManifest, read_manifest, update_of
from rl.records import Record


class Listed(Record):
    """One entry of the folder."""

    path: str
    update: int | None = Field(description="None: its name is no checkpoint's")
    state: Literal["complete", "damaged", "unfinished"] = Field(
        description="complete: every file is there in its size; unfinished: of a writer at "
        "work, or of one that died"
    )
    problem: str = Field(default="", description="what is wrong with a damaged one")
    bytes: int = Field(default=0, description="size of its files")
    saved_at: float | None = Field(default=None, description="unix time of its manifest, s")
    config_digest: str | None = Field(default=None, description="of the campaign's configuration")


def inventory(root: Path) -> list[Listed]:
    """Every checkpoint below `root`, oldest update first, then what was left over."""
    paths = sorted(root.iterdir())
    found = [_listed(path) for path in paths if update_of(path) is not None]
    left = [path for path in paths if path.name.startswith(TEMPORARY)]
    found.sort(key=lambda entry: entry.update or 0)
    return found + [Listed(path=str(path), update=None, state="unfinished") for path in left]


def _listed(path: Path) -> Listed:
    update = update_of(path)
    try:
        manifest = read_manifest(path)
    except EvidenceError as error:
        problem = f"{Path(error.where).name} {error.what}"
        return Listed(path=str(path), update=update, state="damaged", problem=problem)
    problem = _problem(path, manifest)
    return Listed(
        path=str(path),
        update=update,
        state="damaged" if problem else "complete",
        problem=problem,
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        saved_at=(path / MANIFEST).stat().st_mtime,
        config_digest=manifest.config_digest,
    )


def _problem(path: Path, manifest: CheckpointManifest) -> str:
    for name, entry in sorted(manifest.files.items()):
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry.bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {entry.bytes}"
    return ""
