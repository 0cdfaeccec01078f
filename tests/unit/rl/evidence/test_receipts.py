"""Intents, receipts and resolutions: one submission, whatever dies and whoever races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl.evidence.receipts as receipts
from rl.errors import CampaignError, ConfigurationError, EvidenceError
from rl.evidence.intents import attempt_of, new_intent, submission_name
from rl.evidence.receipts import Ledger

ROOT = Path(__file__).parents[4]

# Forks launchers that start at once; each that gets the intent "submits" by a line in a file.
RACE = """
import os, sys
from pathlib import Path
from rl.errors import CampaignError
from rl.evidence.intents import new_intent
from rl.evidence.receipts import Ledger
root, lines, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ready, go = os.pipe()
children = []
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        ledger = Ledger(root)
        intent = new_intent("run", "run.a1", "ray", "here", "job")
        try:
            with ledger.claim(intent):
                with lines.open("a") as file:
                    file.write(f"{os.getpid()}\\n")
                ledger.record(intent, {"job": "run.a1"})
        except CampaignError:
            os._exit(2)
        os._exit(0)
    children.append(pid)
os.close(ready)
os.close(go)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(codes.count(0), codes.count(2))
"""

# Dies at the step that is named: nothing after it happens.
DIE = """
import os, sys
from pathlib import Path
import rl.evidence.receipts as receipts
from rl.evidence.intents import new_intent
step, root, lines = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
ledger = receipts.Ledger(root)
create = receipts.create_exclusive
def created(path, data):
    if step == f"before {path.name}":
        os._exit(9)
    create(path, data)
    if step == f"after {path.name}":
        os._exit(9)
receipts.create_exclusive = created
intent = new_intent("run", "run.a1", "ray", "here", "job")
with ledger.claim(intent):
    if step == "before the call":
        os._exit(9)
    lines.write_text("submitted")
    if step == "after the call":
        os._exit(9)
    ledger.record(intent, {"job": "run.a1"})
os._exit(9)
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def intent(run_id: str = "run", submission_id: str = "run.a1"):
    return new_intent(
        run_id, submission_id, "ray", "http://head:8265", "job", ["python", "-m", "x"]
    )


def test_of_a_hundred_launchers_exactly_one_submits(tmp_path: Path) -> None:
    lines = tmp_path / "submitted"
    done = run(RACE, tmp_path / "receipts", lines, 100)
    assert done.stdout.split() == ["1", "99"], done.stderr
    assert len(lines.read_text().splitlines()) == 1
    (entry,) = Ledger(tmp_path / "receipts").entries("run")
    assert entry.standing == "submitted" and not entry.held


@pytest.mark.parametrize(
    ("step", "standing", "submitted"),
    [
        ("before intent.json", None, False),
        ("after intent.json", "ambiguous", False),
        ("before the call", "ambiguous", False),
        ("after the call", "ambiguous", True),
        ("before receipt.json", "ambiguous", True),
        ("after receipt.json", "submitted", True),
    ],
)
def test_a_launcher_that_dies_at_any_step_leaves_what_it_did_to_be_seen(
    tmp_path: Path, step: str, standing: str | None, submitted: bool
) -> None:
    ledger, lines = Ledger(tmp_path / "receipts"), tmp_path / "submitted"
    done = run(DIE, step, ledger.root, lines)
    assert done.returncode == 9, done.stderr
    assert lines.exists() is submitted
    assert [entry.standing for entry in ledger.entries("run")] == ([standing] if standing else [])
    assert not [entry for entry in ledger.entries("run") if entry.held]
    if standing is None:
        with ledger.claim(intent()):
            pass
        return
    with pytest.raises(CampaignError) as refused, ledger.claim(intent()):
        pass
    assert "python -m rl.receipts inspect run" in refused.value.remedy
    assert isinstance(refused.value, EvidenceError) is (standing == "ambiguous")


