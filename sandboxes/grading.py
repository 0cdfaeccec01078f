"""One verifier run, and the reward it left.

Invariants:
- The verifier starts after every process of the agent is gone, over tests that
  were uploaded then and a reward file that did not exist before.
- Nothing that the agent could set reaches the verifier: its environment is made
  here, and its search path holds directories of /usr only.
- A reward that is missing, malformed or not finite is a `VerifierError`, never 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from harbor.environments.base import BaseEnvironment
from harbor.utils.env import resolve_env_vars

from rl.errors import InfrastructureError, TaskPackageError, VerifierError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.shells import cut_text
from sandboxes.tasks import TaskPackage

VERIFIER_DIR = "/logs/verifier"
REWARD_JSON = f"{VERIFIER_DIR}/reward.json"
REWARD_TEXT = f"{VERIFIER_DIR}/reward.txt"
TESTS_DIR = "/tests"
LOG_LIMIT = 32_768  # kept of the verifier's output, bytes
REWARD_LIMIT = 65_536  # a reward file is some numbers
STEP_TIMEOUT_S = 60  # clearing, preparing, reading
VERIFIER_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONNOUSERSITE": "1",
}
# Empty both places without following a link that stands in for one of them; what
# else the agent left in /logs goes too, as it may fill that disk.
_CLEAR = (
    "find /logs -mindepth 1 -delete 2>/dev/null; "
    f"for d in {VERIFIER_DIR} {TESTS_DIR}; do "
    'if [ -L "$d" ] || [ ! -d "$d" ]; then rm -rf -- "$d" && mkdir -p "$d" || exit 1; fi; '
    'find "$d" -mindepth 1 -delete || exit 1; chmod 777 "$d" || exit 1; done'
)
_KILL = "kill -9 -1 2>/dev/null; true"


@dataclass(frozen=True, slots=True)
class Grade:
    """What the verifier said."""

    reward: float
    log: str


async def grade(env: BaseEnvironment, package: TaskPackage, timeout_s: float) -> Grade:
    """Run the package's verifier in `env` for at most `timeout_s` seconds.

    Raises:
        VerifierError: it could not run, ran too long, or left no valid reward.
        SandboxError: the sandbox is gone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _grade(env, package, min(timeout_s, package.verifier_timeout_s))
    except TimeoutError:
        raise VerifierError(f"no reward within {timeout_s:.0f} s", package.name) from None
    except (InfrastructureError, TaskPackageError):
        raise
    except (OSError, RuntimeError) as error:
        raise VerifierError(f"the verifier could not run: {error!r}", package.name) from error


async def _grade(env: BaseEnvironment, package: TaskPackage, timeout_s: float) -> Grade:
    await _end_agent(env)
    code, output = await _run(env, _CLEAR, STEP_TIMEOUT_S, VERIFIER_ENV)
    if code != 0:
        raise VerifierError(f"the sandbox could not be made ready: {output}", package.name)
    await env.upload_dir(package.path / "tests", TESTS_DIR)
    try:
        variables = {**VERIFIER_ENV, **resolve_env_vars(package.verifier_env)}
    except ValueError as error:
        raise TaskPackageError(f"verifier.env: {error}", str(package.path / "task.toml")) from None
    script = f"{TESTS_DIR}/test.sh"
    code, output = await _run(env, f"chmod +x {script}; {script}", timeout_s, variables)
    if code is None:
        raise VerifierError(f"ran longer than {timeout_s:.0f} s: {output[-500:]}", package.name)
    reward = await _read_reward(env, package, output)
    # A verifier that prints nothing leaves a log all the same: a reward is backed by one.
    return Grade(reward, f"{output.rstrip()}\n[verifier exit {code}, reward {reward:g}]".lstrip())


async def _end_agent(env: BaseEnvironment) -> None:
    if isinstance(env, BubblewrapEnvironment):
        await env.kill_all()
    else:
        await env.exec(_KILL, timeout_sec=STEP_TIMEOUT_S, user="root")


async def _run(
    env: BaseEnvironment, command: str, timeout_s: float, variables: dict[str, str]
) -> tuple[int | None, str]:
    """Run a command as the verifier: exit code (None: out of time) and output, cut."""
    if isinstance(env, BubblewrapEnvironment):
        done = await env.run(
            command,
            cwd="/" if command is _CLEAR else None,
            env=variables,
            timeout_s=timeout_s,
            user="root",
            output_limit=LOG_LIMIT,
            merged=True,
            clean_env=True,
        )
        return None if done.timed_out else done.exit_code, done.streams[0].text()
    async with asyncio.timeout(timeout_s):
        result = await env.exec(
            command, env=variables, timeout_sec=max(1, int(timeout_s)), user="root"
        )
    return result.return_code, cut_text((result.stdout or "") + (result.stderr or ""), LOG_LIMIT)


async def _read_reward(env: BaseEnvironment, package: TaskPackage, log: str) -> float:
    for path, parse in ((REWARD_JSON, parse_reward_json), (REWARD_TEXT, parse_reward_text)):
        content = await _read(env, path)
        if content is not None:
            try:
                return parse(content)
            except ValueError as error:
                raise VerifierError(f"{path}: {error}", package.name, _tail(log)) from None
    raise VerifierError("left no reward file", package.name, _tail(log))


async def _read(env: BaseEnvironment, path: str) -> bytes | None:
    if isinstance(env, BubblewrapEnvironment):
        return await env.read_file(path, REWARD_LIMIT)
    if not await env.is_file(path):
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "reward")
        await env.download_file(path, target)
        return _content(target)


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if len(content) > REWARD_LIMIT:
        raise VerifierError(f"a reward file of {len(content)} bytes", path.name)
    return content


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
    text = content.decode("utf-8").strip()
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
