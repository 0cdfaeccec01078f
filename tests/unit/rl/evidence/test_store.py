"""A state directory is listed and proven as it is, with one damaged file hiding no other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.errors import EvidenceError
from rl.evidence.archive import REMOVING, archive
from rl.evidence.archive_read import RESTORING, restore
from rl.evidence.frames import count_frames
from rl.evidence.layout import CampaignDir
from rl.evidence.store import RunRow, Store, survey_store
from rl.evidence.store_check import StoreCheck, StoreChecker, whole_store
from rl.evidence.traces import TraceWriter, read_frames, repair
from rl.learner.checkpoint import verify as verify_checkpoint
from tests.support.checkpoints import save
from tests.unit.rl.evidence.synthetic import build


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with one run of each kind, some unfinished, and caches."""
    state = tmp_path_factory.mktemp("origin") / "state"
    finished = build(state / "campaigns")
    save(finished.checkpoints, 1)
    build(state / "heldout", finish=False)
    (state / "screens" / "refused").mkdir(parents=True)
    (state / "models" / "tiny").mkdir(parents=True)
    (state / "models" / "tiny" / "broken.json").write_text("{")  # a cache: not evidence
    (state / "receipts").mkdir()
    (state / "receipts" / "job-1.json").write_text("{}")
    (state / "strange").mkdir()
    return state


@pytest.fixture
def state(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "state"))


def campaign(state: Path) -> CampaignDir:
    (path,) = (state / "campaigns").glob("local-*")
    return CampaignDir(path)


def rows(store: Store) -> dict[str, RunRow]:
    return {row.kind: row for row in store.runs}


def check(*paths: Path) -> StoreCheck:
    def checkpoint(path: Path) -> str:
        verify_checkpoint(path)
        return ""

    def cohort(path: Path) -> str:
        raise EvidenceError("no valid manifest", str(path))

    return StoreChecker(checkpoint, cohort).check(paths)


def test_every_run_has_its_row(state: Path) -> None:
    found = rows(survey_store(state))
    done = found["campaigns"]
    assert (done.status, done.stage, done.findings, done.checkpoints) == ("finished", "done", 0, 1)
    assert done.graded == {"train": 71, "heldout": 48} and done.failed == 1
    assert done.begun == 1_780_304_400.0 and done.archived == "no" and not done.problems
    part = found["heldout"]
    assert (part.status, part.stage, part.findings) == ("unfinished", "train", None)
    none = found["screens"]
    assert (none.status, none.run_id, none.begun, none.graded) == (
        "not frozen",
        "refused",
        None,
        {},
    )


def test_folders_say_whether_they_can_be_made_again(state: Path) -> None:
    keep = {row.name: row.keep for row in survey_store(state).folders}
    assert keep == {
        "campaigns": "irreplaceable",
        "heldout": "irreplaceable",
        "models": "can be made again",
        "receipts": "irreplaceable",
        "screens": "irreplaceable",
        "strange": "not known",
    }


def test_a_run_that_is_written_is_running(state: Path) -> None:
    with TraceWriter(campaign(state).failed_trace):
        assert rows(survey_store(state))["campaigns"].status == "running"
    assert rows(survey_store(state))["campaigns"].status == "finished"


def test_what_is_archived_is_told(state: Path) -> None:
    directory = campaign(state)
    made = archive(directory.root, state)
    store = survey_store(state)
    assert rows(store)["campaigns"].archived == "yes"
    (row,) = store.archives
    assert (row.name, row.original, row.problem) == (made.path.name, "in place", "")
    (directory.root / "late.txt").write_text("x")
    assert rows(survey_store(state))["campaigns"].archived == "changed since"
    shutil.rmtree(directory.root)
    store = survey_store(state)
    assert store.archives[0].original == "removed" and "campaigns" not in rows(store)
    restore(made.path, state)
    assert rows(survey_store(state))["campaigns"].archived == "yes"


def test_damaged_archives_are_listed_with_their_problem(state: Path) -> None:
    one, two, three = (archive(campaign(state).root, state) for _ in range(3))
    os.truncate(one.path, 100)
    two.path.unlink()
    three.sidecar.write_text("{")
    problems = {row.name: row.problem.split(":")[0] for row in survey_store(state).archives}
    assert problems == {
        one.path.name: "has another size than its manifest says",
        two.path.name: "is gone",
        three.path.name: three.sidecar.name,
    }


def test_leftovers_of_a_cut_off_removal_are_named(state: Path) -> None:
    for name in (f"{REMOVING}run-1", f"{RESTORING}run-2"):
        (state / "campaigns" / name).mkdir()
    store = survey_store(state)
    assert [Path(path).name for path in store.left_over] == [
        f"{REMOVING}run-1",
        f"{RESTORING}run-2",
    ]
    assert len(store.runs) == 3
    notes = check(*whole_store(state)).notes
    assert sum("cut off" in note for note in notes) == 2


