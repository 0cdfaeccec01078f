"""Compare a working directory with what is expected of it, and leave the reward.

Invariants:
- Nothing of the agent's is running when the first expectation is looked at.
- What is expected is read, then removed from disk, before any of the agent's code runs.
- The reward file is new: whatever lay at its place is removed, links unfollowed.
- A wrong outcome is a reward of 0; an error of this program leaves no reward.
- What most tasks don't need is loaded where it is needed: an attempt at a small task
  costs little more than the start of Python.
"""

from __future__ import annotations

import os
import stat
import sys

from .files import SHOWN
from .processes import end_others

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKDIR = "/app"
REWARDS = "/logs/verifier"


def main() -> None:
    """Check everything, say what failed, write the reward."""
    end_others()
    expectations = take_expectations()
    for folder in (TESTS, REWARDS):
        make_private(folder)
    write_reward(0)  # should a program of the agent's end this one, that is its result
    try:
        failures = list(failures_of(expectations))
    except BaseException:
        clear_rewards()
        raise
    for failure in failures:
        sys.stdout.write(f"failed: {failure}\n")
    write_reward(0 if failures else 1)


def failures_of(expectations: list[dict[str, Any]]) -> Iterator[str]:
    """What does not hold in the working directory, one line each."""
    try:
        os.chdir(WORKDIR)
    except OSError as error:
        yield f"{WORKDIR}: {error}"
        return
    for item in expectations:
        problem = problem_of(item)
        if problem:
            yield f"{item['kind']} {item.get('path', '')}: {problem}"


def problem_of(expectation: dict[str, Any]) -> str:
    """What is wrong with one expectation; empty if it holds.

    Its kind is `module.function`: only what a task needs is loaded.
    """
    arguments = dict(expectation)
    module, function = arguments.pop("kind").split(".")
    name = f"{__package__}.{module}"
    __import__(name)
    theme: Any = sys.modules[name]
    try:
        return getattr(theme, function)(**arguments) or ""
    except theme.WRONG as error:
        return f"{type(error).__name__}: {str(error)[:SHOWN]}"


def take_expectations() -> list[dict[str, Any]]:
    """Load what is expected, and remove it."""
    expected = __import__("expected")  # beside this package, as much its own as this file
    os.unlink(os.path.join(TESTS, "expected.py"))
    return expected.EXPECTED


def make_private(path: str) -> None:
    """Make `path` a directory of this user's alone to write in."""
    if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o755)


def clear_rewards() -> None:
    """Remove whatever stands where a reward is looked for."""
    for name in ("reward.json", "reward.txt"):
        path = os.path.join(REWARDS, name)
        if os.path.isdir(path) and not os.path.islink(path):
            import shutil

            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


def write_reward(reward: int) -> None:
    """Leave `reward` as the only one."""
    clear_rewards()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(os.path.join(REWARDS, "reward.txt"), flags, 0o644), "w") as handle:
        handle.write(f"{reward}\n")
