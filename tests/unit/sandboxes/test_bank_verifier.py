"""What the bank's verifier accepts as an outcome, and what it does not."""

from __future__ import annotations

import ast
import inspect
import os
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sandboxes.bank import expect
from sandboxes.bank.verifier import archives, check, databases, files, programs, repositories

MODULES = (archives, databases, files, programs, repositories)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app").mkdir()
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.setattr("sandboxes.bank.verifier.scratch.TESTS", str(tmp_path))


def problem(expectation: expect.Expectation) -> str:
    """As after its way through the package's tests."""
    return check.problem_of(ast.literal_eval(ascii(expectation)))


def test_each_expectation_has_its_check() -> None:
    made: dict[str, Any] = {}
    for name, function in inspect.getmembers(expect, inspect.isfunction):
        if not name.startswith("_"):
            made[name] = inspect.signature(function)
    assert len(made) == 15
    found = {name for module in MODULES for name in made if hasattr(module, name)}
    assert found == set(made)


def test_lines_may_lack_the_last_newline_only() -> None:
    wanted = expect.text("a", "x\ny\n")
    for content, fits in (("x\ny\n", 1), ("x\ny", 1), ("x\ny\n\n", 0), ("x\r\ny\n", 0), ("x y", 0)):
        Path("a").write_bytes(content.encode())
        assert bool(problem(wanted)) != fits, content


def test_result_that_is_no_regular_file_is_wrong_and_holds_nobody(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x\n")
    Path("link").symlink_to(tmp_path / "real")
    Path("endless").symlink_to("/dev/zero")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("long").touch()
    os.truncate("long", files.LIMIT + 1)
    for name in ("link", "endless", "folder", "pipe", "long", "absent"):
        for wanted in (expect.text(name, "x"), expect.json_value(name, 1), expect.rows(name, [])):
            assert problem(wanted), name


def test_json_is_compared_with_types_but_without_order() -> None:
    Path("a").write_text('{"b": 1, "a": [true]}')
    assert not problem(expect.json_value("a", {"a": [True], "b": 1}))
    assert problem(expect.json_value("a", {"a": [1], "b": 1}))
    Path("a").write_text("[" * 100_000)
    assert "RecursionError" in problem(expect.json_value("a", []))


def test_csv_is_compared_by_its_fields() -> None:
    Path("a").write_bytes(b'a,"b, c"\r\n"1",2\r\n')
    assert not problem(expect.rows("a", [["a", "b, c"], ["1", "2"]]))
    assert problem(expect.rows("a", [["a", "b, c"], ["1", "3"]]))
    assert problem(expect.rows("a", [["a", "b, c"]]))


def test_names_finds_what_is_hidden_nested_or_a_link() -> None:
    Path("d/e").mkdir(parents=True)
    Path("d/e/.f").touch()
    Path("d/g").symlink_to("e")
    assert not problem(expect.names("d", ["e/.f", "g"]))
    Path("d/more").touch()
    assert "extra ['more']" in problem(expect.names("d", ["e/.f", "g"]))


def test_modes_and_links() -> None:
    Path("a").touch()
    Path("a").chmod(0o2750)
    Path("b").symlink_to("a")
    assert not problem(expect.mode("a", 0o2750))
    assert problem(expect.mode("a", 0o750))
    assert problem(expect.mode("b", 0o2750))
    assert not problem(expect.link("b", "a"))
    assert problem(expect.link("b", "./a"))
    assert problem(expect.link("a", "a"))
    assert problem(expect.absent("b"))


def test_database_is_asked_as_a_copy() -> None:
    with sqlite3.connect("a.db") as database:
        database.execute("CREATE TABLE t (x INTEGER PRIMARY KEY)")
        database.execute("INSERT INTO t VALUES (1)")
    before = Path("a.db").read_bytes()
    assert not problem(expect.query("a.db", "SELECT x FROM t", [[1]]))
    assert problem(expect.query("a.db", "SELECT x FROM t", []))
    assert not problem(expect.refused("a.db", "INSERT INTO t VALUES (1)"))
    assert problem(expect.refused("a.db", "INSERT INTO t VALUES (2)"))
    assert Path("a.db").read_bytes() == before
    Path("a.db").write_text("no database at all, but long enough to be looked at" * 20)
    assert "DatabaseError" in problem(expect.query("a.db", "SELECT x FROM t", [[1]]))


def test_archive_holds_these_files_and_no_link() -> None:
    Path("x").write_text("x")
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        archive.add("x", "./d/x")
    assert not problem(expect.members("a.tar.gz", {"d/x": "x"}))
    assert problem(expect.members("a.tar.gz", {"d/x": "y"}))
    Path("l").symlink_to("x")
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        archive.add("l", "d/x")
    assert "no regular file" in problem(expect.members("a.tar.gz", {"d/x": "x"}))
    Path("a.tar.gz").write_bytes(Path("a.tar.gz").read_bytes()[:-20])
    assert problem(expect.members("a.tar.gz", {"d/x": "x"}))
