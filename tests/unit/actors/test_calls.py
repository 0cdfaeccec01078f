"""Blocking work that is waited for even when its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actors.calls import in_thread


def test_result_and_error_are_the_works() -> None:
    def fails() -> None:
        raise ValueError("it")

    assert asyncio.run(in_thread(1, lambda: 7)) == 7
    with pytest.raises(ValueError, match="it"):
        asyncio.run(in_thread(1, fails))


@pytest.mark.parametrize("fails", [False, True])
def test_cancellation_waits_for_the_work_to_end(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        ended.set()
        if fails:
            raise ValueError("nobody's concern any more")

    async def main() -> None:
        task = asyncio.create_task(in_thread(10, work))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())
    assert caplog.text == ""


def test_cancellation_waits_no_longer_than_the_limit() -> None:
    go_on = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(in_thread(0.01, lambda: go_on.wait(10)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())
