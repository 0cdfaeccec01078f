"""Attempts to get out of a local sandbox, as root on the host and as an ordinary user.

Each runs in real sandboxes, in a process of its own per user (`tests.support.escape_run`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.escapes import DENIED, HARMS

ROOT = Path(__file__).resolve().parents[2]
ORDINARY_USER = 65534
USERS = (0, ORDINARY_USER) if os.geteuid() == 0 else (os.geteuid(),)
RUN_LIMIT_S = 240.0

type Results = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Generator[Results]:
    """Every attempt's outcome by user; both run at once."""
    command = [sys.executable, "-m", "tests.support.escape_run"]
    runs = {
        user: subprocess.Popen(
            [*command, str(user)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for user in USERS
    }
    try:
        found: Results = {}
        for user, run in runs.items():
            out, err = run.communicate(timeout=RUN_LIMIT_S)
            assert run.returncode == 0, err
            found[user] = json.loads(out)
        yield found
    finally:
        for run in runs.values():
            run.kill()
            run.wait()


@pytest.mark.parametrize("name", DENIED)
@pytest.mark.parametrize("user", USERS)
def test_escape_is_denied_and_the_sandbox_stays_usable(
    results: Results, user: int, name: str
) -> None:
    assert results[user]["found"][name] == ""


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.parametrize("user", USERS)
def test_harm_stays_inside_and_is_graded_0(results: Results, user: int, name: str) -> None:
    assert results[user]["found"][name] == ""


@pytest.mark.parametrize("user", USERS)
def test_sandbox_says_which_limits_are_in_force(results: Results, user: int) -> None:
    limits = results[user]["limits"]
    assert limits["nested user namespaces"] == "denied"
    assert limits["memory"].startswith(("cgroup: ", "watched: "))
    assert ("RLIMIT_AS" in limits["each process"]) == limits["memory"].startswith("watched")
    if user != 0:
        assert limits["ids"].startswith("one user id")
