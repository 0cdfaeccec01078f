"""The processes of a container: Ray's head or node, and the commands that run beside it.

Invariants:
- Ray starts with tokens on; the token is in a file of mode 0600, or where Modal has put it,
  and on no command line.
- Every wait has a deadline, and nothing that was started here outlives `stop`.

Run as a program, it waits until a cluster has so many nodes: `python -m rl.provision.machine N`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actors.ray_auth import use_tokens
from rl.errors import DeadlineExceeded, InfrastructureError, run_command
from rl.provision.order import SOURCES

HEAD_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
HEAD_S: Final = 180.0  # a head is there after ten seconds, on a cold disk after a minute
NODES_S: Final = 600.0  # Modal starts the containers of a cluster together
END_S: Final = 10.0  # of the half minute that a preempted container has
POLL_S: Final = 0.5
JOB_S: Final = 60.0  # one submission of a job that does nothing
TOLD_CHARS: Final = 500  # of the reason why it was refused


class Machine:
    """The processes of this container."""

    def __init__(self, directory: Path = SOURCES) -> None:
        self._directory = directory
        self._ray: subprocess.Popen[bytes] | None = None

    def start_head(self, host: str = "127.0.0.1") -> None:
        """Start Ray's head, and wait until it takes jobs.

        Raises:
            InfrastructureError: it has ended, or is not there in time.
        """
        use_tokens()
        self._ray = self._ray_start(
            "--head",
            f"--node-ip-address={host}",
            f"--port={HEAD_PORT}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={DASHBOARD_PORT}",
        )
        self._await_port("127.0.0.1", DASHBOARD_PORT)
        self._await_jobs()

    def join(self, head: str, limit_s: float) -> None:
        """Be a node of the cluster of `head` until that ends.

        Raises:
            InfrastructureError: the head is not there in time.
            DeadlineExceeded: the cluster has not ended in time.
        """
        use_tokens()
        self._await_port(head, HEAD_PORT)
        self._ray = self._ray_start(f"--address={head}:{HEAD_PORT}")
        try:
            self._ray.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"the cluster has not ended in {limit_s:g} s", head) from None

    def await_nodes(self, count: int) -> None:
        """Wait until the cluster has `count` nodes.

        Raises:
            InfrastructureError: it has not, in time.
        """
        code = self.run([sys.executable, "-m", "rl.provision.machine", str(count)], NODES_S)
        if code:
            raise InfrastructureError(f"the cluster did not get its {count} nodes", "Ray")

    def run(self, command: Sequence[str], limit_s: float) -> int:
        """Run a command to its end; its exit code.

        Raises:
            DeadlineExceeded: it was ended after `limit_s`.
        """
        child = subprocess.Popen(command, cwd=self._directory, start_new_session=True)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"was ended after {limit_s:g} s", " ".join(command[1:4])
            ) from None
        finally:
            _end(child)

    def stop(self) -> None:
        """End Ray; its workers end when their node is gone.

        At once: the job has been stopped in order, and on SIGTERM a node would drain for longer
        than a preempted container lives.
        """
        if self._ray is not None:
            _end(self._ray, signal.SIGKILL)
            self._ray = None

    def _ray_start(self, *options: str) -> subprocess.Popen[bytes]:
        command = ["ray", "start", "--block", "--disable-usage-stats", *options]
        return subprocess.Popen(command, cwd=self._directory, start_new_session=True)

    def _await_jobs(self) -> None:
        """Wait until the head takes a job: its port listens before there is an agent to run one."""
        address = f"http://127.0.0.1:{DASHBOARD_PORT}"
        probe = ["ray", "job", "submit", "--no-wait", "--address", address, "--", "true"]
        limit, told = time.monotonic() + HEAD_S, ""
        while time.monotonic() < limit:
            self._require_alive()
            try:
                done = subprocess.run(
                    probe, capture_output=True, cwd=self._directory, timeout=JOB_S, check=False
                )
            except subprocess.TimeoutExpired:
                continue
            if done.returncode == 0:
                return
            told = (done.stderr.decode(errors="replace").strip() or "no reason given")[-TOLD_CHARS:]
            time.sleep(POLL_S)
        raise DeadlineExceeded(f"takes no job after {HEAD_S:g} s: {told}", address)

    def _require_alive(self) -> None:
        if self._ray is not None and self._ray.poll() is not None:
            code = self._ray.returncode
            raise InfrastructureError(f"ray start has ended with exit code {code}", "Ray")

    def _await_port(self, host: str, port: int) -> None:
        limit = time.monotonic() + HEAD_S
        while time.monotonic() < limit:
            self._require_alive()
            with contextlib.suppress(OSError), socket.create_connection((host, port), POLL_S):
                return
            time.sleep(POLL_S)
        raise DeadlineExceeded(f"nothing listens after {HEAD_S:g} s", f"{host}:{port}")


def _end(child: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """End a child and its process group, by SIGKILL in the end."""
    for number in (first, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
            break


def main(argv: list[str]) -> int:
    """Wait for a cluster's nodes."""
    import ray

    count = int(argv[0])
    use_tokens()
    ray.init(address="auto", log_to_driver=False)
    limit = time.monotonic() + NODES_S
    while sum(bool(node["Alive"]) for node in ray.nodes()) < count:
        if time.monotonic() > limit:
            raise DeadlineExceeded(f"has not {count} nodes after {NODES_S:g} s", "Ray")
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    run_command(main)
