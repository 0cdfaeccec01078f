"""One verifier run, and the reward it left.

Invariants:
- The verifier starts after every process of the agent is gone, over tests that
  were uploaded then and a reward file that did not exist before.
- The reward is read after every process of the verifier is gone too: what a
  background job of it writes later can't change what was read.
- Nothing that the agent could set reaches the verifier: its environment is made
  here, and its search path holds directories of /usr only.
- A reward that is missing, malformed or not finite is a `VerifierError`, never 0.
- An agent can't keep the verifier from running by what it did to the working
  directory: one that is gone, or is no directory, is an empty one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import cast

from harbor.environments.base import BaseEnvironment
from harbor.utils.env import resolve_env_vars

from rl.errors import InfrastructureError, TaskPackageError, VerifierError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.shells import cut_text
from sandboxes.tasks import TaskPackage

VERIFIER_DIR = "/logs/verifier"
TESTS_DIR = "/tests"
LOG_LIMIT = 32_768  # kept of the verifier's output, bytes
REWARD_LIMIT = 65_536  # a reward file is some numbers
STEP_TIMEOUT_S = 60.0  # clearing, reading
NO_REWARD = 3  # the exit code of `_READ` when there is nothing to read
VERIFIER_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONNOUSERSITE": "1",
}
# Empty both places without following a link that stands in for one of them; what
# else the agent left in /logs goes too, as it may fill that disk.
_CLEAR = (
    f"find /logs {TESTS_DIR} -mindepth 1 ! '(' -path {VERIFIER_DIR} -type d ')' -delete || exit 1; "
    f"[ -d {VERIFIER_DIR} ] || mkdir {VERIFIER_DIR} || exit 1; "
    f"exec chmod 777 {VERIFIER_DIR} {TESTS_DIR}"
)
_VERIFY = f"[ -x {TESTS_DIR}/test.sh ] || chmod +x {TESTS_DIR}/test.sh; exec {TESTS_DIR}/test.sh"
REWARD_FILES = ("reward.json", "reward.txt")  # the first that is there counts
# Its name and content.  One more byte than is allowed tells that there is more; a link,
# a folder or a pipe is no reward file.
_READ = (
    f"cd {VERIFIER_DIR} || exit {NO_REWARD}; for name in {' '.join(REWARD_FILES)}; do "
    'if [ -f "$name" ] && [ ! -L "$name" ]; then '
    f'echo "$name"; exec head -c {REWARD_LIMIT + 1} "$name"; fi; done; exit {NO_REWARD}'
)
_READ_LIMIT = 2 * (REWARD_LIMIT + 64)  # head and tail are kept, half each: never cut
_KILL = "kill -9 -1 2>/dev/null; true"


@dataclass(frozen=True, slots=True)
class Grade:
    """What the verifier said."""

    reward: float
    log: str


@dataclass(frozen=True, slots=True)
class _Ran:
    """A command's exit code, None when it was out of time, and what it printed."""

    code: int | None
    output: bytes

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", errors="replace")


async def grade(env: BaseEnvironment, package: TaskPackage, timeout_s: float) -> Grade:
    """Run the package's verifier in `env` for at most `timeout_s` seconds.

    Raises:
        VerifierError: it could not run, ran too long, or left no valid reward.
        SandboxError: the sandbox is gone.
        TaskPackageError: verifier.env names a variable that is not set here.
    """
    async with within(package, timeout_s):
        await end_processes(env)
        cleared = await _run(env, _restore_workdir(env) + _CLEAR, STEP_TIMEOUT_S, VERIFIER_ENV, "/")
        if cleared.code != 0:
            what = f"the sandbox could not be made ready: {cleared.text}"
            raise VerifierError(what, package.name)
        await env.upload_dir(package.path / "tests", TESTS_DIR)
        return await run_verifier(env, package, timeout_s)


