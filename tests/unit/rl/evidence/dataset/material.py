"""Campaigns to export, and the `datasets` library to read them back with, offline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zstandard
from pydantic_core import from_json

from rl.evidence.layout import CampaignDir
from rl.records import EpisodeRecord, Sample, TurnRecord
from tests.unit.rl.evidence.synthetic import episode, task

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def load(root: Path, cache: Path, name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset` of a directory, with no network and no cache of the user's."""
    os.environ.update(OFFLINE)
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(str(root), name, cache_dir=str(cache), **options)


def append(path: Path, records: Iterable[EpisodeRecord]) -> None:
    """Append records to a trace as `TraceWriter` does, but without waiting for the disk."""
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    with path.open("ab") as file:
        for record in records:
            file.write(compressor.compress(record.model_dump_json().encode() + b"\n"))


def replace(campaign: CampaignDir, records: Iterable[EpisodeRecord]) -> None:
    """Make `records` the campaign's graded training episodes."""
    campaign.trace("train").write_bytes(b"")
    append(campaign.trace("train"), records)


def json_rows(root: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split's JSON Lines."""
    lines: list[bytes] = []
    for path in sorted((root / "data/jsonl").glob(f"{split}-*.jsonl.zst")):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
        lines += data.splitlines()
    return [from_json(line) for line in lines]


def act(text: str, branch: int = 0, **fields: Any) -> TurnRecord:
    """A turn that ran a command."""
    values: dict[str, Any] = {
        "branch": branch,
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "text": text,
        "finish_reason": "stop",
        "command": text,
        "exit_code": 0,
        "output": f"out of {text}",
    }
    return TurnRecord.model_validate(values | fields)


def summary(branch: int, **fields: Any) -> TurnRecord:
    """A summary that was asked for."""
    values: dict[str, Any] = {
        "purpose": "summary",
        "branch": branch,
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "text": "I did it",
        "finish_reason": "stop",
        "asked": "sum up",
    }
    return TurnRecord.model_validate(values | fields)


def compacted() -> list[TurnRecord]:
    """Three turns, a rejected and an accepted summary, and a turn in the next branch."""
    return [
        act("one"),
        act("two"),
        act("three"),
        summary(0, problem="too_long", text="much too long"),
        summary(0, asked="shorter", handover="you did it", kept_turns=2),
        act("four", 1),
    ]


def compacted_episode(attempt_id: str, group_id: str, **fields: Any) -> EpisodeRecord:
    """An episode of two branches."""
    samples = [
        Sample(branch=0, token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, -0.1]),
        Sample(branch=1, token_ids=[3, 4], sampled=[False, True], logprobs=[0.0, -1e-17]),
    ]
    return episode(
        attempt_id, group_id, task("train", 0), 0, turns=compacted(), samples=samples, **fields
    )


def said(rows: Sequence[Any]) -> list[str]:
    """Roles and texts in short form."""
    return [f"{row['role']}: {row['content']}" for row in rows]
