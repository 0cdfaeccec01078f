"""What `rl.submit` does once it knows what is asked: settle, submit, follow, stop.

`Submission._settle` is the whole decision: which job is to be followed, and whether it has to
be submitted first.  Invariants: those of `rl.submit`.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from actors.ray_auth import use_tokens
from actors.ray_jobs import Job, JobTaken, RayJobs
from rl.config import CampaignConfig
from rl.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    CampaignError,
    ConfigurationError,
    DeadlineExceeded,
    InfrastructureError,
)
from rl.evidence.code_pin import SUBMITTED_CODE, CodePin
from rl.evidence.intents import Entry, Intent, attempt_of, new_intent, submission_name
from rl.evidence.receipts import Ledger
from rl.evidence.snapshot import source_tar
from rl.files import json_bytes, write_bytes
from rl.running import ROOT

CONFIG_FILE = "submitted.json"  # in the job's copy of the sources
SETTLE_S = 120.0  # another launcher uploads the sources in that time
STATUS_S = 5.0  # between two looks at a job's status
OUTAGE_S = 300.0  # how long a cluster that does not answer is waited for
STOP_MARGIN_S = 30.0  # beyond the limits of draining and stopping
LAST_LINES = 30  # of a job that had ended before it was attached to
SIGNAL_BASE = 128  # an exit by signal n, as shells tell it


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a submission stands."""

    submission_id: str
    status: str
    exit_code: int
    message: str = ""

    def row(self) -> dict[str, Any]:
        """For a script."""
        return {
            "submission_id": self.submission_id,
            "status": self.status,
            "exit_code": self.exit_code,
            "message": self.message,
        }


