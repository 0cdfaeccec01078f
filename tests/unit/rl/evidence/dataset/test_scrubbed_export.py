"""No byte of a secret gets into any file of an export."""

import json
from pathlib import Path
from typing import Any

import zstandard

from rl.evidence.dataset.build import Request, build
from rl.evidence.dataset.check import Checker
from rl.evidence.dataset.manifest import read_manifest
from rl.evidence.dataset.scrub import Scrubber, redacted
from rl.evidence.layout import CampaignDir
from rl.records import EpisodeRecord, Failure
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.canaries import CANARIES, CORES, kinds_planted
from tests.unit.rl.evidence.dataset.material import (
    act,
    append,
    json_rows,
    load,
    replace,
)


def sealed(root: Path) -> bytes:
    """Everything in a dataset's files, as a reader gets it."""
    parts = [json.dumps(json_rows(root, split)).encode() for split in ("train", "eval")]
    for path in sorted(root.rglob("*")):
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            parts.append(repr(pq.read_table(path).to_pylist()).encode())
        if path.suffix == ".zst":
            parts.append(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
        elif path.is_file():
            parts.append(path.read_bytes())
    return b"\n".join(parts)


def test_no_byte_of_a_planted_secret_is_exported(campaign: CampaignDir, tmp_path: Path) -> None:
    of = synthetic.task("train", 0)
    planted: list[EpisodeRecord] = []
    for number, (_, secret) in enumerate(CANARIES):
        places: list[dict[str, Any]] = [
            {"turns": [act(f"echo '{secret}'"), act("ls")]},
            {"turns": [act("env", output=f"A={secret}\n"), act("ls")], "reward": 0.0},
            {"verifier_log": f"leaked {secret} here"},
        ]
        for place, fields in enumerate(places):
            planted.append(synthetic.episode(f"x{number}-a{place}", "x", of, 0, **fields))
    clean = synthetic.episode("clean", "x", of, 0, turns=[act("pwd")])
    replace(campaign, [*planted, clean])
    out = tmp_path / "out"
    build([campaign], out, Request(unaudited=True, sft=True, preferences=True))
    everything = sealed(out)
    assert not any(core.encode() in everything for core in CORES)
    *rows, last = json_rows(out, "train")
    for place, row in enumerate(rows):
        kind, _ = CANARIES[place // 3]
        assert row["scrubbed"] > 0, kind
        assert redacted(kind) in json.dumps(row)
        assert (row["samples"] is None) == (place % 3 < 2)
    assert last["scrubbed"] == 0
    assert last["samples"] is not None
    manifest = read_manifest(out)
    assert manifest.scrubbed.keys() == kinds_planted()
    assert manifest.rows_without_tokens == 2 * len(CANARIES)
    assert load(out, tmp_path / "cache", "sft")["train"]["attempt_id"] == ["clean"]
    assert "preferences" not in manifest.sets
    assert list(Checker(out, Scrubber()).findings()) == []


def test_known_secrets_are_taken_out_everywhere(campaign: CampaignDir, tmp_path: Path) -> None:
    frozen = json.loads(campaign.frozen.read_text())
    frozen["train"][0]["instruction"] = "log in with correct-horse"
    campaign.frozen.write_text(json.dumps(frozen))
    of = synthetic.task("train", 0)
    lost = synthetic.masked("x-a1", "x", of, 0)
    lost = lost.model_copy(update={"failure": Failure(kind="Error", message="401 correct-horse")})
    replace(campaign, [synthetic.episode("x-a0", "x", of, 0)])
    campaign.failed_trace.write_bytes(b"")
    append(campaign.failed_trace, [lost])
    request = Request(unaudited=True, with_failed=True)
    build([campaign], tmp_path / "out", request, Scrubber({"correct-horse": "listed"}))
    assert b"correct-horse" not in sealed(tmp_path / "out")
    for row in json_rows(tmp_path / "out", "train"):
        assert row["instruction"] == "log in with [REDACTED:listed]"
        assert row["samples"] is None
