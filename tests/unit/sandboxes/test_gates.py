"""Gate reports, without a sandbox."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.errors import EvidenceError, TaskPackageError
from sandboxes.bank import write_bank
from sandboxes.gates import (
    GATE_VERSION,
    GateReport,
    GateResult,
    Verdict,
    load_report,
    require_gate,
    save_report,
)
from sandboxes.tasks import TaskPackage, load_folder


@pytest.fixture
def packages(tmp_path: Path) -> list[TaskPackage]:
    write_bank(tmp_path / "bank", ["mkdir"], 3, seed=0)
    return load_folder(tmp_path / "bank")


def _result(package: TaskPackage, verdict: Verdict) -> GateResult:
    return GateResult(name=package.name, digest=package.digest, verdict=verdict, reasons=["why"])


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
