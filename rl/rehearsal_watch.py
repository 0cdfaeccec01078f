"""Watching a rehearsed campaign from outside: its job, its events, its processes.

Invariant: every wait has a deadline, and whoever waits is told what the log said last.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from actors.local_head import LocalHead
from rl.errors import DeadlineExceeded, InfrastructureError
from rl.evidence.events import Event, read_events
from rl.evidence.layout import CampaignDir
from rl.running import ROOT

EVENT_S = 600.0  # until the next thing of a small machine's campaign happens
END_S = 20.0
POLL_S = 0.5
LOG_LINES = 15


@dataclass
class Watch:
    """The campaign of one rehearsal.

    Args:
        folder: the rehearsal's.
        campaign: the campaign's, below it.
    """

    folder: Path
    campaign: CampaignDir
    _logs: int = 0
    _read: tuple[int, list[Event]] = field(default=(0, []))

    async def submit(self, head: LocalHead, *arguments: str) -> Process:
        """Start `rl.submit` against the head's job server."""
        receipts = str((self.folder / "receipts").resolve())
        where = ("--address", head.job_server, "--receipts", receipts)
        return await self.start(head, "rl.submit", *arguments, *where)

    async def start(self, head: LocalHead, module: str, *arguments: str) -> Process:
        """Start a command of the project, with the rehearsal's state and a log of its own."""
        self._logs += 1
        state = ("--state", str(self.folder.resolve()))
        with self._log.open("wb") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                *state,
                cwd=ROOT,
                env=head.environment(),
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )

    @property
    def _log(self) -> Path:
        """Of the newest command."""
        return self.folder / f"command-{self._logs}.log"

    async def follow(self, job: Process) -> int:
        """Wait for the job, as long as it gets on; its exit code."""
        seen, limit = self._size(), time.monotonic() + EVENT_S
        while job.returncode is None:
            if time.monotonic() > limit:
                raise DeadlineExceeded(
                    f"nothing happened for {EVENT_S:g} s", str(self.campaign.root), self._tail()
                )
            await asyncio.sleep(POLL_S)
            if (size := self._size()) != seen:
                seen, limit = size, time.monotonic() + EVENT_S
        return job.returncode

    async def until(
        self,
        what: str,
        happened: Callable[[], bool],
        job: Process,
        limit_s: float = EVENT_S,
    ) -> None:
        """Wait for something that the campaign's events tell.

        Raises:
            InfrastructureError: the job ended before.
            DeadlineExceeded: it did not happen in time.
        """
        limit = time.monotonic() + limit_s
        while not happened():
            if job.returncode is not None:
                raise InfrastructureError(
                    f"the job ended with exit code {job.returncode}", what, self._tail()
                )
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"not within {limit_s:g} s", what, self._tail())
            await asyncio.sleep(POLL_S)

    def has_checkpoint(self, update: int) -> Callable[[], bool]:
        return lambda: any(
            event.kind == "checkpoint" and int(str(event.fields["updates_done"])) >= update
            for event in self._events()
        )

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self._events())

    def _events(self) -> list[Event]:
        """The campaign's events, read again when there are more."""
        size = self._size()
        if size != self._read[0]:
            self._read = size, read_events(self.campaign.events, live=True)
        return self._read[1]

    def _size(self) -> int:
        path = self.campaign.events
        return path.stat().st_size if path.exists() else 0

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n     ".join([f"{self._log} ends:", *text.splitlines()[-LOG_LINES:]])


def processes(*parts: str, without: str | None = None) -> list[int]:
    """Ids of this machine's other processes whose command lines hold all of `parts`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended since
        if all(part in command for part in parts) and not (without and without in command):
            found.append(int(entry.name))
    return found


async def end(job: Process) -> None:
    """End a follower that is still there."""
    if job.returncode is None:
        job.terminate()
        try:
            async with asyncio.timeout(END_S):
                await job.wait()
        except TimeoutError:
            job.kill()
            await job.wait()
