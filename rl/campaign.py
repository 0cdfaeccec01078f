"""One campaign, from frozen configuration to report.

`Campaign.run` reads from top to bottom as the campaign goes.  Invariants:
- Everything is frozen before anything is gated, started or submitted, and
  verified again whenever the campaign continues.
- Nothing costly starts before every task has passed its gate.
- Whatever ends a campaign, its actors are stopped in order and its directory
  can be continued: each stage finds out from the evidence what is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from actors.calls import call, in_thread, together
from actors.cluster import RAYLET_START_S, Cluster, connect, start_serving, start_trainer
from actors.evaluation import Arm, HeldoutLoop
from actors.training import TrainingLoop
from rl.config import CampaignConfig
from rl.errors import DeadlineExceeded, EvidenceError
from rl.evidence.audit import audit
from rl.evidence.events import STAGE_DONE
from rl.evidence.frozen import CodePin, ModelPin, freeze, load_frozen, verify_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.recorder import Recorder
from rl.evidence.rows import BASE_ARM, ArmPin, Arms, Gates
from rl.evidence.rows import GateResult as GateRow
from rl.evidence.summary import read_json
from rl.files import sha256_files, write_json
from rl.learner import checkpoint
from rl.learner.inventory import inventory
from rl.prepare import PreparedModel, PreparedTasks
from rl.progress import Progress
from rl.records import TaskRef
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import FRESH, Frontier, Scheduler
from sandboxes.attempt import AttemptLimits
from sandboxes.gates import (
    GateResult,
    gate_all,
    load_report,
    require_gate,
    require_writable,
    save_report,
)
from sandboxes.provider import SandboxProvider, lifetime
from sandboxes.tasks import TaskPackage, load_package

GATES_AT_ONCE = 8  # sandboxes of a gate cost processor time, not waiting
VERIFY_S = 900.0  # loading the base model afresh, on a cold disk


@dataclass
class Campaign:
    """What a campaign is made of.

    Args:
        config: the whole configuration.
        directory: the campaign's own.
        model: the prepared base model.
        tasks: the prepared, split task packages.
        code: the program's pin.
        gate_report: results of gates by task digest, kept over campaigns.
        address: an existing Ray cluster; None starts one here.
        dashboard: whether a cluster started here has a dashboard.
        progress: what the person sees.
    """

    config: CampaignConfig
    directory: CampaignDir
    model: PreparedModel
    tasks: PreparedTasks
    code: CodePin
    gate_report: Path
    progress: Progress
    address: str | None = None
    dashboard: bool = True
    recorder: Recorder = field(init=False)
    _incarnation: int = field(init=False, default=0)

    async def run(self) -> None:
        """Run what is left of the campaign, once it is frozen.

        Raises:
            CampaignError: with a remedy; the directory can be continued.
        """
        config = self.config
        self.progress.plan(config.schedule.updates, config.heldout_attempts)
        self.recorder = Recorder(self.directory)
        cluster = Cluster(config)
        watchdog = asyncio.timeout(config.limits.watchdog_s)
        try:
            async with watchdog:
                self._take_over()
                await self._reap()
                await self._gate()
                async with self.recorder.lifecycle.step("start", config.limits.start_s):
                    await self._start(cluster)
                await self._train(cluster)
                arms = await self._verify_checkpoint(cluster)
                await self._evaluate(cluster, arms)
        except TimeoutError:
            if not watchdog.expired():
                raise
            raise DeadlineExceeded(
                f"the watchdog stopped the campaign after {config.limits.watchdog_s:.0f} s",
                str(self.directory.root),
                f"continue it with --resume {self.directory.run_id}",
            ) from None
        finally:
            await asyncio.shield(self._stop(cluster))
        self._report()

    # ---- stages ---------------------------------------------------------

    def freeze(self) -> None:
        """Freeze a new campaign; prove that a continued one is what was frozen."""
        pin = ModelPin(
            name=self.model.name,
            source=self.config.model.source,
            pin=self.config.model.revision or self.config.model.sha256 or "local files",
            files=self.model.files,
        )
        write = verify_frozen if self.directory.frozen.exists() else freeze
        write(
            self.directory,
            self.config,
            train=self.tasks.train,
            heldout=self.tasks.heldout,
            model=pin,
            code=self.code,
        )
        self.progress.note(f"campaign {self.directory.run_id}, frozen in {self.directory.frozen}")

    def _take_over(self) -> None:
        """Find out what an earlier driver has left, before anything costly starts.

        Raises:
            EvidenceError: evidence or checkpoint is damaged, or held-out attempts
                were made with weights that no checkpoint holds any more.
        """
        self._incarnation = self.recorder.begin()
        path = self._checkpoint()
        if path is not None:
            checkpoint.verify(path, self.config.digest())
        done = self._updates_done()
        for entry in inventory(self.directory.checkpoints):
            if entry.state == "damaged" and (entry.update or 0) > done:
                self.progress.note(f"{entry.path} is left alone, for {entry.problem}")
        pinned = read_json(self.directory.arms, Arms)
        if pinned is not None and pinned.final.version > done:
            raise EvidenceError(
                f"the evaluation of update {pinned.final.version} has begun, and the newest "
                f"complete checkpoint is of update {done}",
                str(self.directory.checkpoints),
                "restore that checkpoint, or start a new campaign",
            )
        lost, superseded = self.recorder.reconcile(done)
        if self._incarnation:
            self.progress.note(
                f"continuing after update {done}: {lost} attempts were lost with the driver, "
                f"{superseded} rows of later updates set aside"
            )

    async def _gate(self) -> None:
        """Gate every task that the campaign will use."""
        config = self.config
        tasks = [*self.tasks.train, *self.tasks.heldout[: config.heldout_tasks]]
        self._stage("gates", f"{len(tasks)} tasks: solution scores 1, doing nothing scores 0")
        require_writable(self.gate_report)
        packages = await asyncio.to_thread(self._packages, tasks)
        self._say_warnings(packages)
        report = load_report(self.gate_report)
        known = {package.digest for package in packages} & set(report.results)
        fresh: list[GateResult] = []

        def keep(result: GateResult) -> None:
            fresh.append(result)
            report.results[result.digest] = result
            save_report(report, self.gate_report)
            self.progress.gate(len(known) + len(fresh), len(tasks))

        limits = AttemptLimits(
            deadline_s=config.episodes.deadline_s,
            create_s=config.sandbox.create_timeout_s,
            verifier_s=config.episodes.verifier_timeout_s,
            stop_s=config.sandbox.stop_timeout_s,
        )
        await gate_all(
            packages,
            self._provider(),
            limits,
            concurrency=min(GATES_AT_ONCE, config.episodes.concurrency),
            done=report.results,
            on_result=keep,
        )
        self.directory.write_gates(_gate_rows(packages, report.results, known))
        require_gate(report, packages)
        self.progress.note(f"all {len(tasks)} passed, {len(known)} of them before")

    def _say_warnings(self, packages: Sequence[TaskPackage]) -> None:
        """Say which keys of the packages have no effect: how many, and the first."""
        found = [f"{item.name}: {warning}" for item in packages for warning in item.warnings]
        if found:
            self.progress.note(
                f"{len(found)} keys of packages have no effect, the first of {found[0]}; "
                f"all: python -m rl.gate {self.tasks.root}"
            )

    def _provider(self) -> SandboxProvider:
        limit = lifetime(self.config.episodes.deadline_s)
        return SandboxProvider(self.config.sandbox, limit, self.directory.run_id)

    async def _reap(self) -> None:
        """End the remote sandboxes that an earlier driver of this campaign has left."""
        left = await asyncio.to_thread(self._provider().reap)
        if left:
            self.progress.note(f"ended {len(left)} sandboxes that an earlier driver had left")

    def _packages(self, tasks: Sequence[TaskRef]) -> list[TaskPackage]:
        return [load_package(self.tasks.root / task.path, task.name) for task in tasks]

    async def _start(self, cluster: Cluster) -> None:
        """Start all actors that what is left of the campaign needs."""
        self._stage("start", f"{self.config.engine.replicas} replicas, trainer, episode workers")
        # A Ray that is starting must be there before it can be stopped: given up midway, it
        # would end with its thread, and the interpreter wait for it at its own end.
        dashboard = await in_thread(
            RAYLET_START_S, lambda: connect(self.address, self.directory.run_id, self.dashboard)
        )
        if dashboard:
            self.progress.note(f"Ray dashboard at http://{dashboard}")
        starts = [
            start_serving(
                cluster,
                self.model.path,
                self.directory.logs,
                self.tasks.root,
                self.directory.run_id,
                self.progress.note,
            )
        ]
        if self._updates_done() < self.config.schedule.updates:
            starts.append(self._start_trainer(cluster))
        await together(*starts)
        self.progress.note(f"{len(cluster.workers)} episode workers are ready")

    async def _start_trainer(self, cluster: Cluster) -> None:
        version = await start_trainer(
            cluster, self.model.path, self.directory.checkpoints, self._checkpoint()
        )
        self.progress.note(f"trainer stands at version {version}")

    async def _train(self, cluster: Cluster) -> None:
        """Train the updates that no checkpoint holds yet."""
        done = self._updates_done()
        if done >= self.config.schedule.updates:
            return
        self._stage("train", f"updates {done + 1} to {self.config.schedule.updates}")
        scheduler = self._scheduler(self._frontier())
        loop = TrainingLoop(
            self.config, cluster, scheduler, self.tasks.train, self.recorder, self.progress
        )
        await loop.run()

    async def _verify_checkpoint(self, cluster: Cluster) -> list[Arm]:
        """Stop the trainer, load the last checkpoint afresh, and pin the arms."""
        import ray

        from actors.trainer import verify_checkpoint

        path = self._checkpoint()
        updates = self.config.schedule.updates
        if path is None or self._updates_done() != updates:
            raise EvidenceError(f"no checkpoint of update {updates}", str(self.directory.root))
        if cluster.trainer is not None:
            limit = self.config.limits.stop_s
            async with self.recorder.lifecycle.step("stop", limit, "trainer"):
                await cluster.stop_trainer()
        self._stage("checkpoint", f"loading {path.name} afresh")
        trainer = self.config.trainer
        # The trainer's, which has just been stopped.
        gpus = self.config.resources.trainer_gpus if trainer.torch_device == "cuda" else 0.0
        task = ray.remote(num_cpus=0, num_gpus=gpus)(verify_checkpoint)
        ref = task.remote(path, self.model.path, self.config)
        adapter, difference = await call(ref, VERIFY_S, "checkpoint verification")
        self.progress.note(f"it reproduces the trainer's logprobs to {difference:.1e} nats")
        final = f"step{updates}"
        self._pin_arms(final, adapter.version, adapter.sha256, path)
        return [Arm(BASE_ARM, 0, None), Arm(final, adapter.version, adapter)]

    async def _evaluate(self, cluster: Cluster, arms: Sequence[Arm]) -> None:
        """Run the held-out attempts that are missing."""
        tasks = self.tasks.heldout[: self.config.heldout_tasks]
        self._stage(
            "heldout",
            f"{len(tasks)} tasks x {self.config.heldout.attempts} attempts x "
            f"{' and '.join(arm.name for arm in arms)}",
        )
        loop = HeldoutLoop(self.config, cluster, tasks, arms, self.recorder, self.progress)
        await loop.run()

    async def _stop(self, cluster: Cluster) -> None:
        """Stop every actor, then Ray itself if it was started here."""
        import ray

        limit = self.config.limits.stop_s
        try:
            async with self.recorder.lifecycle.step("stop", limit, "all actors"):
                for problem in await cluster.stop():
                    self.progress.note(f"did not stop by itself, ended: {problem}")
                if ray.is_initialized():
                    await asyncio.to_thread(ray.shutdown)
        finally:
            self.recorder.close()

    def _report(self) -> None:
        """Audit the evidence and write summary and report."""
        from rl.evidence.report import write_report
        from rl.evidence.summary import load_evidence, summarize, summary_lines

        self.recorder.events.stage("report")
        self.recorder.events.stage(STAGE_DONE)
        result = audit(self.directory)
        findings = result.findings
        write_json(self.directory.audit, result)
        summary = summarize(load_evidence(self.directory))
        write_json(self.directory.summary, summary)
        write_report(self.directory)
        self.progress.stage("done")
        for line in summary_lines(summary):
            self.progress.note(line)
        self.progress.note(f"report: {self.directory.report}")
        if findings:
            raise EvidenceError(
                f"the audit has {len(findings)} findings, such as {findings[0].message}",
                findings[0].where,
                f"see all of them: python -m rl.audit {self.directory.root}",
            )

    # ---- inside ---------------------------------------------------------

    def _stage(self, name: str, detail: str) -> None:
        self.recorder.events.stage(name)
        self.progress.stage(name, detail)

    def _checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return checkpoint.latest(self.directory.checkpoints)

    def _frontier(self) -> Frontier | None:
        """The scheduler's state in the newest checkpoint."""
        path = self._checkpoint()
        if path is None:
            return None
        state = checkpoint.read_scheduler(path)
        if not state.keys() >= FRESH.keys() or state["updates_done"] != checkpoint.update_of(path):
            raise checkpoint.damaged(path / checkpoint.SCHEDULER, "is no frontier of this update")
        return cast(Frontier, state)

    def _updates_done(self) -> int:
        frontier = self._frontier()
        return 0 if frontier is None else frontier["updates_done"]

    def _scheduler(self, frontier: Frontier | None) -> Scheduler:
        config = self.config
        order = TaskOrder([task.family for task in self.tasks.train], config.seed)
        slots, replicas = config.episodes.concurrency, config.engine.replicas
        return Scheduler(
            config.schedule,
            order,
            slots=slots,
            replicas=replicas,
            incarnation=self._incarnation,
            frontier=FRESH if frontier is None else frontier,
        )

    def _pin_arms(self, final: str, version: int, adapter_sha256: str, path: Path) -> None:
        folder = path / checkpoint.ADAPTER
        step = ArmPin(
            arm=final,
            version=version,
            adapter_sha256=adapter_sha256,
            directory=folder.relative_to(self.directory.root).as_posix(),
            files=sha256_files(folder),
        )
        arms = Arms(arms=[ArmPin(arm=BASE_ARM, version=0, adapter_sha256=None), step])
        pinned = read_json(self.directory.arms, Arms)
        if pinned is not None and pinned != arms:
            raise EvidenceError(
                f"the evaluation has begun with other weights than {path.name} holds",
                str(self.directory.arms),
                "restore the checkpoint that it began with, or start a new campaign",
            )
        self.directory.write_arms(arms)


def frozen_config(directory: CampaignDir) -> CampaignConfig:
    """The configuration that a campaign was started with."""
    return load_frozen(directory).campaign_config()


def _gate_rows(
    packages: Sequence[TaskPackage], results: Mapping[str, GateResult], known: set[str]
) -> Gates:
    """The gates' results as evidence of this campaign."""
    rows = []
    for package in packages:
        result = results[package.digest]
        rows.append(
            GateRow(
                task_name=package.name,
                digest=package.digest,
                passed=result.verdict == "passed",
                oracle_reward=result.oracle[0] if result.oracle else None,
                nothing_reward=result.nothing[0] if result.nothing else None,
                reused=package.digest in known,
                seconds=result.seconds,
                message="; ".join(result.reasons),
            )
        )
    return Gates(gates=rows)
