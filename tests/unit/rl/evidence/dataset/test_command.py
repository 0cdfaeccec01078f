"""The command refuses in one message, and says what it did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl import dataset as command
from rl.errors import run_command
from rl.evidence.dataset import chat_sets, writing
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.material import json_rows
from tests.unit.rl.evidence.evaluations import build_screen


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synthetic.build(tmp_path_factory.mktemp("campaign")).root)


def code_of(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        run_command(command.main, argv)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_build_then_verify(
    campaign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert code_of(["build", campaign, "--out", str(out), "--sft", "--preferences"]) == 0
    said = capsys.readouterr().out
    assert "episodes     train 71, eval 48 rows" in said
    assert "secrets      none found" in said
    assert code_of(["verify", str(out)]) == 0
    assert "no findings; 7 files, 168 rows" in capsys.readouterr().out
    (out / "extra").write_text("x")
    assert code_of(["verify", str(out)]) == 2
    assert "extra-file: extra: is not in the manifest\n" in capsys.readouterr().out
    assert code_of(["verify", str(out), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "extra-file"


def test_a_screen_is_exported_as_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert code_of(["build", str(build_screen(tmp_path).root), "--out", str(out)]) == 0
    assert "episodes     eval 32 rows" in capsys.readouterr().out
    assert code_of(["verify", str(out)]) == 0


def test_options_reach_the_export(
    campaign: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET", "mkdir -p mkdir-train-00")
    listed = tmp_path / "listed"
    listed.write_text("command not found\n")
    argv = ["build", campaign, "--out", str(tmp_path / "out"), "--with-failed", "--json"]
    argv += ["--secrets", str(listed), "--license", "apache-2.0", "--preferences"]
    assert code_of([*argv, "--pairs-per-group", "1", "--shard-mb", "1"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["options"]["license"] == "apache-2.0"
    assert set(manifest["scrubbed"]) == {"environment", "listed"}
    assert manifest["rows_without_tokens"] > 0
    assert "license: apache-2.0\n" in (tmp_path / "out/README.md").read_text()
    assert {row["outcome"] for row in json_rows(tmp_path / "out", "train")} == {"graded", "masked"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["build", "nowhere", "--out", "out"], "nowhere: no such directory"),
        (["build", __file__, "--out", "out"], "is a file"),
        (["verify", "nowhere"], "nowhere/manifest.json: missing"),
        (["build", ".", "--out", "out"], "holds no frozen.json"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    argv: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert code_of(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "\n  -> " in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--shard-mb", "0"],
        ["--pairs-per-group", "x"],
        ["--shard-mb", "nan"],
        ["--license", "x\ny: 1"],
    ],
)
def test_numbers_are_checked(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["build", "c", "--out", "o", *argv]) == 2
    assert f"argument {argv[0]}:" in capsys.readouterr().err


def test_defaults_are_those_of_the_export() -> None:
    assert command.DEFAULT_PAIRS == chat_sets.DEFAULT_PAIRS_PER_GROUP
    assert command.DEFAULT_SHARD_MB * command.MIB == writing.DEFAULT_SHARD_BYTES


@pytest.mark.parametrize("argv", [["--help"], ["build", "--help"], ["verify", "--help"]])
def test_help_loads_no_library(argv: list[str]) -> None:
    code = f"""
import sys
from rl.dataset import main
try:
    main({argv!r})
except SystemExit as end:
    assert end.code == 0
assert not {{"pyarrow", "datasets", "torch", "pydantic", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m rl.dataset" in done.stdout
