"""A disk that fills up in the middle of a campaign loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from tests.support.campaigns import (
    SYSTEM,
    events,
    run_final,
    small_config,
    start_final,
    write_config,
)
from tests.support.tiny_model import make_tiny_model

ENGINE = {
    "kind": "scripted",
    "scripted": {"replies": ["```bash\ntouch a\n```"], "latency_s": 0.5},
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.timeout(600)
def test_a_full_disk_is_one_message_and_the_campaign_continues_when_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", [SYSTEM, "```bash\ntouch a\n```"])
    settings = small_config(
        model, engine=ENGINE, schedule={"updates": 4}, checkpoints={"updates": []}
    )
    config = write_config(tmp_path / "small.toml", settings)
    log = tmp_path / "log"
    arguments = ["--config", str(config), "--state", str(small_disk), "--run-id", "full"]
    first = start_final(*arguments, "--no-dashboard", log=log)
    campaign = small_disk / "campaigns" / "full"
    limit = time.monotonic() + 300
    while not any(row["kind"] == "checkpoint" for row in events(campaign)):
        assert first.poll() is None, log.read_text()
        assert time.monotonic() < limit
        time.sleep(0.1)
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"\0" * 4096)
        except OSError:
            pass
    assert first.wait(timeout=120) == 2, log.read_text()
    text = log.read_text()
    assert "no space left" in text
    assert "--resume" in text
    assert "Traceback" not in text

    filler.unlink()
    done = run_final("--resume", "full", "--state", str(small_disk), "--no-dashboard")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(campaign)
    assert json.loads(directory.audit.read_text())["findings"] == []
    assert [row.update for row in directory.metrics_rows().read()] == [1, 2, 3, 4]
