"""Orders to the zygote, and starts that are given up."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import SandboxError
from sandboxes import launch, spawner
from sandboxes.guest.enclosure import Order

words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
counts = st.integers(0, 1 << 40)


@given(st.booleans(), st.booleans(), counts, counts, words, words)
def test_order_arrives_as_it_was_given(
    full_map: bool,
    network: bool,
    processes: int,
    watched: int,
    entrances: list[str],
    command: list[str],
) -> None:
    order = Order(full_map, network, processes, watched, entrances, ["bwrap", *command])
    assert vars(Order.read(order.wire())) == vars(order)


BOUNDS = launch.Bounds(disk_mb=8, memory_mb=64, processes=8, cpus=1.0, network=False)


def test_failure_of_a_start_that_was_given_up_is_nobodys_concern(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given_up = threading.Event()

    def fails_late(_bounds: launch.Bounds) -> launch.Sandbox:
        given_up.wait(10)
        raise SandboxError("too late")

    monkeypatch.setattr(launch, "_spawn", fails_late)

    async def main() -> None:
        starting = asyncio.create_task(launch.start(BOUNDS, 10))
        await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        given_up.set()
        await asyncio.to_thread(spawner.submit(lambda: None).result)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text == ""


def test_python_that_does_not_run_is_a_sandbox_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/nowhere\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SandboxError, match="Python does not run"):
        spawner.Zygote()


def test_zygote_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "_CODE", "raise SystemExit('for a reason')")
    zygote = spawner.Zygote()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(spawner.ZygoteGoneError, match="for a reason"):
        zygote.fork(Order(False, False, 1, 0, [], ["bwrap"]), theirs)
    zygote.close()
