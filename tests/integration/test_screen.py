"""A screen of the whole cohort that is killed twice, and what is refused before one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rl.config import TasksConfig
from rl.evidence.layout import CampaignDir
from rl.evidence.selection import read_selection
from rl.prepare import prepare_all, prepare_tasks
from rl.records import TaskRef
from sandboxes.bank import write_bank
from sandboxes.gates import GateReport, GateResult, save_report
from tests.support.campaigns import ROOT, environment, events, processes_naming, write_config
from tests.support.screens import run_command, screen_config

ATTEMPTS = 928
COHORT = TasksConfig(source="cohort", cohort="screen116", train=80, heldout=23)


def pass_gates(state: Path, tasks: list[TaskRef]) -> None:
    """The report of gates that were passed; that they are is another test's."""
    results = [
        GateResult(
            name=task.name,
            digest=task.digest,
            verdict="passed",
            oracle=[1.0, 1.0],
            nothing=[0.0, 0.0],
            repeats=2,
        )
        for task in tasks
    ]
    report = GateReport(results={result.digest: result for result in results})
    save_report(report, state / "gates" / "report.json")


def ended(directory: Path) -> int:
    return sum(row["kind"] == "ended" for row in events(directory))


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rl.screen", *arguments, "--no-dashboard"],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.timeout(900)
def test_a_screen_that_is_killed_twice_has_each_attempt_once(tmp_path: Path) -> None:
    root, tasks = prepare_all(COHORT, tmp_path)
    pass_gates(tmp_path, tasks)
    config = write_config(tmp_path / "screen.toml", screen_config(tmp_path, root, tasks))
    directory = CampaignDir(tmp_path / "screens" / "cut")
    log = tmp_path / "log"
    seed = time.time_ns() % 10_000
    print(f"seed {seed}")
    draws = random.Random(seed)
    kills = [int(ATTEMPTS * draws.uniform(0.02, 0.45)), int(ATTEMPTS * draws.uniform(0.5, 0.95))]

    process = start(
        log, "--config", str(config), "--state", str(tmp_path), "--run-id", directory.run_id
    )
    for after in kills:
        limit = time.monotonic() + 400
        while ended(directory.root) < after:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < limit, log.read_text(encoding="utf-8")
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        process = start(log, "--resume", directory.run_id, "--state", str(tmp_path))
    assert process.wait(timeout=500) == 0, log.read_text(encoding="utf-8")

    records = list(directory.episodes("heldout"))
    graded = [record for record in records if record.outcome == "graded"]
    assert len(graded) == ATTEMPTS
    assert set(Counter(record.task_name for record in graded).values()) == {8}
    assert len({record.attempt_id for record in records}) == len(records)
    assert {record.outcome for record in records} <= {"graded", "cancelled"}
    shards = {
        replica: {r.task_name for r in graded if r.replica == replica} for replica in range(4)
    }
    assert sorted(map(len, shards.values())) == [29, 29, 29, 29]
    assert json.loads(directory.audit.read_text())["findings"] == []
    proofs = [row for row in events(directory.root) if row["kind"] == "proven"]
    assert len(proofs) == 3 * 2, "each worker proves itself in each of three drivers"
    assert all(len(row["fields"]["replicas"]) == 4 for row in proofs)

    selection = read_selection(directory.root / "selection.json")
    assert (len(selection.train), len(selection.heldout)) == (80, 23)
    chosen = COHORT.model_copy(update={"split": str(directory.root / "selection.json")})
    prepared = prepare_tasks(chosen, tmp_path)
    assert [task.digest for task in prepared.heldout] == selection.heldout
    limit = time.monotonic() + 60  # what the killed drivers had started ends by itself
    while processes_naming(str(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.2)
    assert processes_naming(str(tmp_path)) == []


def test_nothing_is_started_without_the_gates(tmp_path: Path) -> None:
    root, tasks = prepare_all(COHORT, tmp_path)
    pass_gates(tmp_path, tasks[1:])
    config = write_config(tmp_path / "screen.toml", screen_config(tmp_path, root, tasks))
    done = run_command("rl.screen", "--config", str(config), "--state", str(tmp_path))
    assert done.returncode == 2
    assert f"{tasks[0].name}: not gated" in done.stderr
    assert f"python -m rl.gate {root}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "screens").exists()


def test_any_folder_of_packages_can_be_screened(tmp_path: Path) -> None:
    folder = tmp_path / "their packages"
    write_bank(folder, (), 6, 0)
    for package in folder.iterdir():  # as others' packages have no family
        config = package / "task.toml"
        lines = config.read_text(encoding="utf-8").splitlines()
        config.write_text("\n".join(line for line in lines if not line.startswith("family")))
    arguments = ("--from", str(folder), "--state", str(tmp_path / "state"), "--plan", "--json")
    done = run_command("rl.screen", *arguments)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["tasks"], plan["shards"], plan["attempts"]) == (6, [3, 3], 48)
    assert not (tmp_path / "state" / "screens").exists()
