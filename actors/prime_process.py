"""prime-rl's trainer as a child process, and what its interpreter answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from actors.prime_command import PrimeCommand
from actors.trainer_process import TrainerProcess
from rl.errors import ConfigurationError, DeadlineExceeded


def ask(command: PrimeCommand, question: str, deadline_s: float) -> str:
    """What prime-rl's interpreter answers.

    Raises:
        ConfigurationError: it can't run or fails.
        DeadlineExceeded: no answer within `deadline_s`.
    """
    where = command.inspect[0]
    try:
        done = subprocess.run(
            command.inspect,
            input=question,
            env=dict(command.environment),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"no answer within {deadline_s:g} s", where) from None
    except OSError as error:
        raise ConfigurationError(f"can't be started: {error.strerror}", where) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigurationError(f"exited with code {done.returncode}: {last}", where)
    return done.stdout


class PrimeProcess(TrainerProcess):
    """prime-rl's own entry point, started once."""

    def __init__(self, command: PrimeCommand, log_path: Path) -> None:
        super().__init__("prime-rl", command.train, command.environment, log_path)
