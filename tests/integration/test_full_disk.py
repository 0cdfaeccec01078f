"""A disk that fills up in the middle of a campaign loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.evidence.layout import CampaignDir
from tests.support.campaigns import run_final, start_scripted


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
    run = start_scripted(tmp_path, small_disk, "full", updates=4)
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"\0" * 4096)
        except OSError:
            pass
    assert run.process.wait(timeout=120) == 2, run.log.read_text()
    text = run.log.read_text()
    assert "no space left" in text
    assert "--resume" in text
    assert "Traceback" not in text

    filler.unlink()
    done = run_final("--resume", "full", "--state", str(small_disk), "--no-dashboard")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = CampaignDir(run.campaign)
    assert json.loads(directory.audit.read_text())["findings"] == []
    assert [row.update for row in directory.metrics_rows().read()] == [1, 2, 3, 4]
