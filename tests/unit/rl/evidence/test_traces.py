import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from rl.errors import EvidenceError
from rl.evidence.traces import TornTraceError, TraceWriter, read_traces, repair
from tests.unit.rl.evidence.synthetic import episode, task


def records(count: int) -> list:
    return [episode(f"a{n}", "g", task("t", 0), 0, reward=float(n % 2)) for n in range(count)]


def write(path: Path, count: int = 3) -> list[int]:
    ends: list[int] = []
    with TraceWriter(path) as trace:
        for record in records(count):
            trace.append(record)
            ends.append(path.stat().st_size)
    return ends


def test_records_come_back_equal_and_in_order(tmp_path: Path) -> None:
    write(tmp_path / "t.zst")
    assert list(read_traces(tmp_path / "t.zst")) == records(3)


def test_a_missing_trace_has_no_records(tmp_path: Path) -> None:
    assert list(read_traces(tmp_path / "none.zst")) == []
    assert repair(tmp_path / "none.zst") == 0


def test_truncation_at_every_byte_loses_no_earlier_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # durability is not what is tested here
    ends = [0, *write(tmp_path / "whole.zst")]
    data = (tmp_path / "whole.zst").read_bytes()
    path = tmp_path / "cut.zst"
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends) - 1
        if size not in ends:
            with pytest.raises(TornTraceError, match=f"after record {whole}"):
                list(read_traces(path))
        assert list(read_traces(path, live=True)) == records(3)[:whole]
        assert repair(path) == size - ends[whole]
        assert list(read_traces(path)) == records(3)[:whole]


@pytest.mark.parametrize("junk", [b"\0" * 300, b"\x28\xb5\x2f\xfd", b"garbage"])
def test_junk_behind_the_last_record_is_a_torn_tail(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "t.zst"
    write(path)
    with path.open("ab") as file:
        file.write(junk)
    assert repair(path) == len(junk)
    assert list(read_traces(path)) == records(3)


def test_damage_in_the_middle_is_refused_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    ends = write(path)
    data = bytearray(path.read_bytes())
    data[ends[0] + 30] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match="record 2 is damaged"):
        repair(path)
    assert path.read_bytes() == data


def test_a_torn_trace_is_not_appended_to_until_repaired(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TornTraceError):
        TraceWriter(path)
    repair(path)
    with TraceWriter(path) as trace:
        assert trace.records == 2
        trace.append(records(3)[2])
    assert list(read_traces(path)) == records(3)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with (
        TraceWriter(tmp_path / "t.zst"),
        pytest.raises(EvidenceError, match="another process is writing"),
    ):
        TraceWriter(tmp_path / "t.zst")


def test_large_traces_cross_the_read_buffer(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    with TraceWriter(path) as trace:
        for n in range(40):
            log = random.Random(n).randbytes(10_000).hex()
            trace.append(episode(f"a{n}", "g", task("t", 0), 0, verifier_log=log))
    assert path.stat().st_size > 200_000
    assert [r.attempt_id for r in read_traces(path)] == [f"a{n}" for n in range(40)]


def raw(path: Path, text: str) -> None:
    path.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    text = records(1)[0].model_dump_json().replace('"schema_version":1', '"schema_version":2', 1)
    raw(tmp_path / "t.zst", text)
    with pytest.raises(EvidenceError, match="schema version 2 is unknown"):
        list(read_traces(tmp_path / "t.zst"))


@pytest.mark.parametrize("text", ["[]", "not json", '{"schema_version":1}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    raw(tmp_path / "t.zst", text)
    with pytest.raises(EvidenceError, match="record 1"):
        list(read_traces(tmp_path / "t.zst"))


def test_the_file_is_plain_zstandard_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "t.zst")
    with (tmp_path / "t.zst").open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        lines = reader.read().splitlines()
    assert [line.decode() for line in lines] == [r.model_dump_json() for r in records(3)]


def test_records_survive_a_killed_writer(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from rl.evidence.traces import TraceWriter\n"
        "from tests.unit.rl.evidence.synthetic import episode, task\n"
        "t = TraceWriter(Path(sys.argv[1]))\n"
        "for n in range(3): t.append(episode(f'a{n}', 'g', task('t', 0), 0, reward=float(n % 2)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.zst")], timeout=60, check=False)
    assert list(read_traces(tmp_path / "t.zst")) == records(3)
