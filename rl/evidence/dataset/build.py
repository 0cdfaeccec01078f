"""Campaigns to a dataset's directory.

Invariants:
- The directory appears under its name by one rename, complete and synced; before that
  everything lies in a temporary directory beside it, which is gone when this fails.
- Nothing that exists is overwritten.
- No task is in both splits, over all campaigns together.
- Episodes are read and written one after the other; how many there are costs no memory
  but for the audit, and the table of which update trained on which attempt.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.audit import audit
from rl.evidence.dataset.card import DEFAULT_LICENSE, card
from rl.evidence.dataset.chat_sets import DEFAULT_PAIRS_PER_GROUP, preference_rows, sft_rows
from rl.evidence.dataset.manifest import (
    CARD,
    MANIFEST,
    CampaignEntry,
    FileEntry,
    Manifest,
    Options,
    SplitEntry,
)
from rl.evidence.dataset.rows import Source, scrub_row
from rl.evidence.dataset.schema import SetName, Split
from rl.evidence.dataset.scrub import Scrubber
from rl.evidence.dataset.writing import DEFAULT_SHARD_BYTES, SplitWriter
from rl.evidence.layout import CampaignDir
from rl.files import disk_errors, json_bytes, sha256_file, sync_directory, write_bytes

_TOOLS: Final = ("pyarrow", "zstandard", "pydantic")


@dataclass(frozen=True, slots=True)
class Request:
    """What to export.

    Attributes:
        with_failed: masked and cancelled episodes too.
        unaudited: don't audit the campaigns, so export them whatever state they are in.
        sft: write the `sft` set.
        preferences: write the `preferences` set.
        pairs_per_group: most pairs of one group.
        shard_bytes: most bytes of one file.
        license: the Hub's name of the licence.
    """

    with_failed: bool = False
    unaudited: bool = False
    sft: bool = False
    preferences: bool = False
    pairs_per_group: int = DEFAULT_PAIRS_PER_GROUP
    shard_bytes: int = DEFAULT_SHARD_BYTES
    license: str = DEFAULT_LICENSE


@dataclass(slots=True)
class _Export:
    """One export in the making, in its temporary directory."""

    root: Path
    request: Request
    scrubber: Scrubber
    writers: dict[tuple[SetName, Split], SplitWriter] = field(
        default_factory=dict[tuple[SetName, Split], SplitWriter]
    )
    scrubbed: Counter[str] = field(default_factory=Counter[str])
    rows_without_tokens: int = 0

    def writer(self, name: SetName, split: Split) -> SplitWriter:
        """The writer of a split, made with its first row."""
        if (name, split) not in self.writers:
            self.writers[name, split] = SplitWriter(
                self.root, name, split, self.request.shard_bytes, lines=name == "episodes"
            )
        return self.writers[name, split]

    def add_episodes(self, source: Source) -> None:
        """Write the episodes of one campaign, and their chats."""
        for split, record in source.episodes(failed=self.request.with_failed):
            row = source.row(split, record)
            found = scrub_row(row, self.scrubber)
            self.scrubbed += found
            self.rows_without_tokens += row["samples"] is None
            self.writer("episodes", split).add(row)
            if self.request.sft and not found:
                for chat_row in sft_rows(source, record):
                    self.writer("sft", "train").add(chat_row)

    def add_preferences(self, source: Source) -> None:
        """Write the pairs of one campaign."""
        for row in preference_rows(source, self.scrubber, self.request.pairs_per_group):
            self.writer("preferences", "train").add(row)

    def finish(self, campaigns: list[CampaignEntry]) -> Manifest:
        """Close the files, and write the card and, last, the manifest."""
        sets: dict[str, dict[str, SplitEntry]] = {}
        files: dict[str, FileEntry] = {}
        for (name, split), writer in sorted(self.writers.items(), key=_card_order):
            writer.finish()
            files |= writer.files
            entry = SplitEntry(rows=writer.rows, memory_bytes=writer.memory_bytes)
            sets.setdefault(name, {})[split] = entry
        manifest = Manifest(
            campaigns=campaigns,
            options=Options(
                with_failed=self.request.with_failed,
                sft=self.request.sft,
                preferences=self.request.preferences,
                pairs_per_group=self.request.pairs_per_group,
                license=self.request.license,
            ),
            tools={name: metadata.version(name) for name in _TOOLS},
            sets=sets,
            scrubbed=dict(sorted(self.scrubbed.items())),
            rows_without_tokens=self.rows_without_tokens,
            files=files,
        )
        page = self.root / CARD
        write_bytes(page, card(manifest).encode())
        files[CARD] = FileEntry(sha256=sha256_file(page), bytes=page.stat().st_size)
        whole = manifest.model_copy(update={"files": dict(sorted(files.items()))})
        write_bytes(self.root / MANIFEST, json_bytes(whole))
        return whole


def build(
    campaigns: Sequence[CampaignDir],
    out: Path,
    request: Request | None = None,
    scrubber: Scrubber | None = None,
) -> Manifest:
    """Export campaigns; `out` is complete when this returns.

    Args:
        campaigns: at least one.
        out: the directory to make; it may exist if it is empty.
        request: what to export.
        scrubber: finds the secrets; the default one knows shapes alone.

    Raises:
        ConfigurationError: `out` is taken, a campaign is given twice, or a task of one's
            training is held out in another.
        EvidenceError: a campaign is damaged, has findings, or holds no episode.
        InfrastructureError: the disk is full or failed.
    """
    request = request or Request()
    _require_free(out)
    for directory in campaigns:
        if not request.unaudited:
            _require_sound(directory)
    sources = [Source.opened(directory) for directory in campaigns]
    _require_apart(sources)
    with _temporary_directory(out) as root:
        export = _Export(root, request, scrubber or Scrubber())
        for source in sources:
            export.add_episodes(source)
        if not export.writers:
            raise EvidenceError(
                "no episode to export",
                ", ".join(str(source.directory.root) for source in sources),
                "give a campaign with graded episodes, or pass --with-failed",
            )
        if request.preferences:
            for source in sources:
                export.add_preferences(source)
        manifest = export.finish([_entry(s, audited=not request.unaudited) for s in sources])
        _publish(root, out)
    return manifest


def _require_free(out: Path) -> None:
    with disk_errors(out):
        if out.is_dir() and not any(out.iterdir()):
            return
        if out.exists() or out.is_symlink():
            raise ConfigurationError(
                "exists already and is never overwritten",
                str(out),
                "choose another --out, or remove it first",
            )


def _require_sound(directory: CampaignDir) -> None:
    findings = audit(directory).findings
    if findings:
        first = findings[0]
        more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise EvidenceError(
            f"the audit has findings: {first.code}: {first.where}: {first.message}{more}",
            str(directory.root),
            f"see all with `python -m rl.audit {directory.root}`; finish the campaign if it is "
            "not at its end, or export it as it is with --unaudited",
        )


def _require_apart(sources: Sequence[Source]) -> None:
    """Refuse a campaign that comes twice, and task sets that would leak into each other."""
    seen: dict[str, Source] = {}
    for source in sources:
        run_id = source.frozen.run_id
        if run_id in seen:
            raise ConfigurationError(
                f"campaign '{run_id}' is given twice, also as {seen[run_id].directory.root}",
                str(source.directory.root),
                "give each campaign once",
            )
        seen[run_id] = source
    trained = {digest: source for source in sources for digest in source.tasks["train"]}
    for source in sources:
        for digest, task in source.tasks["eval"].items():
            if digest in trained:
                raise ConfigurationError(
                    f"task '{task.name}' (digest {digest[:16]}) is held out here, and trained "
                    f"on in campaign '{trained[digest].frozen.run_id}'",
                    str(source.directory.root),
                    "export the campaigns apart: together the splits would leak",
                )


def _entry(source: Source, *, audited: bool) -> CampaignEntry:
    frozen = source.frozen
    return CampaignEntry(
        run_id=frozen.run_id,
        created_at=frozen.created_at,
        audited=audited,
        config_digest=frozen.config_digest,
        train_tasks=len(frozen.train),
        heldout_tasks=len(frozen.heldout),
        model_name=frozen.model.name,
        model_source=frozen.model.source,
        model_pin=frozen.model.pin,
        code_commit=frozen.code.commit,
        code_dirty=frozen.code.dirty,
        packages=frozen.code.packages,
    )


@contextmanager
def _temporary_directory(out: Path) -> Generator[Path]:
    """A directory beside `out`, removed afterwards if it is still there."""
    final = out.resolve()
    root = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with disk_errors(out):
        final.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir()
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _publish(root: Path, out: Path) -> None:
    """Give the finished directory its name, durably."""
    final = out.resolve()
    with disk_errors(out):
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            sync_directory(folder)
        root.rename(final)  # onto an empty directory at most: the kernel refuses another one
        sync_directory(final.parent)


def _card_order(item: tuple[tuple[SetName, Split], SplitWriter]) -> tuple[int, int]:
    (name, split), _ = item
    return ("episodes", "sft", "preferences").index(name), ("train", "eval").index(split)
