"""A Ray cluster of one node, started by us and ended with us.

Invariants:
- It takes tokens only: one is drawn for it, lies in a file of mode 0600, and is on no
  command line and in no environment.
- Its job server and dashboard listen on the loopback address; Ray's daemons, which know no
  such choice, take tokens like everything else.
- All its processes end with `stop`, and with the owner, by whatever cause it ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from actors.engine_command import HOST
from actors.engine_process import free_port
from actors.guarded_process import KILL_MARGIN_S, GuardedProcess
from rl.errors import DeadlineExceeded, InfrastructureError

POLL_S = 0.3
ANSWER_S = 10.0
TOKEN_MODE = 0o600


class LocalHead(GuardedProcess):
    """See the module's invariants.

    Args:
        folder: of its own: token and log.
        cpus: logical CPUs of the cluster.
        gpus: logical GPUs of the cluster; they need not be there.
    """

    def __init__(self, folder: Path, cpus: float, gpus: float) -> None:
        folder = folder.resolve()
        self._token = folder / "auth_token"
        ports = [free_port() for _ in range(4)]  # none is the default: another Ray may be here
        self.address = f"{HOST}:{ports[0]}"
        self.job_server = f"http://{HOST}:{ports[1]}"
        super().__init__(_command(cpus, gpus, *ports), self._own_environment(), folder / "ray.log")

    def environment(self) -> dict[str, str]:
        """The environment of whoever talks to it; names the token's file."""
        return self._own_environment() | {"RAY_ADDRESS": self.job_server}

    def _own_environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        binaries = Path(sys.executable).parent
        return inherited | {
            # Jobs run `python`: this one, whichever is first elsewhere.
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    async def start(self, limit_s: float) -> None:
        """Start it and wait until jobs can be submitted.

        Raises:
            InfrastructureError: it ended; its log's last lines say why.
            DeadlineExceeded: it was not there in time; nothing is left of it.
        """
        self._write_token()
        self._spawn()
        limit = time.monotonic() + limit_s
        try:
            while not await asyncio.to_thread(self._answers):
                if not self.alive():
                    raise InfrastructureError(
                        f"Ray did not start; its log ends:\n{self.log_tail()}", str(self.log_path)
                    )
                if time.monotonic() > limit:
                    raise DeadlineExceeded(
                        f"Ray did not take jobs within {limit_s:g} s", str(self.log_path)
                    )
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self.stop(KILL_MARGIN_S)
            raise
        self.remember_tree()

    async def stop(self, limit_s: float) -> None:
        """End all its processes: SIGTERM, then SIGKILL."""
        if not self.started:
            return
        limit = time.monotonic() + limit_s
        self._ask_to_end()
        while self.processes() and time.monotonic() < limit - KILL_MARGIN_S:
            await asyncio.sleep(POLL_S)
        self._let_go()
        while self.processes() and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        self._kill_left()

    def _write_token(self) -> None:
        self._token.parent.mkdir(parents=True, exist_ok=True)
        self._token.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._token, flags, TOKEN_MODE)
        try:
            os.write(descriptor, secrets.token_hex(32).encode())
        finally:
            os.close(descriptor)

    def _answers(self) -> bool:
        """Whether the job server takes our token."""
        token = self._token.read_text(encoding="ascii")
        request = urllib.request.Request(
            f"{self.job_server}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False  # not yet; the caller bounds the wait


def _command(
    cpus: float, gpus: float, port: int, dashboard: int, client: int, agent: int
) -> list[str]:
    return [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        f"--node-ip-address={HOST}",
        f"--num-cpus={cpus:g}",
        f"--num-gpus={gpus:g}",
        f"--dashboard-host={HOST}",
        f"--dashboard-port={dashboard}",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}",
        "--disable-usage-stats",
    ]
