"""One campaign, from frozen configuration to report.

`Campaign._stages` reads from top to bottom as the campaign goes.  Invariants:
those of `rl.run`, and a continued campaign is what was frozen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from actors.calls import call, together
from actors.cluster import Cluster
from actors.evaluation import Arm, EvaluationLoop
from actors.placement import TRAINER
from actors.starting import start_trainer
from actors.training import TrainingLoop
from rl.config import CampaignConfig
from rl.errors import EvidenceError
from rl.evidence.audit import audit
from rl.evidence.events import REPORTED, STAGE_DONE
from rl.evidence.frozen import freeze, heldout_plan, load_frozen, verify_frozen
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import BASE_ARM, ArmPin, Arms
from rl.evidence.shards import take_in
from rl.evidence.summary import read_json
from rl.files import sha256_files, write_json
from rl.learner import checkpoint
from rl.learner.inventory import inventory
from rl.prepare import PreparedTasks
from rl.run import Run
from rl.schedule.evals import NO_EVALS, EvalPlan, graded_cells
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import FRESH, Frontier, Scheduler

VERIFY_S = 900.0  # loading the base model afresh, on a cold disk


@dataclass(kw_only=True)
class Campaign(Run[CampaignConfig]):
    """A campaign.

    Args:
        tasks: the prepared, split task packages; `task_root` is theirs.
        train_only: end once the last checkpoint is proven; evaluation and report are left.
        shards: held-out shards that other runs have evaluated, to be taken in.
    """

    tasks: PreparedTasks
    train_only: bool = False
    shards: Sequence[CampaignDir] = ()
    _incarnation: int = field(init=False, default=0)

    async def _stages(self, cluster: Cluster) -> None:
        config = self.config
        self.progress.plan(config.schedule.updates, config.heldout_attempts // 2)
        self._take_over()
        self._take_in()
        await self._reap()
        held = max(config.heldout_tasks, config.eval_tasks)
        await self._gate([*self.tasks.train, *self.tasks.heldout[:held]])
        if self._nothing_left():
            return
        async with self.recorder.lifecycle.step("start", config.limits.start_s):
            await self._start(cluster)
        await self._train(cluster)
        arms = await self._verify_checkpoint(cluster)
        if not self.train_only:
            await self._evaluate(cluster, arms)

    # ---- stages ---------------------------------------------------------

    def freeze(self) -> None:
        """Freeze a new campaign; prove that a continued one is what was frozen."""
        begun = self.directory.frozen.exists()
        (verify_frozen if begun else freeze)(
            self.directory,
            self.config,
            train=self.tasks.train,
            heldout=self.tasks.heldout,
            model=self.model_pin(),
            code=self.code if begun else self.keep_source(),
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
        begun = [version for version in self.config.eval_versions if version <= done]
        why = "the driver died before it had ended"
        self.recorder.close_evals(begun, self.config.eval_cells, why, current=done)
        if self._incarnation:
            self.progress.note(
                f"continuing after update {done}: {lost} attempts were lost with the driver, "
                f"{superseded} rows of later updates set aside"
            )

    def _take_in(self) -> None:
        """Take in the held-out shards that runs of their own have evaluated."""
        for shard in self.shards:
            if take_in(self.directory, shard, self.recorder.events):
                self.progress.note(f"took in the held-out attempts of {shard.run_id}")

    def _nothing_left(self) -> bool:
        """Whether the weights are pinned and, if that is wanted, evaluated: nothing is started."""
        pinned = read_json(self.directory.arms, Arms)
        if pinned is None or pinned.final.version != self.config.schedule.updates:
            return False
        if self.train_only:
            return True
        held = self.directory.episodes("heldout")
        graded = Counter((r.arm, r.task_digest) for r in held if r.outcome == "graded")
        tasks = self.tasks.heldout[: self.config.heldout_tasks]
        cells = [(pin.arm, task.digest) for pin in pinned.arms for task in tasks]
        return all(graded[cell] >= self.config.heldout.attempts for cell in cells)

    async def _start(self, cluster: Cluster) -> None:
        """Start all actors that what is left of the campaign needs."""
        self._stage("start", f"{self.config.engine.replicas} replicas, trainer, episode workers")
        await self._connect()
        await self._reserve(cluster, trainer=True)
        starts = [self._serve(cluster, publishing=True)]
        if self._updates_done() < self.config.schedule.updates:
            starts.append(self._start_trainer(cluster))
        await together(*starts)
        self.progress.note(f"{len(cluster.workers)} episode workers are ready")

    async def _start_trainer(self, cluster: Cluster) -> None:
        version = await start_trainer(cluster, self.config, self._checkpoint())
        self.progress.note(f"trainer stands at version {version}")

    async def _train(self, cluster: Cluster) -> None:
        """Train the updates that no checkpoint holds yet."""
        done = self._updates_done()
        if done >= self.config.schedule.updates:
            return
        self._stage("train", f"updates {done + 1} to {self.config.schedule.updates}")
        scheduler = self._scheduler(self._frontier())
        loop = TrainingLoop(
            self.config,
            cluster,
            scheduler,
            self.tasks.train,
            self.recorder,
            self.progress,
            eval_tasks=self.tasks.heldout[: self.config.eval_tasks],
            bring_home=self._bring_home,
        )
        await loop.run()
        planned, why = self.config.eval_versions, "training ended before it was current"
        self.recorder.close_evals(planned, self.config.eval_cells, why)

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
        placed, sites = cluster.placed_at, cluster.sites
        node = placed.node_of(TRAINER)
        place = placed.strategy(TRAINER)
        task = ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=place)(verify_checkpoint)
        there = await sites.send_run_folder(node, path.resolve())
        ref = task.remote(there, sites.sites[node].model, self.config)
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
        plan = heldout_plan(self.config)
        loop = EvaluationLoop(self.config, plan, cluster, tasks, arms, self.recorder, self.progress)
        await loop.run()

    def _report(self) -> None:
        """Audit the evidence and write summary and report; of training alone, say what is left."""
        if self.train_only:
            self._leave_evaluation()
            return
        from rl.evidence.report import write_report
        from rl.evidence.summary import load_evidence, summarize, summary_lines

        self.recorder.events.stage("report")
        self.recorder.events.stage(STAGE_DONE)
        result = audit(self.directory)
        findings = result.findings
        write_json(self.directory.audit, result)
        self.recorder.events.append(REPORTED)
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

    def _leave_evaluation(self) -> None:
        """Say how a campaign that is trained goes on."""
        run_id, shards = self.directory.run_id, self.config.heldout.shards
        self.progress.note(
            f"trained, not evaluated. Here: python -m rl.final --resume {run_id}; elsewhere, one "
            f"run for each shard: python -m rl.heldout {run_id} --shard 1/{shards}, taken in by "
            f"python -m rl.final --resume {run_id} --take-in RUN"
        )

    # ---- inside ---------------------------------------------------------

    async def _bring_home(self, cluster: Cluster, path: Path) -> Path:
        """A checkpoint where the driver runs, whatever node the trainer has written it on."""
        home = await cluster.sites.fetch_run_folder(cluster.placed_at.node_of(TRAINER), path)
        if home != path:
            keep = set(self.config.checkpoints.updates)
            await asyncio.to_thread(checkpoint.prune, self.directory.checkpoints, keep)
        return home

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
            evals=self._eval_plan(),
        )

    def _eval_plan(self) -> EvalPlan:
        """Evaluations on the way, less what an earlier driver has of the same weights."""
        config, done = self.config, self._updates_done()
        if config.eval is None:
            return NO_EVALS
        weights = {row.update: row.adapter_sha256 for row in self.directory.update_rows().read()}
        graded = graded_cells(
            record.attempt_id
            for record in self.directory.episodes("eval")
            if record.outcome == "graded"
            and record.version == done
            and record.adapter_sha256 == weights.get(done, record.adapter_sha256)
        )
        return EvalPlan(
            versions=frozenset(config.eval_versions),
            cells=config.eval_cells,
            retries=config.schedule.attempt_retries,
            graded=graded,
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
        self.recorder.pinned(self.directory.arms)


def frozen_config(directory: CampaignDir) -> CampaignConfig:
    """The configuration that a campaign was started with."""
    return load_frozen(directory).campaign_config()
