"""A rehearsal: the whole launch and the whole campaign, before money is spent.

`Rehearsing.run` reads from top to bottom as a launch goes.  Invariants:
- The campaign is submitted as any other is: by `rl.submit`, to a Ray cluster that takes
  tokens, with an intent and a receipt.
- Failures are made on the way, and their recovery is waited for, each with a deadline.
- What was walked is told step by step; the first wait that runs out ends the rehearsal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from actors.calls import together
from actors.local_head import LocalHead
from actors.placement import bundles
from rl.config import CampaignConfig, SandboxConfig
from rl.errors import EXIT_OK, EvidenceError, Interrupted
from rl.evidence.code_pin import CodePin, pin_code
from rl.evidence.intents import new_intent, submission_name
from rl.evidence.layout import CampaignDir, new_run_id
from rl.evidence.receipts import Ledger
from rl.evidence.rehearsals import FILE, DryRun, Rehearsal, WalkedStep
from rl.files import disk_errors, json_bytes, write_bytes, write_json
from rl.guards import Launch, launch_guards, walk
from rl.prepare import PreparedTasks, prepare_tasks
from rl.progress import Progress
from rl.rehearsal import STOOD_IN, prepare_stand_ins, stand_in
from rl.rehearsal_watch import POLL_S, Watch, end, processes
from rl.running import ROOT
from sandboxes.provider import SandboxProvider

HEAD_START_S = 120.0
HEAD_STOP_S = 30.0
RECOVERY_S = 180.0
GONE_S = 30.0
ENGINE = "actors.scripted_engine"
DRIVER = "rl.final"


@dataclass
class Rehearsing:
    """One rehearsal.

    Args:
        config: what is rehearsed.
        origin: the file that it was read from, and what replaces its values.
        state: where task packages, gates and rehearsals are kept.
        folder: the rehearsal's own.
        progress: what the person sees.
    """

    config: CampaignConfig
    origin: str
    state: Path
    folder: Path
    progress: Progress
    _steps: list[WalkedStep] = field(default_factory=list[WalkedStep])
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.folder, CampaignDir(self.folder / "campaigns" / self._run_id))

    @property
    def _run_id(self) -> str:
        return self.folder.name

    async def run(self) -> Rehearsal:
        """Rehearse; what was walked is also in rehearsal.json.

        Raises:
            CampaignError: it could not go on; the folder holds what there is.
        """
        began, clock = time.time(), time.monotonic()
        code = pin_code(ROOT)
        tasks = await asyncio.to_thread(prepare_tasks, self.config.tasks, self.state)
        self._share()
        await self._rehearse_campaign(tasks)
        self._walk_guards(tasks, code)
        self._walk_ambiguity()
        await self._walk_end()
        rehearsal = Rehearsal(
            name=self.config.name,
            config_digest=self.config.digest(),
            code=code,
            stood_in=list(STOOD_IN),
            steps=self._steps,
            dry_runs=self._dry_runs(tasks),
            began_at=began,
            seconds=time.monotonic() - clock,
        )
        write_json(self.folder / FILE, rehearsal)
        return rehearsal

    # ---- the launch -----------------------------------------------------

    async def _rehearse_campaign(self, tasks: PreparedTasks) -> None:
        """Submit the campaign, break it twice, and see it to its end."""
        config = stand_in(self.config, self.folder)
        cpus, gpus = (self._capacity(config, key) for key in ("CPU", "GPU"))
        head = LocalHead(self.folder / "ray", max(cpus, 1.0), gpus)
        self.progress.stage(
            "stand-ins",
            f"model, replies, and Ray with {cpus:g} logical CPUs and {gpus:g} logical GPUs",
        )
        every = [*tasks.train, *tasks.heldout]
        made = asyncio.to_thread(prepare_stand_ins, config, every, tasks.root, self.folder)
        try:
            await together(head.start(HEAD_START_S), made)
            write_bytes(self.folder / "config.json", json_bytes(config))
            await self._walk_launch(head)
        finally:
            await head.stop(HEAD_STOP_S)

    async def _walk_launch(self, head: LocalHead) -> None:
        updates = self.config.schedule.updates
        first, second = max(1, updates // 3), max(1, 2 * updates // 3)
        self.progress.stage("submit", f"{submission_name(self._run_id, 1)}, through rl.submit")
        new = ["--config", str(self.folder / "config.json"), "--run-id", self._run_id]
        part = ["--train-only"] if self._rented else []
        job = await self._watch.submit(head, *new, *part)
        try:
            reached = self._watch.has_checkpoint
            await self._watch.until("the first submission trains", reached(first), job)
            await self._lose_an_engine(job)
            await self._watch.until("the campaign goes on", reached(second), job)
            await self._lose_the_driver(job)
        finally:
            await end(job)
        self.progress.stage("submit", f"{submission_name(self._run_id, 2)}: the campaign continues")
        job = await self._watch.submit(head, "--resume", self._run_id, *part)
        try:
            code = await self._watch.follow(job)
        finally:
            await end(job)
        self._step("the continued campaign", "exit code 0", f"exit code {code}", code == EXIT_OK)
        walked = [self._launch_again(head, new)]
        if self._rented:
            walked.append(self._walk_workers(head))
        await together(*walked)

    async def _walk_workers(self, head: LocalHead) -> None:
        """Evaluate each shard in a run of its own, as held-out workers do, then report."""
        shards = self.config.heldout.shards
        self.progress.stage("workers", f"{shards} held-out shards, a run for each; the report")
        runs = [f"{self._run_id}-shard{shard}" for shard in range(1, shards + 1)]
        jobs: list[Process] = []
        try:
            for shard, run in enumerate(runs, start=1):
                which = (self._run_id, "--shard", f"{shard}/{shards}", "--run-id", run)
                where = ("--address", head.address, "--no-dashboard")
                jobs.append(await self._watch.start(head, "rl.heldout", *which, *where))
            codes = [await self._watch.follow(job) for job in jobs]
            taken = [part for run in runs for part in ("--take-in", run)]
            resume = ("--resume", self._run_id, "--no-dashboard", *taken)
            jobs.append(await self._watch.start(head, "rl.final", *resume))
            codes.append(await self._watch.follow(jobs[-1]))
        finally:
            for job in jobs:
                await end(job)
        found = f"exit codes {', '.join(map(str, codes))}"
        passed = not any(codes)
        self._step("the held-out workers, and the report", "exit codes 0", found, passed)

    async def _lose_an_engine(self, job: Process) -> None:
        """Kill a replica's engine; the replica must come back with the current version."""
        began = time.monotonic()
        before = self._watch.count("replica_back")
        victims = processes(ENGINE, str(self.folder))
        os.kill(min(victims), signal.SIGKILL)
        await self._watch.until(
            "an engine is killed",
            lambda: self._watch.count("replica_back") > before,
            job,
            RECOVERY_S,
        )
        self._step(
            "a replica's engine is killed",
            "the replica is restarted and proves the current version",
            "it is back in rotation",
            True,
            began,
        )

    async def _lose_the_driver(self, job: Process) -> None:
        """Kill the driver; whoever follows it must be told, and nothing of it may be left."""
        began = time.monotonic()
        for pid in processes(DRIVER, self._run_id, without="rl.submit"):
            os.kill(pid, signal.SIGKILL)
        code = await self._watch.follow(job)
        self._step(
            "the driver is killed",
            "the follower ends with a failure",
            f"exit code {code}",
            code != EXIT_OK,
            began,
        )
        began, limit = time.monotonic(), time.monotonic() + GONE_S
        while (left := processes(ENGINE, str(self.folder))) and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        self._step(
            "engines of a killed driver", "none is left", f"{len(left)} left", not left, began
        )

    async def _launch_again(self, head: LocalHead, new: list[str]) -> None:
        """Launch what has been launched: nothing may be submitted a second time."""
        began = time.monotonic()
        ledger = Ledger(self.folder / "receipts")
        before = [entry.intent.submission_id for entry in ledger.entries(self._run_id)]
        job = await self._watch.submit(head, *new)
        try:
            code = await self._watch.follow(job)
        finally:
            await end(job)
        after = [entry.intent.submission_id for entry in ledger.entries(self._run_id)]
        self._step(
            "the same launch again",
            "attaches; two submissions as before",
            f"exit code {code}, submissions {', '.join(after)}",
            after == before and len(after) == 2,
            began,
        )

    # ---- what is walked beside it ---------------------------------------

    def _walk_guards(self, tasks: PreparedTasks, code: CodePin) -> None:
        self.progress.stage("guards", "those of a launch, on the configuration itself")
        launch = Launch(
            self.config, self.origin, tasks.train, tasks.heldout, tasks.root, code, self.state
        )
        for one in walk(launch_guards(launch)):
            self._step(f"guard: {one.name}", "holds", one.found, one.refusal is None)

    def _walk_ambiguity(self) -> None:
        """A launcher that dies between intent and receipt blocks its run until it is resolved."""
        ledger = Ledger(self.folder / "receipts")
        lost = f"{self._run_id}-lost"
        with ledger.claim(new_intent(lost, submission_name(lost, 1), "modal", "nobody", "train")):
            pass  # no receipt: as if this process had died here
        refused = ""
        try:
            with ledger.claim(
                new_intent(lost, submission_name(lost, 2), "modal", "nobody", "train")
            ):
                pass
        except EvidenceError as error:
            refused = error.what
        ledger.resolve(lost, submission_name(lost, 1), "absent", "rehearsed: nobody was asked")
        ledger.require_settled(lost)
        self._step(
            "a launcher dies between intent and receipt",
            "the run is refused until a finding is stated",
            refused or "was not refused",
            bool(refused),
        )

    async def _walk_end(self) -> None:
        """The evidence of the campaign, and what is left of it."""
        directory = self._watch.campaign
        text = directory.audit.read_text(encoding="utf-8") if directory.audit.exists() else ""
        clean = '"findings": []' in text
        found = "no findings" if clean else (text or "there is no audit")
        self._step("audit", "no findings", found, clean)
        self._step(
            "report",
            "is written",
            str(directory.report) if directory.report.exists() else "is missing",
            directory.report.exists(),
        )
        left = processes(str(self.folder), without="--rehearse")
        self._step("processes", "none is left", f"{len(left)} left", not left)

    def _dry_runs(self, tasks: PreparedTasks) -> list[DryRun]:
        """What was run to its end: training, and each shard under each arm."""
        config, directory = self.config, self._watch.campaign
        trained = sum(row.episodes for row in directory.metrics_rows().read())
        runs = [DryRun(name="train", planned=config.training_episodes, graded=trained)]
        names = [task.digest for task in tasks.heldout[: config.heldout_tasks]]
        shard_of = {digest: n % config.heldout.shards for n, digest in enumerate(names)}
        graded: Counter[tuple[str, int]] = Counter(
            (str(record.arm), shard_of[record.task_digest])
            for record in directory.episodes("heldout")
            if record.outcome == "graded"
        )
        for arm in ("base", f"step{config.schedule.updates}"):
            for shard in range(config.heldout.shards):
                planned = sum(n == shard for n in shard_of.values()) * config.heldout.attempts
                runs.append(
                    DryRun(
                        name=f"{arm}/shard {shard}", planned=planned, graded=graded[(arm, shard)]
                    )
                )
        return runs

    # ---- inside ---------------------------------------------------------

    @property
    def _rented(self) -> bool:
        """Whether containers of their own evaluate what another has trained."""
        return self.config.modal is not None

    def _capacity(self, config: CampaignConfig, resource: str) -> float:
        """What the campaign needs of a resource at its widest."""

        def total(config: CampaignConfig, *, trainer: bool) -> float:
            asked = bundles(config, trainer=trainer)
            return sum(one.resources.get(resource, 0.0) for one in asked)

        one = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": 1})})
        workers = config.heldout.shards * total(one, trainer=False) if self._rented else 0.0
        return max(total(config, trainer=True), workers)

    def _share(self) -> None:
        """What is prepared and gated once need not be again, here nor afterwards."""
        for name in ("gates", "tasks"):
            shared = (self.state / name).resolve()
            shared.mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to(shared, target_is_directory=True)

    def _step(
        self, name: str, expected: str, found: str, passed: bool, began: float | None = None
    ) -> None:
        took = 0.0 if began is None else time.monotonic() - began
        self._steps.append(
            WalkedStep(name=name, expected=expected, found=found, passed=passed, seconds=took)
        )
        self.progress.note(f"{'ok    ' if passed else 'FAILED'} {name}: {found}")


def rehearse(config: CampaignConfig, origin: str, state: Path, as_json: bool) -> int:
    """Rehearse `config`; returns the command's exit code.

    Raises:
        CampaignError: something did not go as it had to; what it was is named.
    """
    folder = state / "rehearsals" / new_run_id(config.name)
    with disk_errors(folder):
        folder.mkdir(parents=True)
    SandboxProvider(SandboxConfig()).preflight()
    with Progress(stderr=as_json) as progress:
        walking = Rehearsing(config, origin, state, folder, progress)
        try:
            rehearsal = asyncio.run(walking.run())
        except asyncio.CancelledError:
            raise Interrupted("stopped", str(folder), "rehearse again from the start") from None
        progress.stage("done", f"rehearsed in {rehearsal.seconds:.0f} s, {folder / FILE}")
        for run in rehearsal.dry_runs:
            progress.note(f"dry run {run.name}: {run.graded} of {run.planned} episodes")
    if as_json:
        print(rehearsal.model_dump_json(indent=2))
    if rehearsal.problems:
        raise EvidenceError(
            "\n  - ".join(["the rehearsal has failed:", *rehearsal.problems]),
            str(folder),
            "see the logs there; correct it, then rehearse again",
        )
    return EXIT_OK