def test_an_ambiguous_submission_blocks_its_run_until_a_finding_is_stated(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        pass  # as if it had died here: no receipt
    second = intent(submission_id="run.a2")
    with pytest.raises(EvidenceError, match="may or may not run it"), ledger.claim(second):
        pass
    with ledger.claim(intent("other", "other.a1")):
        pass  # another run is not concerned
    ledger.resolve("run", "run.a1", "absent", "ray job list shows none")
    assert ledger.entry("run", "run.a1").standing == "absent"
    with ledger.claim(second) as claimed:
        ledger.record(claimed, {"job": "run.a2"})
    assert [entry.standing for entry in ledger.entries("run")] == ["absent", "submitted"]
    with pytest.raises(ConfigurationError, match="found to have submitted nothing"):
        ledger.claim(intent()).__enter__()


def test_what_was_found_at_the_provider_counts_as_submitted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        pass
    ledger.resolve("run", "run.a1", "present", "modal app list", {"call": "fc-1"})
    entry = ledger.entry("run", "run.a1")
    assert entry.standing == "submitted" and entry.calls == {"call": "fc-1"}
    with pytest.raises(ConfigurationError, match="fc-1"), ledger.claim(intent()):
        pass


def test_a_living_launcher_is_under_way_and_not_ambiguous(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        assert ledger.entry("run", "run.a1").held
        with pytest.raises(ConfigurationError, match="is being submitted") as refused:
            ledger.claim(intent()).__enter__()
        assert f"process {os.getpid()}" in str(refused.value)
        with pytest.raises(ConfigurationError, match="is not ambiguous"):
            ledger.resolve("run", "run.a1", "absent", "I say so")
        with pytest.raises(CampaignError, match="another process has been submitting"):
            ledger.await_settled("run", "run.a1", 0.2)
    assert not ledger.await_settled("run", "run.a1", 0.2).held


@pytest.mark.parametrize(
    ("finding", "reason", "calls"),
    [("absent", " ", None), ("present", "seen", None), ("absent", "none", {"call": "fc-1"})],
)
def test_an_incomplete_finding_is_refused(tmp_path: Path, finding, reason, calls) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        pass
    with pytest.raises(ConfigurationError, match="needs a reason"):
        ledger.resolve("run", "run.a1", finding, reason, calls)
    assert ledger.entry("run", "run.a1").standing == "ambiguous"


def test_a_receipt_belongs_to_its_intent_and_is_written_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()) as claimed:
        ledger.record(claimed, {"job": "run.a1"})
        with pytest.raises(EvidenceError, match="never overwritten"):
            ledger.record(claimed, {"job": "another"})
    path = tmp_path / "run" / "run.a1" / "intent.json"
    path.write_bytes(path.read_bytes().replace(b"head", b"heap"))
    with pytest.raises(EvidenceError, match="of another intent"):
        ledger.entries("run")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        pass
    path = tmp_path / "run" / "run.a1" / "receipt.json"
    path.write_text("{")
    with pytest.raises(EvidenceError, match="not a valid record") as refused:
        ledger.require_settled("run")
    assert refused.value.where == str(path)


@given(st.text(max_size=20).filter(lambda text: not text.isidentifier()))
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    if all(c.isascii() and (c.isalnum() or c in "._-") for c in name) and name[:1].isalnum():
        return
    with pytest.raises(ConfigurationError, match="can't be a run id"):
        Ledger(Path("nowhere")).entries(name)


@given(st.integers(1, 10**6))
def test_an_attempt_has_its_number_in_its_name(attempt: int) -> None:
    assert attempt_of(submission_name("run.a7", attempt)) == attempt


def test_an_ambiguous_submission_can_be_taken_up_by_its_own_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "_CLAIM_WAIT_S", 0.1)
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        entry = ledger.entry("run", "run.a1")
        with pytest.raises(ConfigurationError, match="is being submitted"):
            ledger.reclaim(entry).__enter__()
    with ledger.reclaim(entry) as taken_up:
        assert taken_up == entry.intent
        assert ledger.entry("run", "run.a1").held
        ledger.record(taken_up, {"job": "run.a1"})
    with pytest.raises(ConfigurationError, match="has a receipt already"):
        ledger.reclaim(entry).__enter__()


def test_what_was_found_absent_is_not_taken_up_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.claim(intent()):
        pass
    entry = ledger.entry("run", "run.a1")
    ledger.resolve("run", "run.a1", "absent", "nobody has it")
    with pytest.raises(ConfigurationError, match="found to have submitted nothing"):
        ledger.reclaim(entry).__enter__()
