"""One evaluation of fixed weights: held-out, a screen, or a probe.

Nothing is trained, and no version is published: each shard's replica serves the arms
one after the other.  Invariants: those of `rl.run`, and
- Every task has passed its gate before anything is started; none is gated here.
- Every episode worker has proven its way to every replica before its first attempt.
- What is complete is read from the records of graded attempts: that everything
  ended in order says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.adapter_files import read_adapter, write_adapter
from actors.calls import call
from actors.cluster import Cluster
from actors.evaluation import Arm, EvaluationLoop
from rl.config import ServingConfig
from rl.errors import EvidenceError
from rl.evidence.audit import audit
from rl.evidence.evaluation import EvaluationSummary, evaluation_lines, summarize_evaluation
from rl.evidence.events import COUNTERS, REPORTED, STAGE_DONE
from rl.evidence.frozen import EvaluationPlan, RunKind, freeze, verify_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM, ArmPin, Arms
from rl.evidence.summary import read_json
from rl.files import sha256_files, write_json
from rl.records import AdapterBytes, TaskRef
from rl.run import Run


def adapter_folder(directory: CampaignDir, arm: str) -> Path:
    """Where a run keeps the adapter of an arm."""
    return directory.root / "adapters" / arm


def kept_adapters(directory: CampaignDir) -> dict[str, AdapterBytes]:
    """The adapters of a frozen evaluation, from its own directory.

    Raises:
        EvidenceError: one is not what was pinned.
    """
    arms = read_json(directory.arms, Arms)
    if arms is None:
        raise EvidenceError("missing", str(directory.arms), "start another run")
    kept: dict[str, AdapterBytes] = {}
    for pin in arms.arms:
        if pin.adapter_sha256 is None:
            continue
        folder = adapter_folder(directory, pin.arm)
        if not folder.is_dir() or sha256_files(folder) != pin.files:
            raise EvidenceError(
                f"is not what {directory.arms.name} pins",
                str(folder),
                "restore it from an archive, or start another run",
            )
        kept[pin.arm] = read_adapter(folder, pin.version, pin.adapter_sha256)
    return kept


@dataclass(kw_only=True)
class Evaluation(Run[ServingConfig]):
    """An evaluation.

    Args:
        kind: what it is for.
        plan: attempts, shards, retries.
        tasks: what is attempted.
        adapters: adapters by arm name, beside the base model.
        source: the run that the adapters are of.
        trained_on: the tasks that they were trained on, none of which may be attempted.
    """

    kind: RunKind
    plan: EvaluationPlan
    tasks: Sequence[TaskRef]
    adapters: dict[str, AdapterBytes] = field(default_factory=dict[str, AdapterBytes])
    source: str = ""
    trained_on: Sequence[TaskRef] = ()

    @property
    def arms(self) -> list[Arm]:
        """The base model, then each adapter, older versions first."""
        ordered = sorted(self.adapters.items(), key=lambda item: item[1].version)
        trained = [Arm(name, adapter.version, adapter) for name, adapter in ordered]
        return [Arm(BASE_ARM, 0, None), *trained]

    def freeze(self) -> None:
        """Freeze a new evaluation; prove that a continued one is what was frozen.

        Raises:
            EvidenceError: it was begun with other weights.
            ConfigurationError: something else differs, or a task was trained on.
        """
        tasks, model = self.tasks, self.model_pin()
        if self.directory.frozen.exists():
            verify_frozen(
                self.directory,
                self.config,
                train=self.trained_on,
                heldout=tasks,
                model=model,
                code=self.code,
            )
        else:
            self._keep_adapters()
            freeze(
                self.directory,
                self.config,
                train=self.trained_on,
                heldout=tasks,
                model=model,
                code=self.keep_source(),
                kind=self.kind,
                plan=self.plan,
                source=self.source,
            )
        self.progress.note(f"{self.kind} {self.directory.run_id}: {self.directory.frozen}")

    async def _stages(self, cluster: Cluster) -> None:
        self.progress.plan(0, len(self.tasks) * self.plan.attempts)
        drivers = self.recorder.begin()
        lost, _ = self.recorder.reconcile(0)
        if drivers:
            self.progress.note(f"continuing: {lost} attempts were lost with the driver")
        await self._reap()
        await self._keep_gates(self.tasks)
        self.recorder.pinned(self.directory.arms)
        async with self.recorder.lifecycle.step("start", self.config.limits.start_s):
            self._stage("start", f"{self.config.engine.replicas} replicas and episode workers")
            await self._connect()
            await self._reserve(cluster)
            await self._serve(cluster, publishing=False)
        await self._count(cluster, "begin")
        await self._evaluate(cluster)
        await self._count(cluster, "end")

    async def _evaluate(self, cluster: Cluster) -> None:
        """Run the attempts that are missing."""
        arms = self.arms
        self._stage(
            self.kind,
            f"{len(self.tasks)} tasks x {self.plan.attempts} attempts x "
            f"{' and '.join(arm.name for arm in arms)}, in {self.plan.shards} shards",
        )
        loop = EvaluationLoop(
            self.config, self.plan, cluster, self.tasks, arms, self.recorder, self.progress
        )
        await loop.run()

    async def _count(self, cluster: Cluster, when: str) -> None:
        """Record the engines' own counters."""
        limit = self.config.engine.control_timeout_s
        for index, replica in enumerate(cluster.replicas):
            values = await call(replica.metrics.remote(), limit, f"replica {index} metrics")
            self.recorder.events.append(COUNTERS, replica=index, when=when, values=values)

    def _keep_adapters(self) -> None:
        """Copy the adapters into the run's own directory, and pin every arm."""
        pins = [ArmPin(arm=BASE_ARM, version=0, adapter_sha256=None)]
        for name, adapter in self.adapters.items():
            folder = adapter_folder(self.directory, name)
            write_adapter(folder, adapter, with_probe=True)
            pins.append(
                ArmPin(
                    arm=name,
                    version=adapter.version,
                    adapter_sha256=adapter.sha256,
                    directory=folder.relative_to(self.directory.root).as_posix(),
                    files=sha256_files(folder),
                )
            )
        self.directory.write_arms(Arms(arms=pins))

    def _report(self) -> None:
        """Audit the evidence and write the summary."""
        self.recorder.events.stage("report")
        self.recorder.events.stage(STAGE_DONE)
        result = audit(self.directory)
        write_json(self.directory.audit, result)
        self.recorder.events.append(REPORTED)
        summary = summarize_evaluation(self.directory)
        write_json(self.directory.summary, summary)
        self.progress.stage("done")
        for line in self._lines(summary):
            self.progress.note(line)
        if result.findings:
            first = result.findings[0]
            raise EvidenceError(
                f"the audit has {len(result.findings)} findings, such as {first.message}",
                first.where,
                f"see all of them: python -m rl.audit {self.directory.root}",
            )

    def _lines(self, summary: EvaluationSummary) -> list[str]:
        return evaluation_lines(summary)
