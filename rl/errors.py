"""The types of failure, and how a command ends on each.

Invariants:
- Every error a person can cause or cure is a `CampaignError`: it says what is
  wrong, where, and what to do, and ends a command with exit code 2 and no
  traceback, and so does an operating system's error that names a file.
  Anything else that escapes is a bug and keeps its traceback.
- The class names the boundary that was crossed, so that whoever handles it
  never parses a message: `InfrastructureError` masks an attempt,
  `PolicyError` scores it, `ConfigurationError` stops the launch.
- All of them survive pickling, because they cross Ray's actor boundaries.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pydantic import ValidationError

EXIT_OK = 0
EXIT_BUG = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class CampaignError(Exception):
    """A failure with a remedy.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: the file, key, path or actor concerned; may be empty.
        remedy: what the reader can do about it; may be empty.
    """

    def __init__(self, what: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  -> {self.remedy}" if self.remedy else text


class ConfigurationError(CampaignError):
    """The configuration, a command line, a model or a task package is wrong."""


class TaskPackageError(ConfigurationError):
    """A task package is malformed, has changed, or fails its gate."""


class InfrastructureError(CampaignError):
    """A machine, process, disk or network failed; never the model's fault."""


class ActorLostError(InfrastructureError):
    """An actor's process, or its node, is gone."""


class EngineError(InfrastructureError):
    """A replica could not start, died, or answered out of contract."""


class TrainerError(InfrastructureError):
    """A trainer's process could not start, died, or answered out of contract."""


class SandboxError(InfrastructureError):
    """A sandbox could not be created, reached or stopped."""


class VerifierError(InfrastructureError):
    """The verifier could not run, or left a missing, malformed or non-finite reward."""


class DeadlineExceeded(InfrastructureError):
    """A bounded wait of ours ran out (not the agent's own time)."""


class PolicyError(CampaignError):
    """The model's own doing: out of time, out of turns, out of context."""


class EvidenceError(CampaignError):
    """Evidence on disk is missing, torn or contradicts itself."""


class StalenessViolation(CampaignError):
    """A batch would break the staleness bound: always a bug, never trained on."""


class Interrupted(CampaignError):
    """The person at the terminal asked to stop."""


def first_problem(error: ValidationError) -> str:
    """The first line of a validation error, with its field."""
    item = error.errors()[0]
    field = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def report_error(error: CampaignError) -> int:
    """Print one message for `error` on standard error; return the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED if isinstance(error, Interrupted) else EXIT_REFUSED


def run_command(main: Callable[[list[str]], int], argv: list[str] | None = None) -> NoReturn:
    """Run a command's `main` and exit the process with its code.

    Typed errors become one message and exit code 2; an interrupt becomes 130;
    a reader that closed our standard output (a pager, `head`) is no error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may be no valid text
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except CampaignError as error:
        code = report_error(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        code = EXIT_OK
    except OSError as error:
        named = of_os_error(error)
        if named is None:
            raise
        code = report_error(named)
    sys.exit(code)


def of_os_error(error: OSError) -> InfrastructureError | None:
    """`error` with a remedy; None when it names no file, for then it is a bug."""
    where = "" if error.filename is None else os.fsdecode(error.filename)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InfrastructureError(
            "no space left on the device",
            where,
            "free some disk space, then run the same command with --resume",
        )
    if not where:
        return None
    return InfrastructureError(
        (error.strerror or str(error)).lower(),
        where,
        "check that the path is right and that this user may read and write there",
    )
