"""A Ray that is started here can be reached from here alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from actors.local_head import LocalHead
from tests.support.campaigns import ROOT, environment
from tests.support.listening import is_loopback, listening

# Connects as a campaign does, with an actor that runs, and tells where its Ray listens.
DRIVER = """
import asyncio, json, os
from actors.ray_connection import connect
from tests.support.listening import listening

async def main():
    await connect(None, "run", dashboard=True)
    import ray
    @ray.remote
    class Actor:
        def answer(self):
            return 1
    actor = Actor.remote()
    assert await asyncio.wait_for(actor.answer.remote(), 100) == 1
    print(json.dumps(sorted(listening(os.getpid()))))
    ray.shutdown()

asyncio.run(main())
"""


def test_a_campaigns_own_ray_listens_on_loopback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        env=environment(HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    addresses = json.loads(done.stdout.splitlines()[-1])
    assert len(addresses) > 3
    assert [one for one in addresses if not is_loopback(one)] == []


def test_a_head_of_this_machine_alone_listens_on_loopback(tmp_path: Path) -> None:
    head = LocalHead(tmp_path, 1, 0)

    async def run() -> dict[str, int]:
        await head.start(120.0)
        try:
            return listening(os.getpid())
        finally:
            await head.stop(30.0)

    addresses = asyncio.run(run())
    assert len(addresses) > 3
    assert [one for one in addresses if not is_loopback(one)] == []
    assert head.processes() == []
