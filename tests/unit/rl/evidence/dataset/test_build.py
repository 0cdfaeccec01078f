"""An export is whole or absent, bounded in memory, and refuses what it should."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigurationError, EvidenceError, InfrastructureError
from rl.evidence.dataset import writing
from rl.evidence.dataset.build import Request, build
from rl.evidence.dataset.check import Checker
from rl.evidence.dataset.scrub import Scrubber
from rl.evidence.layout import CampaignDir
from rl.records import Sample
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.material import (
    act,
    append,
    json_rows,
    load,
    replace,
)


def test_the_same_campaign_gives_the_same_bytes(
    made: CampaignDir, exported: Path, tmp_path: Path
) -> None:
    build([made], tmp_path / "again", Request(with_failed=True, sft=True, preferences=True))
    names = [p.relative_to(exported) for p in sorted(exported.rglob("*")) if p.is_file()]
    assert len(names) == 8
    for name in names:
        assert (exported / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_shards_are_bounded_and_keep_the_order(campaign: CampaignDir, tmp_path: Path) -> None:
    of = synthetic.task("train", 0)
    many = [
        synthetic.episode(f"x-a{n}", "x", of, 0, turns=[act(os.urandom(4000).hex())])
        for n in range(100)
    ]
    replace(campaign, many)
    limit = 200_000
    manifest = build([campaign], tmp_path / "out", Request(unaudited=True, shard_bytes=limit))
    shards = [path for path in manifest.files if path.startswith("data/episodes/train")]
    assert len(shards) > 5
    assert all(path.endswith(f"-of-{len(shards):05d}.parquet") for path in shards)
    assert max(entry.bytes for entry in manifest.files.values()) <= limit
    wanted = [record.attempt_id for record in many]
    assert load(tmp_path / "out", tmp_path / "cache")["train"]["attempt_id"] == wanted
    assert [row["attempt_id"] for row in json_rows(tmp_path / "out", "train")] == wanted
    assert list(Checker(tmp_path / "out", Scrubber()).findings()) == []


def renamed(campaign: CampaignDir, root: Path, name: str, **changes: Any) -> CampaignDir:
    """A copy of a campaign that was run under another name."""
    other = CampaignDir(shutil.copytree(campaign.root, root / name))
    frozen = json.loads(other.frozen.read_text()) | {"run_id": name}
    for key, change in changes.items():
        change(frozen[key])
    other.frozen.write_text(json.dumps(frozen))
    return other


def test_two_campaigns_are_told_apart_by_run_id(campaign: CampaignDir, tmp_path: Path) -> None:
    other = renamed(campaign, tmp_path, "other")
    build([campaign, other], tmp_path / "out", Request(unaudited=True))
    loaded = load(tmp_path / "out", tmp_path / "cache")
    assert loaded["train"]["run_id"] == [campaign.run_id] * 71 + ["other"] * 71
    assert loaded["eval"]["run_id"] == [campaign.run_id] * 48 + ["other"] * 48


def test_campaigns_that_would_leak_into_each_other_are_refused(
    campaign: CampaignDir, tmp_path: Path
) -> None:
    heldout = json.loads(campaign.frozen.read_text())["heldout"]
    other = renamed(campaign, tmp_path, "other", train=lambda train: train.append(heldout[0]))
    with pytest.raises(ConfigurationError, match="held out here, and trained on in campaign 'oth"):
        build([campaign, other], tmp_path / "out", Request(unaudited=True))
    with pytest.raises(ConfigurationError, match="given twice"):
        build([campaign, campaign], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_campaign_with_findings_is_refused_unless_told(
    campaign: CampaignDir, tmp_path: Path
) -> None:
    unfinished = synthetic.build(tmp_path / "half", finish=False)
    with pytest.raises(EvidenceError, match=r"the audit has findings: .* and \d+ more"):
        build([campaign, unfinished], tmp_path / "out")
    manifest = build([unfinished], tmp_path / "out", Request(unaudited=True))
    assert not manifest.campaigns[0].audited
    assert list(load(tmp_path / "out", tmp_path / "cache")) == ["train"]


def test_an_episode_of_a_foreign_task_is_refused(campaign: CampaignDir, tmp_path: Path) -> None:
    append(campaign.trace("train"), [synthetic.episode("x", "x", synthetic.task("held", 0), 0)])
    with pytest.raises(EvidenceError, match="is none of the campaign's training tasks"):
        build([campaign], tmp_path / "out", Request(unaudited=True))


def test_no_episode_is_no_dataset(campaign: CampaignDir, tmp_path: Path) -> None:
    for path in campaign.traces:
        path.unlink(missing_ok=True)
    with pytest.raises(EvidenceError, match="no episode to export"):
        build([campaign], tmp_path / "out", Request(unaudited=True))


def test_what_exists_is_never_overwritten(campaign: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    build([campaign], out)  # an empty one may be there
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(ConfigurationError, match="never overwritten"):
        build([campaign], out)
    assert (out / "manifest.json").read_bytes() == before


def test_a_failure_leaves_nothing_behind(
    campaign: CampaignDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    parent = tmp_path / "parent"
    monkeypatch.setattr(writing, "write_all", full)
    with pytest.raises(InfrastructureError, match="no space left"):
        build([campaign], parent / "out")
    assert list(parent.iterdir()) == []


def test_a_killed_export_leaves_nothing_under_the_name(
    campaign: CampaignDir, tmp_path: Path
) -> None:
    code = f"""
import os, signal
from pathlib import Path
from rl.evidence.dataset import build as module
from rl.evidence.layout import CampaignDir
module._publish = lambda root, out: os.kill(os.getpid(), signal.SIGKILL)
module.build([CampaignDir(Path({str(campaign.root)!r}))], Path({str(tmp_path / "out")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()


PEAK = """
import sys
from pathlib import Path
from rl.evidence.dataset.build import Request, build
from rl.evidence.layout import CampaignDir
build([CampaignDir(Path(sys.argv[1]))], Path(sys.argv[2]), Request(unaudited=True, sft=True))
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""
TOKENS = 3_000
FEW, MANY = 60, 420  # the few fill a row group already


def test_seven_times_the_episodes_take_no_more_memory(
    campaign: CampaignDir, tmp_path: Path
) -> None:
    of = synthetic.task("train", 0)
    sample = Sample(
        token_ids=list(range(TOKENS)),
        sampled=[True] * TOKENS,
        logprobs=[-1 / (n + 3) for n in range(TOKENS)],
    )
    peaks: list[int] = []
    for count in (FEW, MANY):
        one = [synthetic.episode(f"x-a{n}", "x", of, 0, samples=[sample]) for n in range(count)]
        replace(campaign, one)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(campaign.root), str(tmp_path / f"out{count}")],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout) >> 10)
    print(peaks)
    # What MANY has more than FEW takes 70 MiB as Python's objects.
    assert peaks[1] - peaks[0] < 15, peaks