@contextlib.asynccontextmanager
async def within(package: TaskPackage, timeout_s: float) -> AsyncGenerator[None]:
    """Bound a verifier's run and what prepares it; what goes wrong is a failure of its own.

    Raises:
        VerifierError: it was not done in time, or failed in a way that has no type of ours.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise VerifierError(f"no reward within {timeout_s:.0f} s", package.name) from None
    except (InfrastructureError, TaskPackageError):
        raise
    except (OSError, RuntimeError) as error:
        raise VerifierError(f"the verifier could not run: {error!r}", package.name) from error


async def run_verifier(env: BaseEnvironment, package: TaskPackage, timeout_s: float) -> Grade:
    """Run the tests that lie in a sandbox made ready for them, and read the reward.

    Raises:
        VerifierError, SandboxError, TaskPackageError: see `grade`.
    """
    variables = {**VERIFIER_ENV, **_own_variables(package)}
    limit_s = min(timeout_s, package.verifier_timeout_s)
    verified = await _run(env, _VERIFY, limit_s, variables, None)
    log = verified.text
    if verified.code is None:
        raise VerifierError(f"ran longer than {limit_s:.0f} s", package.name, _tail(log))
    await end_processes(env)
    reward = await _read_reward(env, package, log)
    # A verifier that prints nothing leaves a log all the same: a reward is backed by one.
    ending = f"[verifier exit {verified.code}, reward {reward:g}]"
    return Grade(reward, f"{log.rstrip()}\n{ending}".lstrip())


async def holds(env: BaseEnvironment, condition: str) -> bool:
    """Whether a shell condition holds in `env`.

    Raises:
        SandboxError: the sandbox is gone.
    """
    return (await _run(env, condition, STEP_TIMEOUT_S, VERIFIER_ENV, "/")).code == 0


def _own_variables(package: TaskPackage) -> dict[str, str]:
    try:
        return resolve_env_vars(package.verifier_env)
    except ValueError as error:
        raise TaskPackageError(
            f"verifier.env: {error}",
            str(package.path / "task.toml"),
            "set the variable where the verifier is started, or give it a default: ${NAME:-value}",
        ) from None


def _restore_workdir(env: BaseEnvironment) -> str:
    """Shell commands that make the working directory one, where it is known."""
    if not isinstance(env, BubblewrapEnvironment):
        return ""
    path = shlex.quote(env.workdir)
    return f"[ -d {path} ] || {{ rm -rf -- {path}; mkdir -p -- {path}; }} || exit 1; "


async def end_processes(env: BaseEnvironment) -> None:
    """End whatever still runs in `env`."""
    if isinstance(env, BubblewrapEnvironment):
        await env.kill_all()
    else:
        await env.exec(_KILL, timeout_sec=int(STEP_TIMEOUT_S), user="root")


async def _run(
    env: BaseEnvironment,
    command: str,
    timeout_s: float,
    variables: dict[str, str],
    cwd: str | None,
    output_limit: int = LOG_LIMIT,
    merged: bool = True,
) -> _Ran:
    """Run a command as the verifier; `merged` output holds standard error, too."""
    if isinstance(env, BubblewrapEnvironment):
        done = await env.run(
            command,
            cwd=cwd,
            env=variables,
            timeout_s=timeout_s,
            user="root",
            output_limit=output_limit,
            merged=merged,
            clean_env=True,
        )
        printed = done.streams[0]
        output = printed.text().encode() if printed.cut else printed.head + printed.tail
        return _Ran(None if done.timed_out else done.exit_code, output)
    async with asyncio.timeout(timeout_s):
        result = await env.exec(
            command, cwd=cwd, env=variables, timeout_sec=max(1, int(timeout_s)), user="root"
        )
    text = (result.stdout or "") + ((result.stderr or "") if merged else "")
    return _Ran(result.return_code, cut_text(text, output_limit).encode())


async def _read_reward(env: BaseEnvironment, package: TaskPackage, log: str) -> float:
    found = await _reward_file(env, package)
    if found is None:
        raise VerifierError("left no reward file", package.name, _tail(log))
    name, content = found
    parse = parse_reward_json if name == "reward.json" else parse_reward_text
    try:
        if len(content) > REWARD_LIMIT:
            raise ValueError(f"is longer than {REWARD_LIMIT} bytes")
        return parse(content)
    except ValueError as error:
        where = f"{VERIFIER_DIR}/{name}"
        raise VerifierError(f"{where}: {error}", package.name, _tail(log)) from None


async def _reward_file(env: BaseEnvironment, package: TaskPackage) -> tuple[str, bytes] | None:
    """Name and content of the reward file that counts, at most one byte more than it may have."""
    if isinstance(env, BubblewrapEnvironment):
        for name in REWARD_FILES:
            content = await env.read_file(f"{VERIFIER_DIR}/{name}", REWARD_LIMIT + 1)
            if content is not None:
                return name, content
        return None
    read = await _run(env, _READ, STEP_TIMEOUT_S, VERIFIER_ENV, "/", _READ_LIMIT, merged=False)
    if read.code == NO_REWARD:
        return None
    if read.code != 0:
        raise VerifierError(f"its reward can't be read: exit code {read.code}", package.name)
    name, _, content = read.output.partition(b"\n")
    return name.decode(errors="replace"), content


def parse_reward_json(content: bytes) -> float:
    """The reward of a flat object of finite numbers: key `reward`, or the only key.

    Raises:
        ValueError: it is anything else.
    """
    try:
        data: object = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"must be an object of numbers, not {type(data).__name__}")
    rewards = {key: _finite(value) for key, value in cast(dict[str, object], data).items()}
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise ValueError(f"has no key 'reward' among {sorted(rewards)}")


def parse_reward_text(content: bytes) -> float:
    """The reward of a file that holds one finite number.

    Raises:
        ValueError: it holds anything else.
    """
    text = content.decode("ascii").strip()
    if "_" in text:
        raise ValueError(f"is not a number: {text[:100]!r}")
    return _finite(float(text))


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is not a number: {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"is not finite: {number}")
    return number


def _tail(log: str) -> str:
    return f"its output ended with: {log[-500:]}" if log.strip() else "it printed nothing"
