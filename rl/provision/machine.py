"""The processes of a container: Ray's head or node, and the commands that run beside it.

Invariants:
- Ray takes tokens only: the cluster's is in a file of mode 0600, or in the secret that Modal
  has put into this process's environment, and on no command line.
- Every wait has a deadline, and nothing that was started here outlives `stop`.

Run as a program, it waits until a cluster has so many nodes:
`python -m rl.provision.machine HOST:PORT N`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actors.guarded_process import KILL_MARGIN_S
from actors.local_head import JoinedNode, LocalHead
from actors.ray_auth import TOKEN_VARIABLE, use_tokens
from rl.errors import DeadlineExceeded, InfrastructureError, run_command
from rl.provision.order import OWN, SOURCES

FOLDER: Final = OWN / "ray"  # token and log of Ray
HEAD_PORT: Final = 6379  # at which the other machines of a cluster join
HEAD_S: Final = 180.0  # a head is there after ten seconds, on a cold disk after a minute
NODES_S: Final = 600.0  # Modal starts the containers of a cluster together
END_S: Final = 10.0  # of the half minute that a preempted container has
POLL_S: Final = 0.5


class Machine:
    """The processes of this container.

    Args:
        directory: where commands run: that of the sources.
        folder: of Ray's token and log.
    """

    def __init__(self, directory: Path = SOURCES, folder: Path = FOLDER) -> None:
        self._directory = directory
        self._folder = folder
        self._head: LocalHead | None = None

    @property
    def head(self) -> LocalHead:
        """The head that was started."""
        assert self._head is not None, "start_head comes first"
        return self._head

    def start_head(self, host: str | None = None) -> None:
        """Start Ray's head, and wait until it takes jobs.

        Args:
            host: the address at which other machines join; None: no other does.

        Raises:
            InfrastructureError: it has ended, or is not there in time.
        """
        if host is None:
            self._head = LocalHead(self._folder, None, None)
        else:
            self._head = LocalHead(
                self._folder, None, None, host=host, port=HEAD_PORT, token=_token()
            )
        asyncio.run(self._head.start(HEAD_S))

    def join(self, head: str, limit_s: float) -> None:
        """Be a node of the cluster whose head is at the address `head`, until that ends.

        Raises:
            InfrastructureError: it could not join, or the head is not there in time.
            DeadlineExceeded: the cluster has not ended in time.
        """
        node = JoinedNode(self._folder, f"{head}:{HEAD_PORT}", _token())
        asyncio.run(node.run(limit_s, NODES_S))

    def await_nodes(self, count: int) -> None:
        """Wait until the cluster has `count` nodes.

        Raises:
            InfrastructureError: it has not, in time.
        """
        wait = [sys.executable, "-m", "rl.provision.machine", self.head.address, str(count)]
        if self.run(wait, NODES_S + HEAD_S):
            raise InfrastructureError(f"the cluster did not get its {count} nodes", "Ray")

    def run(self, command: Sequence[str], limit_s: float) -> int:
        """Run a command to its end; its exit code.

        Raises:
            DeadlineExceeded: it was ended after `limit_s`.
        """
        environment = dict(os.environ) if self._head is None else self._head.environment()
        child = subprocess.Popen(
            command, cwd=self._directory, env=environment, start_new_session=True
        )
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
        if self._head is not None:
            asyncio.run(self._head.stop(KILL_MARGIN_S))
            self._head = None


def _token() -> str:
    """The cluster's token, of which every machine's secret is a copy.

    Raises:
        InfrastructureError: there is none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InfrastructureError("the cluster's token is missing", TOKEN_VARIABLE)
    return token


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its process group, by SIGKILL in the end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
            break


def main(argv: list[str]) -> int:
    """Wait for a cluster's nodes."""
    import ray

    address, count = argv[0], int(argv[1])
    use_tokens()
    ray.init(address=address, log_to_driver=False)
    limit = time.monotonic() + NODES_S
    while sum(bool(node["Alive"]) for node in ray.nodes()) < count:
        if time.monotonic() > limit:
            raise DeadlineExceeded(f"has not {count} nodes after {NODES_S:g} s", address)
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    run_command(main)
