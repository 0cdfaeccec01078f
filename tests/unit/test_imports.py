"""Imports run one way, and what must be cheap to import is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS: dict[str, str] = PROJECT["project"]["scripts"]
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
HEAVY = ("ray", "torch", "transformers", "peft", "harbor", "vllm", "modal", "datasets")
TIMEOUT_S = 120.0  # a first import without bytecode on a busy machine


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def loaded_after(code: str, watched: tuple[str, ...]) -> list[str]:
    """Which of `watched` a fresh interpreter has loaded after `code`."""
    report = f"\nimport sys\nprint(' '.join(m for m in {watched!r} if m in sys.modules))"
    done = run_python(code + report)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_import_contracts_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(command), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_cover_every_module() -> None:
    children = {
        f"rl.{path.stem}"
        for path in (ROOT / "rl").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
    layers = re.findall(r"[a-z_.]+", " ".join(CONTRACTS["direction"]["layers"]))
    assert set(layers) == children | {"actors", "sandboxes", "benchmarks"}
    others = set(layers) - {"rl.learner"}
    assert set(CONTRACTS["torch"]["source_modules"]) == others


@pytest.mark.parametrize(
    "module",
    [
        "rl.campaign",
        *(f"actors.{path.stem}" for path in sorted((ROOT / "actors").glob("[a-z]*.py"))),
    ],
)
def test_only_the_learner_loads_torch(module: str) -> None:
    assert loaded_after(f"import {module}", ("torch", "peft", "vllm")) == []


@pytest.mark.parametrize("module", ["rl.config", "rl.records", "rl.errors"])
def test_base_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}", HEAVY) == []


def test_every_command_has_a_script() -> None:
    modules = {target.partition(":")[0] for target in SCRIPTS.values()}
    commands = {
        f"rl.{path.stem}"
        for path in (ROOT / "rl").glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert modules == commands


@pytest.mark.parametrize("target", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_help_is_cheap(target: str) -> None:
    module, _, function = target.partition(":")
    code = f"""
import sys
sys.argv = [{module!r}, "--help"]
from {module} import {function}
try:
    {function}()
except SystemExit as end:
    assert not end.code, end.code
else:
    raise AssertionError("the command returned")
"""
    assert loaded_after(code, HEAVY) == []


@pytest.mark.parametrize("target", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_module_runs_as_a_command(target: str) -> None:
    module = target.partition(":")[0]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m {module}" in done.stdout
