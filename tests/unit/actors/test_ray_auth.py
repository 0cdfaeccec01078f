"""The token of Ray's authentication: there, private, and made once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actors.ray_auth import create_token, use_tokens
from rl.errors import ConfigurationError

ROOT = Path(__file__).parents[3]

# Makers that start at once, as launchers on a fresh machine do.
RACE = """
import os, sys
from pathlib import Path
from actors.ray_auth import create_token
path = Path(sys.argv[1])
ready, go = os.pipe()
children = []
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        create_token(path)
        os.write(1, path.read_bytes() + b" ")
        os._exit(0)
    children.append(pid)
os.close(ready)
os.close(go)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.fixture(autouse=True)
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_fresh_machine_gets_a_private_token(fresh_home: Path) -> None:
    use_tokens()
    path = fresh_home / ".ray" / "auth_token"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert mode(path) == 0o600 and len(path.read_text()) == 64
    before = path.read_text()
    use_tokens()
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["auth_token"]


def test_a_token_that_others_may_read_is_taken_from_them(fresh_home: Path) -> None:
    path = fresh_home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("a" * 64)
    path.chmod(0o644)
    use_tokens()
    assert mode(path) == 0o600 and path.read_text() == "a" * 64


def test_what_the_person_has_set_is_left(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_tokens()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    use_tokens()
    assert not (fresh_home / ".ray").exists()


def test_a_named_token_file_must_be_there(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(fresh_home / "gone"))
    with pytest.raises(ConfigurationError, match="no such token file"):
        use_tokens()
    assert not (fresh_home / "gone").exists()


def test_of_many_makers_one_makes_it_and_all_see_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "auth_token"
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {path.read_text()}
    assert mode(path) == 0o600 and [entry.name for entry in path.parent.iterdir()] == [path.name]
    create_token(path)  # as one that comes late
    assert path.read_text() in done.stdout
