"""Follow the calls of a submission on Modal, and stop them.

Invariants:
- Who follows may leave and come back at any time; the calls go on.
- Every wait has a deadline: that of the call, and that of an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import modal
from modal.exception import Error, FunctionTimeoutError, OutputExpiredError

from rl.errors import ConfigurationError, DeadlineExceeded, InfrastructureError
from rl.evidence.intents import Entry
from rl.evidence.receipts import Ledger
from rl.modal_config import MAX_FUNCTION_S
from rl.provision.account import asking, require_workspace
from rl.provision.functions import FunctionName
from rl.provision.inquiry import existing
from rl.provision.order import Answer, read_answer

POLL_S: Final = 30.0  # Modal holds a question for an answer so long
SLACK_S: Final = 30.0  # of such a question
OUTAGE_S: Final = 300.0  # how long a Modal that does not answer is asked again
QUEUE_S: Final = 7_200.0  # a call may wait so long for GPUs before its own bound begins
STOP_S: Final = 180.0  # a cancelled call has half a minute, and its container goes after it
STOP_ORDER: Final[tuple[FunctionName, ...]] = (
    "final_continue",
    "heldout_worker",
    "final_cluster",
    "final_train",
    "train",
)
LAST_LINES_S: Final = 2.0


def newest(ledger: Ledger, run_id: str) -> Entry:
    """The newest submission of a run.

    Raises:
        ConfigurationError: there is none that has calls.
        EvidenceError: one is ambiguous.
    """
    ledger.require_settled(run_id)
    found = [entry for entry in ledger.entries(run_id) if entry.standing == "submitted"]
    if not found or found[-1].intent.provider != "modal":
        raise ConfigurationError(
            f"nothing was submitted to Modal as '{run_id}'",
            str(ledger.root),
            "see `python -m rl.receipts ls`",
        )
    return found[-1]


def follow(entry: Entry) -> dict[str, Answer]:
    """Relay what the calls of a submission print until all, or one that failed, have ended.

    Returns:
        The answers by the functions' names.

    Raises:
        CampaignError: a call failed otherwise than by its driver, or Modal is out of reach.
    """
    return asyncio.run(_follow(entry))


def stop(entry: Entry) -> list[str]:
    """Cancel the calls of a submission, and wait for their end; which were running.

    Raises:
        CampaignError: Modal refuses, or one has not ended in time.
    """
    return asyncio.run(_stop(entry))


async def answered(call: str) -> bool:
    """Whether a call has ended, in whatever way.

    Raises:
        InfrastructureError: Modal can't be reached.
    """
    handle: Any = modal.FunctionCall.from_id(call)
    async with asking(f"the call {call}"):
        try:
            await handle.get.aio(timeout=0)
        except TimeoutError:
            return False
        except (modal.exception.RemoteError, FunctionTimeoutError, OutputExpiredError):
            return True
        except modal.exception.InputCancellation:
            return True
    return True


def calls_of(entry: Entry) -> dict[str, str]:
    """The calls of a submission, by the function's name."""
    return {name: call for name, call in entry.calls.items() if call.startswith("fc-")}


async def _follow(entry: Entry) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    await require_workspace(entry.intent.target.partition("/")[0])
    for name, call in calls_of(entry).items():
        print(f"modal: following {name}, {call}", flush=True)
        logs = asyncio.create_task(_relay(call))
        try:
            answer = await _await_answer(call, MAX_FUNCTION_S + QUEUE_S)
            await asyncio.wait({logs}, timeout=LAST_LINES_S)
        finally:
            logs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await logs
        resumed = ", after a restart" if answer.resumed else ""
        print(f"modal: {name}: {answer.ending}{resumed}. {answer.note}".rstrip(), flush=True)
        answers[name] = answer
        if answer.ending != "done":
            break
    return answers


async def _await_answer(call: str, limit_s: float) -> Answer:
    limit, heard = time.monotonic() + limit_s, time.monotonic()
    handle: Any = modal.FunctionCall.from_id(call)
    while time.monotonic() < limit:
        try:
            async with asking(f"the call {call}", POLL_S + SLACK_S):
                with contextlib.suppress(TimeoutError):
                    return read_answer(await handle.get.aio(timeout=POLL_S), call)
            heard = time.monotonic()
        except InfrastructureError as error:
            if _final(error) or time.monotonic() - heard > OUTAGE_S:
                raise
            print(f"modal: {error.what}; trying again", flush=True)
            await asyncio.sleep(1.0)
        except modal.exception.InputCancellation:
            return Answer(ending="stopped", exit_code=130, note="it was cancelled")
    raise DeadlineExceeded(f"has not ended within {limit_s:g} s", call, "see it at Modal")


def _final(error: InfrastructureError) -> bool:
    """Whether it is the call's own end, and no outage."""
    ends = (modal.exception.RemoteError, FunctionTimeoutError, OutputExpiredError)
    return error.__cause__ is None or isinstance(error.__cause__, ends)


async def _relay(call: str) -> None:
    handle: Any = modal.FunctionCall.from_id(call)
    try:
        async for entry in handle.logs.stream.aio():
            print(entry.message, end="", flush=True)
    except (Error, OSError) as error:
        print(f"modal: its log can't be followed: {error!r}", flush=True)


async def _stop(entry: Entry) -> list[str]:
    """Cancel what waits for the others first, so that it makes no further calls."""
    await require_workspace(entry.intent.target.partition("/")[0])
    limit = time.monotonic() + STOP_S
    stopped: list[str] = []
    for name in STOP_ORDER:
        found = [one.id for one in await existing(entry.intent) if one.name == name]
        receipt = [call for asked, call in calls_of(entry).items() if asked == name]
        calls = [call for call in dict.fromkeys([*receipt, *found]) if not await answered(call)]
        for call in calls:
            async with asking(f"cancelling {call}"):
                await modal.FunctionCall.from_id(call).cancel.aio()
        for call in calls:
            await _await_end(entry, call, limit)
        stopped += calls
    return stopped


async def _await_end(entry: Entry, call: str, limit: float) -> None:
    while not await answered(call):
        if time.monotonic() > limit:
            raise DeadlineExceeded(
                f"has not ended within {STOP_S:g} s",
                call,
                f"stop its app: modal app stop {entry.intent.tags['app']}",
            )
        await asyncio.sleep(1.0)
