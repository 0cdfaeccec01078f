"""What is written of a submission: its intent, its receipt, or what was found out instead.

A submission is one thing asked of a provider that costs: a Ray job, a Modal call.
Each attempt at a run (`RUN.a1`; continued, `RUN.a2`) is a submission of its own.

Invariants:
- Nothing here holds a secret: a command line, tags and ids are all that is written.
- What is known of a submission follows from its files alone (`Entry.standing`).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rl.records import Record

_ATTEMPT = re.compile(r".*\.a(\d+)")

Provider = Literal["ray", "modal"]
Standing = Literal["ambiguous", "submitted", "absent"]
Finding = Literal["absent", "present"]


class Intent(Record):
    """That a submission was begun: intent.json."""

    run_id: str = Field(description="the run that is submitted")
    submission_id: str = Field(description="unique name of this submission, such as RUN.a1")
    provider: Provider = Field(description="who is asked")
    target: str = Field(description="the provider's address, or its workspace and environment")
    asked: str = Field(description="what is asked for: the job, or the function's name")
    command: list[str] = Field(description="what runs there, as far as it is known; no secrets")
    tags: dict[str, str] = Field(
        default={}, description="names under which the provider can be asked for what exists"
    )
    config_digest: str = Field(default="", description="of the configuration that is submitted")
    commit: str | None = Field(default=None, description="git commit of the program")
    created_at: float = Field(description="unix time, s")
    host: str = Field(description="the launcher's machine")
    pid: int = Field(description="the launcher's process")


class Receipt(Record):
    """That the provider has taken it: receipt.json."""

    intent_sha256: str = Field(description="of the intent's file")
    calls: dict[str, str] = Field(description="the provider's ids by what they are of")
    created_at: float = Field(description="unix time, s")


class Resolution(Record):
    """What was found out about an ambiguous intent: resolution.json."""

    intent_sha256: str = Field(description="of the intent's file")
    finding: Finding = Field(description="absent: the provider holds nothing of it")
    calls: dict[str, str] = Field(default={}, description="present: the provider's ids")
    reason: str = Field(description="how it was found out, in a person's words")
    created_at: float = Field(description="unix time, s")


@dataclass(frozen=True, slots=True)
class Entry:
    """One submission as its directory tells it.

    Attributes:
        held: whether its launcher lives and holds the lock.
    """

    intent: Intent
    receipt: Receipt | None
    resolution: Resolution | None
    held: bool

    @property
    def standing(self) -> Standing:
        """What is known of the submission."""
        if self.receipt is not None:
            return "submitted"
        if self.resolution is None:
            return "ambiguous"
        return "submitted" if self.resolution.finding == "present" else "absent"

    @property
    def calls(self) -> dict[str, str]:
        """The provider's ids, empty while none is known."""
        if self.receipt is not None:
            return self.receipt.calls
        return {} if self.resolution is None else self.resolution.calls


def new_intent(
    run_id: str,
    submission_id: str,
    provider: Provider,
    target: str,
    asked: str,
    command: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    *,
    config_digest: str = "",
    commit: str | None = None,
) -> Intent:
    """An intent of this process, now."""
    return Intent(
        run_id=run_id,
        submission_id=submission_id,
        provider=provider,
        target=target,
        asked=asked,
        command=list(command),
        tags=dict(tags or {}),
        config_digest=config_digest,
        commit=commit,
        created_at=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def submission_name(run_id: str, attempt: int) -> str:
    """The submission id of attempt 1, 2, ... at a run."""
    return f"{run_id}.a{attempt}"


def attempt_of(submission_id: str) -> int:
    """The attempt's number in a submission id; 0: it has none."""
    found = _ATTEMPT.fullmatch(submission_id)
    return int(found[1]) if found else 0
