"""A Ray node of this machine, started by us and ended with us: a cluster's head, or one more.

Invariants:
- It takes tokens only: the cluster's lies in a file of mode 0600, and is on no command line
  and in no environment.
- A cluster of this machine alone listens on the loopback address alone; of a larger one the
  job server and the dashboard do, and Ray's daemons take tokens like everything else.
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
from collections.abc import Sequence
from pathlib import Path

from actors.engine_command import HOST
from actors.engine_process import free_port
from actors.guarded_process import KILL_MARGIN_S, GuardedProcess
from actors.ray_auth import OWNER_ONLY, TOKEN_BYTES
from actors.ray_listening import LOOPBACK
from rl.errors import DeadlineExceeded, InfrastructureError
from rl.files import disk_errors, write_all

POLL_S = 0.3
ANSWER_S = 10.0
HEAD_GONE_S = "15"  # a head does not come back; Ray itself would wait for a minute
JOINED = "Ray runtime started"  # what `ray start` says of a node that is one


class OwnNode(GuardedProcess):
    """See the module's invariants.

    Args:
        folder: of its own: token and log.
        options: of `ray start`.
        token: the cluster's; one is drawn if it is empty.
    """

    def __init__(self, folder: Path, options: Sequence[str], token: str = "") -> None:
        folder = folder.resolve()
        self._token_path = folder / "auth_token"
        self._token = token or secrets.token_hex(TOKEN_BYTES)
        ray = str(Path(sys.executable).parent / "ray")
        command = [ray, "start", "--block", "--disable-usage-stats", *options]
        super().__init__(command, self._own_environment(), folder / "ray.log")

    def environment(self) -> dict[str, str]:
        """The environment of whoever talks to the cluster; names the token's file."""
        return self._own_environment()

    def _own_environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        binaries = Path(sys.executable).parent
        return inherited | {
            # Jobs run `python`: this one, whichever is first elsewhere.
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

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
        with disk_errors(self._token_path):
            self._token_path.parent.mkdir(parents=True, exist_ok=True)
            self._token_path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._token_path, flags, OWNER_ONLY)
            try:
                write_all(descriptor, self._token.encode())
            finally:
                os.close(descriptor)


class LocalHead(OwnNode):
    """The head of a cluster of its own.

    Args:
        folder: of its own: token and log.
        cpus: logical CPUs of this node; None: those that there are.
        gpus: logical GPUs of this node; they need not be there; None: those that there are.
        host: the address at which other nodes reach it.
        port: of the cluster; any free one if it is 0.
        token: the cluster's; one is drawn if it is empty.
    """

    def __init__(
        self,
        folder: Path,
        cpus: float | None,
        gpus: float | None,
        *,
        host: str = HOST,
        port: int = 0,
        token: str = "",
    ) -> None:
        # None is the default: another Ray may be here.
        dashboard, client, agent = (free_port() for _ in range(3))
        self.address = f"{host}:{port or free_port()}"
        self.job_server = f"http://{HOST}:{dashboard}"
        self.dashboard_port = dashboard
        options = [
            "--head",
            f"--port={self.address.rpartition(':')[2]}",
            f"--node-ip-address={host}",
            f"--dashboard-host={HOST}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
            f"--dashboard-agent-listen-port={agent}",
        ]
        self._alone = host == HOST
        options += [] if cpus is None else [f"--num-cpus={cpus:g}"]
        options += [] if gpus is None else [f"--num-gpus={gpus:g}"]
        super().__init__(folder, options, token)

    def environment(self) -> dict[str, str]:
        """The environment of whoever talks to it; names the token's file."""
        return self._own_environment() | {"RAY_ADDRESS": self.job_server}

    def _own_environment(self) -> dict[str, str]:
        return super()._own_environment() | (LOOPBACK if self._alone else {})

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

    def _answers(self) -> bool:
        """Whether the job server takes our token."""
        request = urllib.request.Request(
            f"{self.job_server}/api/jobs/", headers={"Authorization": f"Bearer {self._token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False  # not yet; the caller bounds the wait


class JoinedNode(OwnNode):
    """One more node of a cluster whose head is elsewhere.

    Args:
        folder: of its own: token and log.
        head: HOST:PORT of the head.
        token: the cluster's.
    """

    def __init__(self, folder: Path, head: str, token: str) -> None:
        self._head = head
        super().__init__(folder, [f"--address={head}"], token)

    def _own_environment(self) -> dict[str, str]:
        return super()._own_environment() | {"RAY_gcs_rpc_server_reconnect_timeout_s": HEAD_GONE_S}

    async def run(self, limit_s: float, head_s: float) -> None:
        """Be there until the cluster ends.

        Args:
            limit_s: how long the cluster may be there, s.
            head_s: how long its head is waited for, s.

        Raises:
            InfrastructureError: it could not join; its log's last lines say why.
            DeadlineExceeded: the head was not there in time, or the cluster has not ended.
        """
        await self._await_head(head_s)
        self._write_token()
        self._spawn()
        limit = time.monotonic() + limit_s
        try:
            while self.alive():
                if time.monotonic() > limit:
                    raise DeadlineExceeded(f"has not ended within {limit_s:g} s", self._head)
                self.remember_tree()
                await asyncio.sleep(POLL_S)
        finally:
            await self.stop(KILL_MARGIN_S)
        if JOINED not in self.log_path.read_text(encoding="utf-8", errors="replace"):
            raise InfrastructureError(
                f"Ray did not join; its log ends:\n{self.log_tail()}", str(self.log_path)
            )

    async def _await_head(self, limit_s: float) -> None:
        host, _, port = self._head.rpartition(":")
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            try:
                async with asyncio.timeout(ANSWER_S):
                    _, writer = await asyncio.open_connection(host, int(port))
            except OSError:  # TimeoutError is one
                await asyncio.sleep(POLL_S)
                continue
            writer.close()
            return
        raise DeadlineExceeded(f"nothing listens after {limit_s:g} s", self._head)
