"""Gate reports, without a sandbox."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rl import gate
from rl.errors import CampaignError, EvidenceError, InfrastructureError, TaskPackageError
from sandboxes import gates
from sandboxes.attempt import Provider
from sandboxes.bank import write_bank
from sandboxes.gates import (
    GATE_VERSION,
    REPEATS,
    GateReport,
    GateResult,
    Verdict,
    gate_all,
    load_report,
    require_gate,
    require_writable,
    save_report,
)
from sandboxes.tasks import TaskPackage, load_folder


@pytest.fixture
def packages(tmp_path: Path) -> list[TaskPackage]:
    write_bank(tmp_path / "bank", ["mkdir"], 3, seed=0)
    return load_folder(tmp_path / "bank")


def _result(package: TaskPackage, verdict: Verdict) -> GateResult:
    return GateResult(
        name=package.name,
        digest=package.digest,
        verdict=verdict,
        reasons=["why"],
        oracle=[1.0],
        nothing=[0.0],
        repeats=REPEATS,
    )


def test_report_survives_the_disk(tmp_path: Path, packages: list[TaskPackage]) -> None:
    path = tmp_path / "state" / "gates.json"
    assert load_report(path).results == {}
    report = GateReport(results={packages[0].digest: _result(packages[0], "passed")})
    save_report(report, path)
    assert load_report(path) == report
    assert [item.name for item in path.parent.iterdir()] == ["gates.json"]


def test_torn_report_is_an_error_and_an_older_gate_counts_for_nothing(
    tmp_path: Path, packages: list[TaskPackage]
) -> None:
    path = tmp_path / "gates.json"
    path.write_text('{"results": {')
    with pytest.raises(EvidenceError, match="cannot be read"):
        load_report(path)
    result = _result(packages[0], "passed")
    old = GateReport(gate_version=GATE_VERSION - 1, results={packages[0].digest: result})
    save_report(old, path)
    assert load_report(path).results == {}


@pytest.mark.parametrize(
    ("content", "wanted", "remedy"),
    [
        ('{"results": {', "cannot be read: Invalid JSON", "delete it"),
        ("[" * 100_000, "cannot be read: Invalid JSON", "delete it"),
        ('{"results": {"a": {"name": 5}}}', "results.a.name: Input should be", "delete it"),
        (None, "cannot be read: is a directory", "must be a file"),
    ],
)
def test_unreadable_report_is_one_line_with_a_remedy(
    tmp_path: Path, content: str | None, wanted: str, remedy: str
) -> None:
    path = tmp_path / "gates.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(EvidenceError, match=wanted) as caught:
        load_report(path)
    assert "\n" not in caught.value.what and "pydantic" not in caught.value.what
    assert caught.value.where == str(path) and remedy in caught.value.remedy


def test_report_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "gates.json"
    with pytest.raises(EvidenceError, match="not a directory") as caught:
        load_report(path)
    assert "in a folder" in caught.value.remedy
    for write in (require_writable, lambda path: save_report(GateReport(), path)):
        with pytest.raises(InfrastructureError, match="cannot be written") as refused:
            write(path)
        assert refused.value.where == str(path) and refused.value.remedy


def test_a_writable_place_is_left_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "gates.json")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"digest": "0" * 64}, "holds the result of 0000000000000000"),
        ({"oracle": [1.0, 0.5]}, "passed with oracle"),
        ({"oracle": []}, "passed with oracle"),
        ({"nothing": [0.1]}, "passed with nothing"),
        ({"nothing": []}, "passed with nothing"),
    ],
)
def test_report_that_contradicts_itself_is_refused(
    tmp_path: Path, packages: list[TaskPackage], fields: dict[str, Any], wanted: str
) -> None:
    path = tmp_path / "gates.json"
    wrong = _result(packages[0], "passed").model_copy(update=fields)
    save_report(GateReport(results={packages[0].digest: wrong}), path)
    with pytest.raises(EvidenceError, match=wanted) as caught:
        load_report(path)
    assert caught.value.remedy == "delete it and gate again"
    failed = wrong.model_copy(update={"verdict": "failed", "digest": packages[0].digest})
    save_report(GateReport(results={packages[0].digest: failed}), path)
    assert load_report(path).results[packages[0].digest] == failed


def test_known_result_is_returned_under_the_present_name(packages: list[TaskPackage]) -> None:
    package = packages[0]
    old = _result(package, "passed").model_copy(update={"name": "old-name"})
    twin = dataclasses.replace(package, name="twin")
    provider = cast(Provider, None)  # nothing is left to gate
    results = asyncio.run(gate_all([package, twin], provider, done={package.digest: old}))
    assert [result.name for result in results] == [package.name, "twin"]
    assert {result.digest for result in results} == {package.digest}


@pytest.mark.parametrize("report", ["/proc/no-such/y.json", "{bank}"])
def test_a_report_that_cannot_be_written_stops_the_command_before_it_gates(
    packages: list[TaskPackage], report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = str(packages[0].path.parent)
    place = report.format(bank=bank)
    with monkeypatch.context() as patch:
        patch.setattr(gates, "gate_all", lambda *_: pytest.fail("it gated"))
        with pytest.raises(CampaignError):
            gate.main(["--report", place, bank])
    command = [sys.executable, "-m", "rl.gate", "--report", place, bank]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {place}: ") and "\n  -> " in done.stderr
    assert "Traceback" not in done.stderr


def test_launch_is_refused_with_the_names(packages: list[TaskPackage]) -> None:
    good, bad, absent = packages
    results = {good.digest: _result(good, "passed"), bad.digest: _result(bad, "failed")}
    report = GateReport(results=results)
    require_gate(report, [good])
    with pytest.raises(TaskPackageError) as caught:
        require_gate(report, packages)
    text = str(caught.value)
    assert "2 of 3" in text
    assert f"{bad.name}: why" in text
    assert f"{absent.name}: not gated" in text
    assert good.name not in text


def test_help_is_quick() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rl.gate", "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert "--concurrency" in done.stdout
    assert time.monotonic() - began < 5.0  # well under one second on a free machine