def test_unreadable_files_hide_nothing(state: Path) -> None:
    directory = campaign(state)
    directory.frozen.write_text("{")
    directory.audit.write_text("[")
    with directory.events.open("ab") as file:
        file.write(b'{"kind":"stage"')
    os.truncate(directory.trace("train"), directory.trace("train").stat().st_size - 1)
    row = rows(survey_store(state))["campaigns"]
    assert row.graded["train"] == 70 and row.bytes > 0
    named = [problem.split(":")[0] for problem in row.problems]
    assert named == ["frozen.json", "audit.json", "events.jsonl", "train.jsonl.zst"]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    contents=st.lists(st.one_of(st.binary(max_size=300), st.just(b"a" * 300_000)), max_size=5),
    checksum=st.booleans(),
    known=st.booleans(),
    cut=st.integers(0, 30),
)
def test_counted_frames_are_the_frames(
    contents: list[bytes], checksum: bool, known: bool, cut: int, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl.zst"
    packer = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=known)
    frames = [packer.compress(content) for content in contents]
    whole = b"".join(frames)
    path.write_bytes(whole[: len(whole) - min(cut, len(frames[-1]) if frames else 0)])
    count, rest = count_frames(path)
    if cut == 0 or not frames:
        assert (count, rest) == (len(frames), 0)
        assert count == sum(1 for _ in read_frames(path))
    else:
        assert count == len(frames) - 1
        assert rest == max(0, len(frames[-1]) - cut)


def test_a_whole_store_has_no_findings(state: Path) -> None:
    archive(campaign(state).root, state)
    before = {path: path.lstat().st_mtime_ns for path in state.rglob("*")}
    result = check(*whole_store(state))
    assert result.findings == []
    assert result.checked["trace"] == 5 and result.checked["archive"] == 1
    assert result.checked["episode"] == 71 + 48 + 1 + 35 + 1
    assert result.checked["checkpoint"] == 1
    assert {path: path.lstat().st_mtime_ns for path in state.rglob("*")} == before


def torn_trace(run: CampaignDir) -> Path:
    os.truncate(run.trace("train"), run.trace("train").stat().st_size - 3)
    return run.trace("train")


def damaged_trace(run: CampaignDir) -> Path:
    content = bytearray(run.trace("train").read_bytes())
    content[200] ^= 0xFF
    run.trace("train").write_bytes(content)
    return run.trace("train")


def torn_events(run: CampaignDir) -> Path:
    with run.events.open("ab") as file:
        file.write(b'{"time":')
    return run.events


def foreign_row(run: CampaignDir) -> Path:
    with run.metrics.open("ab") as file:
        file.write(b"{}\n")
    return run.metrics


def torn_superseded(run: CampaignDir) -> Path:
    run.superseded.write_bytes(b'{"update": 1}\n{"upd')
    return run.superseded


def wrong_digest(run: CampaignDir) -> Path:
    frozen = json.loads(run.frozen.read_text())
    frozen["config"]["seed"] += 1
    run.frozen.write_text(json.dumps(frozen))
    return run.frozen


def cut_gates(run: CampaignDir) -> Path:
    os.truncate(run.gates, 40)
    return run.gates


def cut_summary(run: CampaignDir) -> Path:
    os.truncate(run.summary, 40)
    return run.summary


def altered_checkpoint(run: CampaignDir) -> Path:
    file = run.checkpoints / "update-0001" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    return file


def cut_snapshot(run: CampaignDir) -> Path:
    path = run.root / "source.tar.zst"
    path.write_bytes(zstandard.compress(b"sources" * 100)[:-5])
    return path


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (torn_trace, "torn-trace"),
        (damaged_trace, "damaged-trace"),
        (torn_events, "damaged-json-lines"),
        (foreign_row, "damaged-json-lines"),
        (torn_superseded, "damaged-json-lines"),
        (wrong_digest, "damaged-json"),
        (cut_gates, "damaged-json"),
        (cut_summary, "damaged-json"),
        (altered_checkpoint, "damaged-checkpoint"),
        (cut_snapshot, "damaged-archive"),
    ],
)
def test_damage_is_named_with_its_file(
    state: Path, damage: Callable[[CampaignDir], Path], code: str
) -> None:
    file = damage(campaign(state))
    (finding,) = check(*whole_store(state)).findings
    assert finding.code == code
    assert str(file) in finding.where
    assert check(file if "checkpoint" not in code else file.parent).findings == [finding]


def test_a_torn_trace_says_what_repairs_it(state: Path) -> None:
    file = torn_trace(campaign(state))
    (finding,) = check(file).findings
    assert "torn after record 70" in finding.message and "resume" in finding.message
    repair(file)
    assert check(file).findings == []


def test_a_torn_tail_under_a_writer_is_no_finding(state: Path) -> None:
    directory = campaign(state)
    with TraceWriter(directory.failed_trace):
        torn_events(directory)
        assert check(directory.root).findings == []
    assert len(check(directory.root).findings) == 1


def test_several_damages_are_all_named(state: Path) -> None:
    directory = campaign(state)
    files = [torn_trace(directory), foreign_row(directory), cut_gates(directory)]
    made = archive(CampaignDir(state / "receipts").root, state)
    os.truncate(made.path, made.path.stat().st_size - 1)
    lonely = archive(CampaignDir(state / "receipts").root, state)
    lonely.path.unlink()
    unnamed = archive(CampaignDir(state / "receipts").root, state)
    unnamed.sidecar.unlink()
    (state / "cohorts").mkdir()
    (state / "cohorts" / "c.json").write_text("{}")
    result = check(*whole_store(state))
    wrong = " ".join(finding.where for finding in result.findings)
    expected = [*files, made.path, lonely.sidecar, state / "cohorts" / "c.json"]
    assert all(str(path) in wrong for path in expected)
    assert len(result.findings) == len(expected)
    assert any(str(unnamed.path) in note for note in result.notes)