@dataclass
class Submission:
    """A campaign that is to run on a cluster.

    Args:
        address: of the cluster's job server.
        run_id: the campaign's.
        resume: whether it continues.
        config: of a new campaign; for a continued one only its limits matter here.
        state: where the campaign is kept, where the driver runs.
        receipts: where intents and receipts are kept.
        variables: of the job's environment.
        code: the pin of the sources that are submitted.
        train_only: whether evaluation and report are left.
        out: where the job's output goes.
    """

    address: str
    run_id: str
    resume: bool
    config: CampaignConfig
    state: Path
    receipts: Path
    variables: Mapping[str, str]
    code: CodePin
    train_only: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)

    @property
    def again(self) -> str:
        """The command that attaches."""
        return self._command("--run-id")

    @property
    def stopping(self) -> str:
        """The command that stops it."""
        return self._command("--stop")

    @property
    def entrypoint(self) -> str:
        """What the job runs."""
        what = (
            ["--resume", self.run_id]
            if self.resume
            else ["--config", CONFIG_FILE, "--run-id", self.run_id]
        )
        part = ["--train-only"] if self.train_only else []
        return shlex.join(["python", "-m", "rl.final", *what, "--state", str(self.state), *part])

    def plan(self) -> dict[str, Any]:
        """What would be submitted."""
        return {
            "address": self.address,
            "run_id": self.run_id,
            "entrypoint": self.entrypoint,
            "variables": self._variables(),
            "config_digest": "" if self.resume else self.config.digest(),
            "commit": self.code.commit,
            "submitted_before": [
                {"submission_id": entry.intent.submission_id, "standing": entry.standing}
                for entry in self._ledger.entries(self.run_id)
            ],
        }

    async def run(self, detach: bool) -> Outcome:
        """Submit what is not submitted, then follow it.

        Raises:
            CampaignError: it was refused, or the cluster is out of reach.
        """
        async with self._connected() as jobs:
            name = await self._settle(jobs)
            if detach:
                self._say(f"submitted as {name}; follow it with: {self.again}")
                return Outcome(name, "SUBMITTED", EXIT_OK)
            return await self._follow(jobs, name)

    async def stop(self) -> Outcome:
        """Have the newest job stop in order, and wait for its end.

        Raises:
            ConfigurationError: nothing was submitted under this name.
            DeadlineExceeded: it has not ended in time.
        """
        entries = self._ledger.entries(self.run_id)
        if not entries:
            raise ConfigurationError(
                f"nothing was submitted as '{self.run_id}'",
                str(self.receipts),
                "see `python -m rl.receipts ls`",
            )
        name = entries[-1].intent.submission_id
        async with self._connected() as jobs:
            job = await self._found(jobs, name)
            if not job.ended:
                self._say(f"{name}: asked to stop in order")
                await jobs.stop(name)
            limit = time.monotonic() + self._stop_s
            while not job.ended:
                if time.monotonic() > limit:
                    raise DeadlineExceeded(
                        f"has not ended within {self._stop_s:g} s", name, "see its log"
                    )
                await asyncio.sleep(1.0)
                job = await self._found(jobs, name)
            self._say(f"{name} has ended: {job.status}")
            return Outcome(name, job.status, EXIT_OK, job.message)

    # ---- submitting -----------------------------------------------------

    async def _settle(self, jobs: RayJobs) -> str:
        """The submission to follow; it is submitted when this returns."""
        while True:
            entries = self._ledger.entries(self.run_id)
            newest = entries[-1] if entries else None
            if newest is not None and newest.held:
                name = newest.intent.submission_id
                self._say(f"process {newest.intent.pid} is submitting {name}: waiting for it")
                newest = await asyncio.to_thread(
                    self._ledger.await_settled, self.run_id, name, SETTLE_S
                )
            if newest is not None and newest.standing == "ambiguous":
                return await self._submit_again(jobs, newest)
            if newest is not None and newest.standing == "submitted":
                following = await self._attach(jobs, newest)
                if following:
                    return newest.intent.submission_id
            attempt = 1 + max((attempt_of(e.intent.submission_id) for e in entries), default=0)
            intent = self._intent(attempt)
            try:
                with self._ledger.claim(intent):
                    taken = await self._submit(jobs, intent)
            except ConfigurationError:
                if len(self._ledger.entries(self.run_id)) > len(entries):
                    continue  # somebody was faster: see what there is now
                raise
            if taken is None:
                return intent.submission_id
            self._refuse_taken(intent, taken)

    async def _attach(self, jobs: RayJobs, newest: Entry) -> bool:
        """Whether there is a job to follow; False: a further attempt is to be submitted."""
        name = newest.intent.submission_id
        if newest.intent.target != self.address:
            raise ConfigurationError(
                f"was submitted to {newest.intent.target}",
                name,
                f"give --address {newest.intent.target}, or choose another --run-id",
            )
        job = await jobs.find(name)
        if self.resume and (job is None or job.ended):
            return False
        if job is None:
            raise ConfigurationError(
                f"was submitted, and the cluster does not know it any more: {self._resuming}",
                name,
                "a cluster that is started afresh has forgotten its jobs",
            )
        self._say(f"attached to {name}: {job.status}")
        return True

    async def _submit_again(self, jobs: RayJobs, entry: Entry) -> str:
        """Settle an intent whose launcher has died: its id is the cluster's key."""
        intent = entry.intent
        if intent.provider != "ray" or intent.target != self.address:
            self._ledger.require_settled(self.run_id)
        with self._ledger.reclaim(entry):
            self._say(f"{intent.submission_id} was begun and has no receipt: asking the cluster")
            taken = await self._submit(jobs, intent)
        if taken is not None:
            self._refuse_taken(intent, taken)
        return intent.submission_id

    async def _submit(self, jobs: RayJobs, intent: Intent) -> Job | None:
        """Submit under the intent's lock; somebody else's job of this id, if there is one."""
        digest = self._ledger.digest(intent)
        metadata = {"run_id": self.run_id, "intent": digest, "host": intent.host}
        try:
            with tempfile.TemporaryDirectory(prefix="rl-submit-") as folder:
                stage(Path(folder), None if self.resume else self.config, self.code)
                environment = {"working_dir": folder, "env_vars": self._variables()}
                self._say(f"submitting {intent.submission_id} to {self.address}")
                await jobs.submit(intent.submission_id, self.entrypoint, environment, metadata)
        except JobTaken:
            job = await self._found(jobs, intent.submission_id)
            if job.metadata.get("intent") != digest:
                return job
        self._ledger.record(intent, {"job": intent.submission_id})
        return None

    def _refuse_taken(self, intent: Intent, job: Job) -> None:
        """Somebody else's job has this id: ours was never submitted."""
        whose = job.metadata.get("host", "an unknown machine")
        reason = f"the cluster has a job of this id from {whose}"
        self._ledger.resolve(self.run_id, intent.submission_id, "absent", reason)
        raise ConfigurationError(
            f"the run id is taken on this cluster, by a job that {whose} has submitted",
            intent.submission_id,
            "choose another --run-id",
        )

    def _intent(self, attempt: int) -> Intent:
        return new_intent(
            self.run_id,
            submission_name(self.run_id, attempt),
            "ray",
            self.address,
            "job",
            shlex.split(self.entrypoint),
            {"run_id": self.run_id},
            config_digest="" if self.resume else self.config.digest(),
            commit=self.code.commit,
        )

    # ---- following ------------------------------------------------------

    async def _follow(self, jobs: RayJobs, name: str) -> Outcome:
        """Relay what the job prints until it has ended."""
        job = await self._found(jobs, name)
        relay = Relay(self.out, only_last=LAST_LINES if job.ended else None)
        heard = time.monotonic()
        while True:
            try:
                await relay.run(jobs, name)
                job = await self._found(jobs, name)
                heard = time.monotonic()
            except InfrastructureError as error:
                if time.monotonic() - heard > OUTAGE_S:
                    error.remedy = f"when the cluster is back: {self.again}"
                    raise
                self._say(f"the cluster does not answer ({error.what}); trying again")
            if job.ended:
                return self._outcome(job)
            await asyncio.sleep(STATUS_S)

    def _outcome(self, job: Job) -> Outcome:
        """The driver's own exit code.

        Raises:
            InfrastructureError: the job failed and its driver has none.
        """
        code = job.exit_code
        if code is None and job.status == "STOPPED":
            code = EXIT_INTERRUPTED
        if code is None:
            raise InfrastructureError(
                f"the job has {job.status.lower()}, and its driver told no exit code: "
                f"{job.message.strip() or 'no reason given'}",
                job.submission_id,
                self._resuming,
            )
        shown = SIGNAL_BASE - code if code < 0 else code
        self._say(f"{job.submission_id}: {job.status}, exit code {shown}")
        if shown != EXIT_OK:
            self._say(self._resuming)
        return Outcome(job.submission_id, job.status, shown, job.message)

    # ---- inside ---------------------------------------------------------

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.receipts)

    @property
    def _resuming(self) -> str:
        return f"continue it with: {self._command('--resume')}"

    @property
    def _stop_s(self) -> float:
        limits = self.config.limits
        return limits.drain_s + limits.stop_s + STOP_MARGIN_S

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[RayJobs]:
        use_tokens()
        jobs = RayJobs(self.address)
        await jobs.connect()
        yield jobs

    async def _found(self, jobs: RayJobs, name: str) -> Job:
        job = await jobs.find(name)
        if job is None:
            raise ConfigurationError("the cluster does not know it", name, self._resuming)
        return job

    def _variables(self) -> dict[str, str]:
        # Ray kills a driver 3 s after SIGTERM unless it is told otherwise.
        return {
            **self.variables,
            "RAY_JOB_STOP_WAIT_TIME_S": f"{self._stop_s:.0f}",
            "PYTHONUNBUFFERED": "1",
        }

    def _command(self, option: str) -> str:
        parts = ["python", "-m", "rl.submit", "--address", self.address, option, self.run_id]
        return shlex.join([*parts, "--state", str(self.state), "--receipts", str(self.receipts)])

    def _say(self, text: str) -> None:
        print(f"submit: {text}", file=self.out, flush=True)


