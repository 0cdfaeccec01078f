"""`python -m rl.state`: what it says, and with which exit code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl import state as command
from rl.errors import run_command
from rl.evidence.layout import CampaignDir
from rl.evidence.store_text import amount, size
from tests.unit.rl.evidence.synthetic import build

ROOT = Path(__file__).resolve().parents[3]
PRICES = ROOT / "configs" / "billing" / "prices.toml"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with one finished run, and one that is not."""
    state = tmp_path_factory.mktemp("origin") / "state"
    half = build(state / "heldout", finish=False).root
    half.rename(half.with_name("half"))
    build(state / "campaigns")
    return state


@pytest.fixture
def run_dir(origin: Path, tmp_path: Path) -> CampaignDir:
    """The finished run, in a copy."""
    shutil.copytree(origin, tmp_path / "state")
    (path,) = (tmp_path / "state" / "campaigns").iterdir()
    return CampaignDir(path)


def run(tmp_path: Path, *arguments: object) -> int:
    full = [*map(str, arguments), "--state", str(tmp_path / "state")]
    with pytest.raises(SystemExit) as end:
        run_command(command.main, full)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_ls_keeps_failed_runs_apart(
    run_dir: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "ls") == 0
    text = capsys.readouterr().out
    first, second = text.index("Finished runs:"), text.index("Runs that did not finish")
    assert first < text.index(run_dir.run_id) < second < text.index("half")
    assert "unfinished: train" in text and "irreplaceable" in text
    assert run(tmp_path, "ls", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in found["runs"]} == {"finished", "unfinished"}


