from pathlib import Path

import pytest

from rl.errors import EvidenceError
from rl.evidence.events import EventLog, read_events
from rl.evidence.lines import JsonLines
from rl.evidence.rows import TrainedGroup, UpdateRow


def row(update: int) -> UpdateRow:
    group = TrainedGroup(group_id="g", version=0, attempt_ids=["a"])
    return UpdateRow(update=update, groups=[group])


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "u.jsonl", UpdateRow)
    assert lines.read() == []
    for update in (1, 2):
        lines.append(row(update))
    assert lines.read() == [row(1), row(2)]


def test_a_torn_row_is_reported_repaired_and_never_appended_to(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "u.jsonl", UpdateRow)
    lines.append(row(1))
    with lines.path.open("a") as file:
        file.write('{"upd')
    with pytest.raises(EvidenceError, match="torn"):
        lines.read()
    with pytest.raises(EvidenceError, match="torn"):
        lines.append(row(2))
    assert lines.read(live=True) == [row(1)]
    assert lines.repair() == 5
    lines.append(row(2))
    assert lines.read() == [row(1), row(2)]


def test_repair_reads_back_over_many_blocks(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "u.jsonl", UpdateRow)
    lines.append(row(1))
    with lines.path.open("a") as file:
        file.write("x" * 200_000)
    assert lines.repair() == 200_000
    assert lines.read() == [row(1)]


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "u.jsonl", UpdateRow)
    lines.append(row(1))
    with lines.path.open("a") as file:
        file.write('{"update": "x"}\n')
    with pytest.raises(EvidenceError) as caught:
        lines.read()
    assert caught.value.where.endswith("u.jsonl:2")
    assert "update" in caught.value.what


def test_events_keep_time_kind_and_fields(tmp_path: Path) -> None:
    clock = iter([1.0, 2.5])
    log = EventLog(tmp_path / "e.jsonl", clock=lambda: next(clock))
    log.stage("gates")
    log.append("publish", version=1, seconds=0.5, parts={"0": {"load": 0.1}})
    first, second = read_events(tmp_path / "e.jsonl")
    assert (first.time, first.kind, first.fields) == (1.0, "stage", {"stage": "gates"})
    assert (second.time, second.fields["parts"]) == (2.5, {"0": {"load": 0.1}})
