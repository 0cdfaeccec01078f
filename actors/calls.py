"""Calls to actors: every one has a deadline and fails by a type of `rl.errors`.

Ray turns an exception into its own, holding ours as the cause; a dead actor
into an `ActorDiedError`.  Both are turned back here, once, so that nobody else
needs to know Ray's exceptions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rl.errors import ActorLostError, CampaignError, DeadlineExceeded, InfrastructureError


async def call(ref: Any, deadline_s: float, who: str) -> Any:
    """Await an actor call.

    Args:
        ref: the object reference that `.remote()` returned.
        deadline_s: how long to wait, s.
        who: names actor and method in errors.

    Raises:
        DeadlineExceeded: no answer in time.
        ActorLostError: the actor, or its node, is gone.
        InfrastructureError: Ray failed otherwise.
        CampaignError: what the method raised, as its own type.
    """
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        async with asyncio.timeout(deadline_s):
            return await ref
    except RayTaskError as error:  # first: it may also be of the class of its cause
        cause = error.cause
        if isinstance(cause, CampaignError):
            raise cause from None
        raise
    except TimeoutError:
        raise DeadlineExceeded(f"no answer within {deadline_s:.0f} s", who) from None
    except RayActorError as error:
        raise ActorLostError(_first_line(error), who) from error
    except RayError as error:
        raise InfrastructureError(_first_line(error), who) from error


async def together(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await all parts; the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except BaseExceptionGroup as errors:
        raise _first_leaf(errors) from errors
    return [task.result() for task in tasks]


async def in_thread[T](limit_s: float, work: Callable[[], T]) -> T:
    """Do blocking `work` in a thread; a cancellation waits for its end, `limit_s` at most.

    What it has made can then be unmade in order, by whoever handles the cancellation.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done() and not task.cancelled():
            task.exception()  # looked at: the cancellation is what is reported
        raise


async def in_daemon[T](limit_s: float, work: Callable[[], T]) -> T:
    """Do blocking `work` in a thread that does not keep the program from ending.

    Raises:
        TimeoutError: it took longer than `limit_s`; the thread is left behind.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def give(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - carried to whoever waits
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(give, result, failed)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await answer


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups."""
    first = errors.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _first_line(error: Exception) -> str:
    """The first line that says something: Ray's messages run over many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