@dataclass
class Relay:
    """Prints what a job prints, every character once, over broken connections too.

    Args:
        out: where to.
        only_last: of all that was there before, only so many lines.
    """

    out: TextIO
    only_last: int | None = None
    _shown: int = 0

    async def run(self, jobs: RayJobs, name: str) -> None:
        """Relay until the job ends.

        Raises:
            InfrastructureError: the connection broke.
        """
        position, kept = 0, ""
        try:
            async for piece in jobs.tail(name):
                fresh = piece[max(0, self._shown - position) :]
                position += len(piece)
                if self.only_last is not None:
                    kept += fresh
                elif fresh:
                    self.out.write(fresh)
                    self.out.flush()
                self._shown = max(self._shown, position)
        except CampaignError:
            raise
        except (RuntimeError, OSError) as error:  # aiohttp's connection errors are OSErrors
            raise InfrastructureError(f"its log: {error}", jobs.address) from error
        if kept:
            self.out.write("".join(kept.splitlines(keepends=True)[-(self.only_last or 0) :]))
            self.out.flush()


def stage(folder: Path, config: CampaignConfig | None, code: CodePin) -> None:
    """Put what a job needs into `folder`: the sources, their pin, the configuration."""
    with tarfile.open(fileobj=io.BytesIO(source_tar(ROOT))) as tar:
        tar.extractall(folder, filter="data")
    write_bytes(folder / SUBMITTED_CODE, json_bytes(code))
    if config is not None:
        write_bytes(folder / CONFIG_FILE, json_bytes(config))
