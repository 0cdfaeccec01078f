"""A launcher that dies after each step of a submission, and what is found of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.errors import EvidenceError
from rl.evidence.receipts import Ledger
from rl.provision.inquiry import told, what_exists
from tests.support.modal_apps import ModalApps
from tests.support.modal_rented import ROOT, configured

# Launches with guards that hold and one file as sources, and dies after the step that is named.
DIE = """
import os, sys
from pathlib import Path
import rl.provision.launch as launching
from rl.evidence.receipts import Ledger
from rl.guards import Guard
from rl.prepare import PreparedTasks
from tests.support.modal_rented import configured
step, state = sys.argv[1], Path(sys.argv[2])

def dies_after(name, owner, attribute):
    inner = getattr(owner, attribute)
    async def outer(*arguments):
        result = await inner(*arguments)
        if name == step or (name == "a call" and step == f"{name} of {arguments[1]}"):
            os._exit(9)
        return result
    setattr(owner, attribute, outer)

def stage(folder, config, code):
    if step == "the intent":
        os._exit(9)
    (folder / "submitted.json").write_text("{}")

def recorded(self, *arguments):
    record(self, *arguments)
    os._exit(9)

record = Ledger.record
Ledger.record = recorded
launching.launch_guards = lambda _: []
launching.rehearsal_guard = lambda _: Guard("dry runs", lambda: "made")
launching.prepare_tasks = lambda *_: PreparedTasks(root=state, train=[], heldout=[])
launching.stage = stage
dies_after("the claim", launching, "_take")
dies_after("the deployment", launching, "_deploy")
dies_after("a call", launching, "_call")
launching.launch(launching.Request("final_train", configured(), "final", "run-1", False, state))
"""


def die(step: str, state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIE, step, str(state)], cwd=ROOT, capture_output=True, timeout=100
    )
    assert done.returncode == 9, done.stderr.decode()


@pytest.mark.parametrize(
    ("step", "called"),
    [
        ("the intent", []),
        ("the claim", []),
        ("the deployment", []),
        ("a call of final_train", ["final_train"]),
        ("a call of final_continue", ["final_train", "final_continue"]),
    ],
)
def test_a_launcher_that_died_blocks_its_run_and_what_there_is_is_told(
    apps: ModalApps, tmp_path: Path, step: str, called: list[str]
) -> None:
    die(step, tmp_path)
    ledger = Ledger(tmp_path / "receipts")
    (entry,) = ledger.entries("run-1")
    assert (entry.standing, entry.held) == ("ambiguous", False)
    with pytest.raises(EvidenceError) as refused:
        ledger.require_settled("run-1")
    assert "rl.receipts inspect run-1" in refused.value.remedy
    assert [call.function for call in apps.calls] == called
    found = what_exists(entry.intent)
    said = told(entry.intent, found)
    assert [one.name for one in found if one.kind == "call"] == called
    if called:
        ids = {call.function: call.id for call in apps.calls}
        named = " ".join(f"--call {name}={ids[name]}" for name in called)
        assert said.endswith(f"--finding present {named}")
        ledger.resolve("run-1", "run-1.a1", "present", said, ids)
    else:
        assert said.endswith("so nothing was called: --finding absent")
        ledger.resolve("run-1", "run-1.a1", "absent", said)
    ledger.require_settled("run-1")


def test_a_launcher_that_died_after_the_receipt_has_submitted(
    apps: ModalApps, tmp_path: Path
) -> None:
    die("the receipt", tmp_path)
    (entry,) = Ledger(tmp_path / "receipts").entries("run-1")
    assert entry.standing == "submitted"
    assert {"final_train", "final_continue"} < entry.calls.keys()
    assert configured().heldout.shards == 2 and len(apps.calls) == 2
