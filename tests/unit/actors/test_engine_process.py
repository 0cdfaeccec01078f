"""An engine's life, with small stand-ins for the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actors.engine_command import EngineCommand, engine_command
from actors.engine_guard import process_start
from actors.engine_process import PORTS, EngineProcess, free_port
from rl.agent.client import EngineClient
from rl.errors import DeadlineExceeded, EngineError
from rl.learner.stand_in import make_tiny_tokenizer
from tests.support.engine_config import engine_campaign

HEALTHY_THEN_DEAD = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        print("head size 16 is not supported", flush=True); os._exit(0)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


def stand_in(code: str, tmp_path: Path) -> EngineProcess:
    port = free_port()
    command = EngineCommand(
        (sys.executable, "-c", code, str(port)), dict(os.environ), f"http://127.0.0.1:{port}"
    )
    return EngineProcess(command, tmp_path / "engine.log", EngineClient())


def scripted(tmp_path: Path, *arguments: str) -> EngineProcess:
    model = make_tiny_tokenizer(tmp_path / "model", ["make a directory", "mkdir alpha"])
    config = engine_campaign("scripted", extra_args=arguments)
    command = engine_command(config, 0, model, free_port(), "key", [0], os.environ)
    return EngineProcess(command, tmp_path / "engine.log", EngineClient("key"))


def live(process: EngineProcess, body: Callable[[EngineProcess], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await body(process)
        finally:
            await process.stop(10)
            await process._client.close()

    asyncio.run(run())


def test_start_serves_and_stop_leaves_nothing(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        seconds = await process.start(30)
        assert 0 < seconds < 30
        assert process.alive()
        process.check_alive()
        tree = process.processes()
        assert len(tree) == 3  # two guards and the engine
        await process.stop(10)
        assert not process.alive()
        assert process.processes() == []
        assert all(process_start(pid) is None for pid in tree)

    live(scripted(tmp_path), body)


def test_exit_while_starting_tells_code_and_log(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        with pytest.raises(EngineError, match=r"exited with code 3[\s\S]*no room for the cache"):
            await process.start(30)

    live(stand_in("import sys; print('no room for the cache'); sys.exit(3)", tmp_path), body)


def test_exit_code_zero_is_a_failure(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        with pytest.raises(EngineError, match="exited with code 0"):
            await process.start(30)

    live(stand_in("pass", tmp_path), body)


def test_engine_that_is_healthy_but_dies_of_its_first_request_is_not_ready(
    tmp_path: Path,
) -> None:
    async def body(process: EngineProcess) -> None:
        with pytest.raises(EngineError, match=r"first generation failed[\s\S]*head size 16"):
            await process.start(30)
        assert process.processes() == []

    live(stand_in(HEALTHY_THEN_DEAD, tmp_path), body)


def test_start_ends_at_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="not ready within 1 s"):
            await process.start(1)
        assert time.monotonic() - began < 10
        assert process.processes() == []

    live(stand_in(IGNORES_SIGTERM, tmp_path), body)


def test_stop_ends_a_start_in_progress(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        starting = asyncio.create_task(process.start(60))
        await asyncio.sleep(0.5)
        await process.stop(5)
        with pytest.raises(EngineError):
            await starting

    live(stand_in("import time; time.sleep(600)", tmp_path), body)


def test_death_after_start_is_told(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        await process.start(30)
        os.kill(process.processes()[-1], signal.SIGKILL)
        limit = time.monotonic() + 10
        while process.alive():
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="exited with code 137"):
            process.check_alive()

    live(scripted(tmp_path), body)


def test_stop_finds_the_tree_when_both_guards_were_killed(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        await process.start(30)
        outer, inner, engine = process.processes()
        for guard in (inner, outer):
            os.kill(guard, signal.SIGKILL)
        await process.stop(10)
        assert process_start(engine) is None

    live(scripted(tmp_path), body)


def test_scripted_engine_can_be_told_to_die(tmp_path: Path) -> None:
    async def body(process: EngineProcess) -> None:
        with pytest.raises(EngineError, match=r"exited with code 1|first generation failed"):
            await process.start(30)

    live(scripted(tmp_path, "--fail-after", "0"), body)


def test_ports_are_outside_rays_range_and_skip_what_is_taken() -> None:
    assert PORTS.start > 19_999
    port = free_port()
    assert port in PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert free_port() != port
