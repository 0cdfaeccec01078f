"""Each thing that is wrong with a released dataset is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from rl.errors import EvidenceError
from rl.evidence.dataset.build import Request, build
from rl.evidence.dataset.check import Checker
from rl.evidence.dataset.schema import arrow_schema
from rl.evidence.dataset.scrub import Scrubber
from rl.files import sha256_file
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.canaries import CANARIES
from tests.unit.rl.evidence.dataset.material import json_rows

TRAIN = "data/episodes/train-00000-of-00001.parquet"
TRAIN_LINES = "data/jsonl/train-00000-of-00001.jsonl.zst"
EVAL = "data/episodes/eval-00000-of-00001.parquet"
SECRET = dict(CANARIES)["github-token"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    build([synthetic.build(root)], root / "out", Request(sft=True, preferences=True))
    return root / "out"


@pytest.fixture
def dataset(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "dataset")


def found(root: Path, scrubber: Scrubber | None = None) -> list[tuple[str, str, str]]:
    findings = Checker(root, scrubber or Scrubber()).findings()
    return [(finding.code, finding.where, finding.message) for finding in findings]


def seal(root: Path) -> None:
    """Make the manifest agree with the files, as somebody would who edits on purpose."""
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        if (root / name).exists():
            entry.update(sha256=sha256_file(root / name), bytes=(root / name).stat().st_size)
    path.write_text(json.dumps(manifest))


def edit_parquet(root: Path, name: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    rows = pq.read_table(root / name).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema("episodes")), root / name)


def edit_lines(root: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    rows = json_rows(root, "train")
    change(rows)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (root / TRAIN_LINES).write_bytes(zstandard.ZstdCompressor().compress(text.encode()))


def edit_both(root: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    edit_parquet(root, TRAIN, change)
    edit_lines(root, change)


def edit_card(root: Path, old: str, new: str) -> None:
    text = (root / "README.md").read_text()
    assert old in text
    (root / "README.md").write_text(text.replace(old, new))


def update(number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[number].update(fields)


def leak(root: Path) -> None:
    other = json_rows(root, "eval")[0]["task_digest"]
    edit_both(root, update(3, task_digest=other))


def other_type(root: Path) -> None:
    table = pq.read_table(root / TRAIN)
    at = table.column_names.index("reward")
    table = table.set_column(at, "reward", table["reward"].cast(pa.float32()))
    pq.write_table(table, root / TRAIN)


def other_columns(root: Path) -> None:
    table = pq.read_table(root / TRAIN).drop_columns(["reward"])
    pq.write_table(table.append_column("mood", pa.nulls(len(table), pa.string())), root / TRAIN)


def change_count(root: Path) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sets"]["sft"]["train"]["rows"] += 1
    path.write_text(json.dumps(manifest))


def short_sample(rows: list[dict[str, Any]]) -> None:
    rows[0]["samples"][0]["logprobs"].pop()


CASES: list[tuple[str, str, str, Callable[[Path], object]]] = [
    ("missing-file", EVAL, "not there", lambda r: (r / EVAL).unlink()),
    ("missing-file", "README.md", "not there", lambda r: (r / "README.md").unlink()),
    ("extra-file", "data/notes.txt", "not in", lambda r: (r / "data/notes.txt").write_text("x")),
    ("row-count", f"{TRAIN_LINES} row 71", "more rows", lambda r: edit_lines(r, list.pop)),
    ("row-count", TRAIN, "70 rows, the manifest says 71", lambda r: edit_both(r, list.pop)),
    ("row-count", "manifest.json sft train", "37 rows, the set has 38", change_count),
    (
        "rows-differ",
        f"{TRAIN_LINES} row 5",
        "column reward",
        lambda r: edit_lines(r, update(4, reward=0.5)),
    ),
    ("other-schema", TRAIN, "reward is float", other_type),
    ("other-schema", TRAIN, "reward is missing; column mood is not documented", other_columns),
    ("leaked-task", "task ", "train and in eval", leak),
    (
        "wrong-split",
        f"{TRAIN} row 1",
        "stage heldout",
        lambda r: edit_both(r, update(0, stage="heldout")),
    ),
    ("unequal-lengths", f"{TRAIN} row 1", "differ", lambda r: edit_both(r, short_sample)),
    (
        "secret",
        f"{TRAIN} row 2",
        "1 of kind github-token",
        lambda r: edit_both(r, update(1, verifier_log=f"x {SECRET}")),
    ),
    (
        "secret",
        "README.md",
        "github-token",
        lambda r: edit_card(r, "# Terminal agent", f"{SECRET} # Terminal agent"),
    ),
    (
        "bad-card",
        "README.md configuration episodes split train",
        "no file matches",
        lambda r: edit_card(r, "data/episodes/train-*", "data/episodes/tarin-*"),
    ),
    (
        "bad-card",
        "README.md configuration episodes split train",
        f"takes {EVAL} as well",
        lambda r: edit_card(r, "data/episodes/train-*", "data/episodes/*"),
    ),
    ("bad-card", "README.md", "no YAML header", lambda r: edit_card(r, "---\nlicense", "license")),
    ("bad-card", "README.md", "no YAML", lambda r: edit_card(r, "license:", "license: [:")),
    ("damaged-file", TRAIN, "no readable Parquet", lambda r: (r / TRAIN).write_bytes(b"PAR1")),
    (
        "damaged-file",
        TRAIN_LINES,
        "stands behind",
        lambda r: (r / TRAIN_LINES).write_bytes((r / TRAIN_LINES).read_bytes() + b"x"),
    ),
    (
        "damaged-file",
        TRAIN_LINES,
        "can't be read: it is cut off",
        lambda r: (r / TRAIN_LINES).write_bytes((r / TRAIN_LINES).read_bytes()[:-40]),
    ),
]


def test_a_fresh_export_has_no_findings(dataset: Path) -> None:
    (dataset / ".gitattributes").write_text("the Hub's own")
    assert found(dataset) == []


@pytest.mark.parametrize(
    ("code", "where", "message", "change"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)]
)
def test_what_is_wrong_is_found_and_named(
    dataset: Path, code: str, where: str, message: str, change: Callable[[Path], object]
) -> None:
    change(dataset)
    seal(dataset)
    findings = found(dataset)
    named = [f for f in findings if f[0] == code and f[1].startswith(where)]
    assert any(message in said for _, _, said in named), findings
    assert SECRET not in str(findings)


@pytest.mark.parametrize("name", [TRAIN, TRAIN_LINES, "README.md"])
def test_a_changed_byte_is_found(dataset: Path, name: str) -> None:
    data = bytearray((dataset / name).read_bytes())
    data[len(data) // 2] ^= 1
    (dataset / name).write_bytes(data)
    assert ("changed-file", name, "has not the sha256 of the manifest") in found(dataset)
    (dataset / name).write_bytes(data[:-1])
    assert found(dataset)[0][2].startswith(f"has {len(data) - 1} bytes")


def test_many_findings_of_a_kind_are_summed_up(dataset: Path) -> None:
    edit_lines(dataset, lambda rows: [row.update(reward=7.0) for row in rows])
    seal(dataset)
    findings = found(dataset)
    assert len(findings) == 21
    assert findings[-1] == ("rows-differ", TRAIN, "and 51 more of this kind")


def test_known_secrets_are_looked_for(dataset: Path) -> None:
    assert ("secret", f"{TRAIN} row 1") in [f[:2] for f in found(dataset, Scrubber({"mkdir": "x"}))]


def test_a_directory_without_a_manifest_is_refused(dataset: Path) -> None:
    (dataset / "manifest.json").write_text('{"files": 1}')
    with pytest.raises(EvidenceError, match="not a valid manifest"):
        Checker(dataset, Scrubber())
    (dataset / "manifest.json").unlink()
    with pytest.raises(EvidenceError, match="no exported dataset, or it is not whole"):
        Checker(dataset, Scrubber())
