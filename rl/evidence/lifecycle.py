"""The lifecycle of a campaign's training: start, drain, checkpoint, stop.

Invariants:
- A step's intent is on disk, with its deadline, before the step begins, and its
  receipt when it has ended, by whatever cause.  An intent without a receipt is a step
  that was cut off together with its driver.
- A step ends within its deadline: what exceeds it is cancelled, and is an error.
- A disk that takes no intent stops what would begin (start, checkpoint), never what
  winds down (drain, stop): that is done first, and the disk's failure told then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from rl.errors import DeadlineExceeded, InfrastructureError
from rl.evidence.lines import JsonLines
from rl.records import Record

StepName = Literal["start", "drain", "checkpoint", "stop"]
Ending = Literal["done", "failed", "late", "interrupted"]
WINDING_DOWN: Final[tuple[StepName, ...]] = ("drain", "stop")


class LifecycleRow(Record):
    """An intent, or, with its `ending`, a receipt: a line of lifecycle.jsonl."""

    step: StepName
    incarnation: int = Field(ge=0, description="how many drivers the campaign had before")
    number: int = Field(ge=0, description="of the step, counted by its driver")
    detail: str = Field(default="", description="what the step is about")
    time: float = Field(description="unix time of this row, s")
    deadline_s: float = Field(gt=0, description="limit of the step, s")
    ending: Ending | None = Field(default=None, description="None: the step begins")
    seconds: float | None = Field(default=None, description="receipt: how long it took, s")
    problem: str = Field(default="", description="receipt: why it is not done")


@dataclass(frozen=True, slots=True)
class LifecycleStep:
    """One step as the file tells it."""

    intent: LifecycleRow
    receipt: LifecycleRow | None

    @property
    def name(self) -> str:
        """The step with what it is about."""
        row = self.intent
        about = f" ({row.detail})" if row.detail else ""
        return f"{row.step}{about}, driver {row.incarnation}"


@dataclass
class Lifecycle:
    """Writes one campaign's lifecycle.

    Args:
        rows: the file.
        incarnation: how many drivers there were before this one.
    """

    rows: JsonLines[LifecycleRow]
    incarnation: int = 0
    _begun: int = 0

    @asynccontextmanager
    async def step(
        self, name: StepName, deadline_s: float, detail: str = ""
    ) -> AsyncGenerator[None]:
        """Carry out a step inside `async with`; intent and receipt are written around it.

        Raises:
            DeadlineExceeded: it took longer than `deadline_s` and was cancelled.
            InfrastructureError: intent or receipt could not be written.
        """
        intent = LifecycleRow(
            step=name,
            incarnation=self.incarnation,
            number=self._begun,
            detail=detail,
            time=time.time(),
            deadline_s=deadline_s,
        )
        self._begun += 1
        refused = self._try(intent)
        if refused is not None and name not in WINDING_DOWN:
            raise refused
        began = time.monotonic()
        limit = asyncio.timeout(deadline_s)
        ending, problem = "done", ""
        try:
            async with limit:
                yield
        except BaseException as error:
            ending, problem = _ending(error, limit.expired())
            if ending == "late" and not isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(
                    f"the step took longer than {deadline_s:g} s and was ended",
                    f"training lifecycle: {name}",
                    f"continue with --resume; the limit is limits.{name}_s",
                ) from error
            raise
        finally:
            seconds = time.monotonic() - began
            outcome = {"ending": ending, "seconds": seconds, "problem": problem}
            receipt = intent.model_copy(update=outcome | {"time": time.time()})
            refused = self._try(receipt) or refused
        if refused is not None:
            raise refused

    def _try(self, row: LifecycleRow) -> InfrastructureError | None:
        """Write a row; the disk's refusal, if any."""
        try:
            self.rows.append(row)
        except InfrastructureError as error:
            return error
        return None


def lifecycle_steps(rows: Sequence[LifecycleRow]) -> list[LifecycleStep]:
    """The steps in the order in which they were begun, each with its receipt if it has one."""
    receipts = {(row.incarnation, row.number): row for row in rows if row.ending is not None}
    return [
        LifecycleStep(row, receipts.get((row.incarnation, row.number)))
        for row in rows
        if row.ending is None
    ]


def _ending(error: BaseException, expired: bool) -> tuple[Ending, str]:
    if expired and isinstance(error, TimeoutError):
        return "late", "exceeded its deadline"
    if isinstance(error, DeadlineExceeded):  # a part of the step did
        return "late", str(error)
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted", type(error).__name__
    return "failed", f"{type(error).__name__}: {error}"
