"""What a dataset's directory holds and where it came from: manifest.json.

Invariants:
- It is written last, so a directory with one is complete.
- It names every other file, with its sha256.
- It depends on the campaigns and the options alone: the same export gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from rl.errors import EvidenceError, first_problem
from rl.files import read_errors
from rl.records import Record

MANIFEST: Final = "manifest.json"
CARD: Final = "README.md"


class FileEntry(Record):
    """One file."""

    sha256: str
    bytes: int
    rows: int | None = Field(default=None, description="None: it holds no rows")


class SplitEntry(Record):
    """One split of one set."""

    rows: int
    memory_bytes: int = Field(description="of its rows in Arrow's memory")


class CampaignEntry(Record):
    """One campaign that episodes come from."""

    run_id: str
    created_at: float = Field(description="unix time, s")
    audited: bool = Field(description="whether it was audited for this export, without findings")
    config_digest: str
    train_tasks: int
    heldout_tasks: int
    model_name: str
    model_source: str
    model_pin: str
    code_commit: str | None
    code_dirty: bool
    packages: dict[str, str] = Field(description="version by package, as the campaign ran")


class Options(Record):
    """How it was exported."""

    with_failed: bool = False
    sft: bool = False
    preferences: bool = False
    pairs_per_group: int
    license: str


class Manifest(Record):
    """All of it."""

    campaigns: list[CampaignEntry]
    options: Options
    tools: dict[str, str] = Field(description="version by package that wrote it")
    sets: dict[str, dict[str, SplitEntry]] = Field(description="by set and split")
    scrubbed: dict[str, int] = Field(description="secrets replaced in episodes, by kind")
    rows_without_tokens: int = Field(description="episodes whose tokens were left out for that")
    files: dict[str, FileEntry] = Field(description="by path, all but this one")


def read_manifest(root: Path) -> Manifest:
    """The manifest of a dataset's directory.

    Raises:
        EvidenceError: it is missing or invalid.
    """
    path = root / MANIFEST
    try:
        with read_errors(path):
            if not path.exists():
                raise EvidenceError(
                    "missing: this is no exported dataset, or it is not whole",
                    str(path),
                    "give the directory that `python -m rl.dataset build` made",
                )
            return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise EvidenceError(
            f"not a valid manifest: {first_problem(error)}", str(path), "export or copy it again"
        ) from None
