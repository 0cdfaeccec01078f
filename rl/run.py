"""What every run has in common: a campaign, an evaluation, a screen, a probe.

Invariants:
- Everything is frozen before anything is gated, started or submitted.
- Nothing costly starts before every task has passed its gate.
- Whatever ends a run, its actors are stopped in order and its directory can be
  continued: each stage finds out from the evidence what is left to do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.cluster import Cluster, still_running
from actors.nodes import Site
from actors.ray_connection import connect
from actors.starting import reserve, start_serving
from rl.config import ServingConfig
from rl.errors import DeadlineExceeded
from rl.evidence.code_pin import CodePin
from rl.evidence.events import STOPPED
from rl.evidence.frozen import ModelPin
from rl.evidence.layout import CampaignDir
from rl.evidence.recorder import Recorder
from rl.evidence.rows import GateResult as GateRow
from rl.evidence.rows import Gates
from rl.evidence.snapshot import keep_source, source_tar, tar_sha256
from rl.prepare import PreparedModel
from rl.progress import Progress
from rl.records import TaskRef
from rl.running import ROOT
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


@dataclass(kw_only=True)
class Run[ConfigT: ServingConfig](ABC):
    """What a run is made of.

    Args:
        config: the whole configuration.
        directory: the run's own.
        model: the prepared base model.
        task_root: folder of the task packages.
        code: the program's pin.
        gate_report: results of gates by task digest, kept over runs.
        address: an existing Ray cluster; None starts one here.
        dashboard: whether a cluster started here has a dashboard.
        progress: what the person sees.
    """

    config: ConfigT
    directory: CampaignDir
    model: PreparedModel
    task_root: Path
    code: CodePin
    gate_report: Path
    progress: Progress
    address: str | None = None
    dashboard: bool = True
    recorder: Recorder = field(init=False)

    async def run(self) -> None:
        """Run what is left, once it is frozen.

        Raises:
            CampaignError: with a remedy; the directory can be continued.
        """
        self.recorder = Recorder(self.directory)
        cluster = Cluster(self.config)
        watchdog = asyncio.timeout(self.config.limits.watchdog_s)
        try:
            async with watchdog:
                await self._stages(cluster)
        except TimeoutError:
            if not watchdog.expired():
                raise
            raise DeadlineExceeded(
                f"the watchdog stopped the run after {self.config.limits.watchdog_s:.0f} s",
                str(self.directory.root),
                f"continue it with --resume {self.directory.run_id}",
            ) from None
        finally:
            await asyncio.shield(self._stop(cluster))
        self._report()

    @abstractmethod
    async def _stages(self, cluster: Cluster) -> None:
        """Everything between taking the directory and stopping the actors."""

    @abstractmethod
    def _report(self) -> None:
        """Audit the evidence and write what is said of it."""

    def model_pin(self) -> ModelPin:
        """The base model by content."""
        config = self.config.model
        return ModelPin(
            name=self.model.name,
            source=config.source,
            pin=config.revision or config.sha256 or "local files",
            files=self.model.files,
        )

    def keep_source(self) -> CodePin:
        """Keep the program's sources in the run's directory; the code's pin with their digest."""
        tar = source_tar(ROOT)
        keep_source(tar, self.directory.root)
        return self.code.model_copy(update={"source_sha256": tar_sha256(tar)})

    # ---- stages ---------------------------------------------------------

    async def _gate(self, tasks: Sequence[TaskRef]) -> None:
        """Gate the tasks that have not passed yet."""
        self._stage("gates", f"{len(tasks)} tasks: solution scores 1, doing nothing scores 0")
        require_writable(self.gate_report)
        packages = await asyncio.to_thread(self._packages, tasks)
        report = load_report(self.gate_report)
        known = {package.digest for package in packages} & set(report.results)
        fresh: list[GateResult] = []

        def keep(result: GateResult) -> None:
            fresh.append(result)
            report.results[result.digest] = result
            save_report(report, self.gate_report)
            self.progress.gate(len(known) + len(fresh), len(tasks))

        await gate_all(
            packages,
            self._provider(),
            AttemptLimits.of(self.config),
            concurrency=min(GATES_AT_ONCE, self.config.episodes.concurrency),
            done=report.results,
            on_result=keep,
        )
        self.directory.write_gates(gate_rows(packages, report.results, known))
        self.recorder.pinned(self.directory.gates)
        require_gate(report, packages)
        self.progress.note(f"all {len(tasks)} passed, {len(known)} of them before")

    def require_gates(self, tasks: Sequence[TaskRef]) -> None:
        """Refuse to go on unless every task has passed its gate already.

        Raises:
            TaskPackageError: some have not; the first are named.
        """
        packages = self._packages(tasks)
        command = f"python -m rl.gate {self.task_root} --report {self.gate_report}"
        require_gate(load_report(self.gate_report), packages, command)

    async def _keep_gates(self, tasks: Sequence[TaskRef]) -> None:
        """The results of gates that were passed before, as evidence of this run."""
        self._stage("gates", f"{len(tasks)} tasks must have passed")
        packages = await asyncio.to_thread(self._packages, tasks)
        report = load_report(self.gate_report)
        require_gate(report, packages)
        known = {package.digest for package in packages}
        self.directory.write_gates(gate_rows(packages, report.results, known))
        self.recorder.pinned(self.directory.gates)
        self.progress.note(f"all {len(tasks)} have passed")

    async def _reap(self) -> None:
        """End the remote sandboxes that an earlier driver of this run has left."""
        left = await asyncio.to_thread(self._provider().reap)
        if left:
            self.progress.note(f"ended {len(left)} sandboxes that an earlier driver had left")

    async def _connect(self) -> None:
        """Connect to Ray, or start it here."""
        dashboard = await connect(self.address, self.directory.run_id, self.dashboard)
        if dashboard:
            self.progress.note(f"Ray dashboard at http://{dashboard}")

    async def _reserve(self, cluster: Cluster, *, trainer: bool = False) -> None:
        """Reserve the run's part of the cluster; bring its nodes what they lack."""
        root = self.directory.root.resolve()
        home = Site(None, self.model.path.resolve(), self.task_root.resolve(), root)
        run_id, note = self.directory.run_id, self.progress.note
        await reserve(cluster, run_id, home, note, trainer=trainer)

    async def _serve(self, cluster: Cluster, *, publishing: bool) -> None:
        """Start replicas and episode workers, and a broadcaster if versions are published."""
        run_id, note = self.directory.run_id, self.progress.note
        await start_serving(cluster, run_id, note, publishing=publishing)

    async def _stop(self, cluster: Cluster) -> None:
        """Stop every actor, then Ray itself if it was started here."""
        import ray

        limit = self.config.limits.stop_s
        try:
            async with self.recorder.lifecycle.step("stop", limit, "all actors"):
                engines = await cluster.processes()
                problems = await cluster.stop()
                for problem in problems:
                    self.progress.note(f"did not stop by itself, ended: {problem}")
                if ray.is_initialized():
                    await asyncio.to_thread(ray.shutdown)
            left = still_running(engines)
            self.recorder.events.append(STOPPED, problems=[*problems], left=[*left])
        finally:
            self.recorder.close()

    # ---- inside ---------------------------------------------------------

    def _stage(self, name: str, detail: str) -> None:
        self.recorder.events.stage(name)
        self.progress.stage(name, detail)

    def _provider(self) -> SandboxProvider:
        limit = lifetime(self.config.episodes.deadline_s)
        return SandboxProvider(self.config.sandbox, limit, self.directory.run_id)

    def _packages(self, tasks: Sequence[TaskRef]) -> list[TaskPackage]:
        packages = [load_package(self.task_root / task.path, task.name) for task in tasks]
        found = [f"{item.name}: {warning}" for item in packages for warning in item.warnings]
        if found:
            self.progress.note(
                f"{len(found)} keys of packages have no effect, the first of {found[0]}; "
                f"all: python -m rl.gate {self.task_root}"
            )
        return packages


def gate_rows(
    packages: Sequence[TaskPackage], results: Mapping[str, GateResult], known: set[str]
) -> Gates:
    """The gates' results as evidence of this run."""
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