def test_ls_of_names_that_are_hostile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state" / "campaigns" / "[red]\x1b[31m\n").mkdir(parents=True)
    assert run(tmp_path, "ls") == 0
    assert "[red]\\x1b[31m\\n" in capsys.readouterr().out


def test_archive_remove_and_restore(
    run_dir: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        str(path.relative_to(run_dir.root)): path.read_bytes()
        for path in run_dir.root.rglob("*") if path.is_file()
    }  # fmt: skip
    assert run(tmp_path, "archive", run_dir.run_id, "half", "--level", "3") == 0
    assert run_dir.root.exists() and "is as it was" in capsys.readouterr().out
    assert run(tmp_path, "archive", run_dir.run_id, "--remove", "--json") == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["run_id"] == run_dir.run_id and made["removed"] and not run_dir.root.exists()
    assert run(tmp_path, "verify") == 0
    text = capsys.readouterr().out
    assert "no findings; read " in text and "3 archive" in text
    assert run(tmp_path, "restore", Path(made["file"]).name) == 0
    after = {
        str(path.relative_to(run_dir.root)): path.read_bytes()
        for path in run_dir.root.rglob("*") if path.is_file()
    }  # fmt: skip
    assert after == before
    assert run(tmp_path, "restore", made["file"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(tmp_path, "restore", made["file"], "--to", tmp_path / "copy") == 0
    assert (tmp_path / "copy" / "frozen.json").exists()


def test_verify_names_every_finding(
    run_dir: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "verify", run_dir.run_id) == 0
    os.truncate(run_dir.failed_trace, 10)
    (run_dir.checkpoints / "update-0003").mkdir()
    capsys.readouterr()
    assert run(tmp_path, "verify") == 2
    text = capsys.readouterr().out
    assert f"torn-trace: {run_dir.failed_trace} at byte 0" in text
    assert "damaged-checkpoint" in text and "update-0003/manifest.json" in text
    assert "2 findings" in text
    assert run(tmp_path, "verify", run_dir.failed_trace, "--json") == 2
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 1


def test_verify_checks_cohorts_with_their_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sandboxes.manifest import pin_folder, prepare_cohort
    from tests.support.packages import write_package

    package = write_package(tmp_path / "bank")
    source = pin_folder(tmp_path / "bank", "mine").source
    prepare_cohort(source, "mine", tmp_path / "state")
    assert run(tmp_path, "verify") == 0
    (package / "instruction.md").write_text("something else")
    assert run(tmp_path, "verify") == 2
    assert "damaged-cohort" in capsys.readouterr().out


def test_a_local_run_costs_nothing(
    run_dir: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "billing", run_dir.run_id, "--prices", PRICES) == 0
    text = capsys.readouterr().out
    assert "own machines are taken to cost nothing" in text and "0.00" in text
    record = json.loads((tmp_path / "state" / "billing" / f"{run_dir.run_id}.json").read_text())
    assert record["estimate"]["lines"] == [] and record["reports"] == []
    assert run(tmp_path, "verify", tmp_path / "state" / "billing") == 0


def test_the_providers_report_is_kept_beside_the_estimate(
    run_dir: CampaignDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl.evidence.billing import ProviderReport
    from sandboxes import modal_billing

    def fetched(run_id: str, begun: float, ended: float) -> ProviderReport:
        row: dict[str, Any] = {
            "cost": "1.5",
            "tags": {"campaign": run_id},
            "cost_by_resource": {"cpu": "1.5"},
        }
        return ProviderReport(
            provider="modal", workspace="our-lab", fetched_at=ended, start=begun, end=ended,
            resolution="h", tag=run_id, app="terminal-rl", rows=[row],
        )  # fmt: skip

    monkeypatch.setattr(modal_billing, "fetch_report", fetched)
    arguments: list[Any] = ["billing", run_dir.run_id, "--prices", PRICES]
    assert run(tmp_path, *arguments, "--fetch") == 0
    text = capsys.readouterr().out
    assert "modal's report, by the run's tag" in text and "+1.50" in text and "of it cpu" in text
    assert run(tmp_path, *arguments) == 0  # without --fetch, what was fetched stays
    assert "our-lab" in capsys.readouterr().out
    assert run(tmp_path, *arguments, "--fetch", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["reports"]) == 2


def test_fetching_that_fails_writes_nothing(
    run_dir: CampaignDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl.errors import ConfigurationError
    from sandboxes import modal_billing

    def refused(*_: object) -> None:
        raise ConfigurationError("no token", "Modal", "modal token new")

    monkeypatch.setattr(modal_billing, "fetch_report", refused)
    assert run(tmp_path, "billing", run_dir.run_id, "--prices", PRICES, "--fetch") == 2
    assert capsys.readouterr().err.count("error:") == 1
    assert not (tmp_path / "state" / "billing").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["archive", "nothing"], "no such run, file or folder"),
        (["archive", "half", "--level", "40"], "give 1 to 19"),
        (["archive", "/etc/hostname"], "not below the state directory"),
        (["restore", "nothing.tar.zst"], "no such archive"),
        (["verify", "nothing"], "the newest runs are"),
        (["billing", "nothing", "--prices", str(PRICES)], "no such run"),
        (["billing", "half", "--prices", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_input_is_one_message(
    run_dir: CampaignDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    assert run(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("error:") == 1 and "Traceback" not in error


def test_a_missing_state_directory_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "ls") == 2
    assert "no such state directory" in capsys.readouterr().err


def test_a_name_of_two_runs_is_ambiguous(
    run_dir: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state" / "screens" / "half").mkdir(parents=True)
    assert run(tmp_path, "archive", "half") == 2
    assert "several runs have this name" in capsys.readouterr().err


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB"]
    assert [amount(x) for x in (0.0, 0.0012345, 0.5, 12.346)] == ["0.00", "0.0012", "0.50", "12.35"]


def test_a_log_hears_of_long_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl.evidence import store_text

    monkeypatch.setattr(store_text, "LOG_INTERVAL_S", 0.0)
    with store_text.progress() as meter:
        meter.begin("archive", 4096)
        meter.advance(1024)
        meter.advance(1024)
    told = capsys.readouterr()
    assert told.err == "archive: 1.0 KiB of 4.0 KiB\narchive: 2.0 KiB of 4.0 KiB\n"
    assert told.out == ""
