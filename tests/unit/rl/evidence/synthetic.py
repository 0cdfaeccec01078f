"""A small campaign directory made by code: consistent, complete, deterministic."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rl.config import CampaignConfig
from rl.config_file import parse_config
from rl.evidence.audit import audit
from rl.evidence.code_pin import CodePin
from rl.evidence.events import (
    BEGIN,
    DISPATCH,
    ENDED,
    PINNED,
    PROVEN,
    PUBLISH,
    STOPPED,
    EventLog,
)
from rl.evidence.frozen import ModelPin, freeze
from rl.evidence.layout import CampaignDir, create
from rl.evidence.rows import ArmPin, Arms, GateResult, Gates, TrainedGroup, UpdateRow
from rl.evidence.summary import load_evidence, summarize
from rl.evidence.traces import TraceWriter
from rl.files import sha256_file, sha256_files, write_json
from rl.records import EpisodeRecord, Failure, Sample, TaskRef, TurnRecord, UpdateMetrics

FAMILIES = ("mkdir", "touch", "remove", "rename", "chmod", "move")
START = 1_780_304_400.0  # 2026-06-01 09:00 UTC
HOSTILE = "<script>alert('x')</script>\x1b[31mred\x1b[0m\x00\u202eevil"


def campaign_config(**schedule: Any) -> CampaignConfig:
    """A configuration like the local one."""
    return parse_config(
        {
            "name": "local",
            "model": {"source": "path", "name": "tiny-135m", "path": "state/models/tiny"},
            "tasks": {"train": 6, "heldout": 6},
            "agent": {
                "system_prompt": "Reply with one bash code block.",
                "max_turns": 1,
                "max_new_tokens": 24,
                "call_format": "fenced",
            },
            "episodes": {"concurrency": 8, "deadline_s": 300.0},
            "schedule": {"updates": 6, "batch_size": 12, "group_size": 4, **schedule},
            "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 512},
            "trainer": {"device": "cpu", "optimizer": {"lr": 4e-4}},
            "heldout": {"attempts": 4},
            "limits": {"watchdog_s": 3600},
        },
        where="synthetic",
    )


def task(kind: str, index: int) -> TaskRef:
    """One pinned task."""
    family = FAMILIES[index % len(FAMILIES)]
    name = f"{family}-{kind}-{index:02d}"
    return TaskRef(
        name=name,
        digest=hashlib.sha256(name.encode()).hexdigest(),
        path=name,
        family=family,
        instruction=f"Do {name}.",
    )


def tasks(kind: str, count: int) -> list[TaskRef]:
    """Several pinned tasks."""
    return [task(kind, index) for index in range(count)]


def episode(attempt_id: str, group_id: str, of: TaskRef, version: int, **fields: Any) -> Any:
    """A graded episode; `fields` replace its own."""
    reward = fields.get("reward", 1.0)
    values: dict[str, Any] = {
        "attempt_id": attempt_id,
        "group_id": group_id,
        "task_name": of.name,
        "task_digest": of.digest,
        "version": version,
        "replica": 0,
        "outcome": "graded",
        "reward": reward,
        "stop_reason": "completed",
        "samples": [Sample(token_ids=[1, 2, 3], sampled=[False, True, True], logprobs=[0, -1, -2])],
        "turns": [turn(solved=reward == 1.0, name=of.name)],
        "timings": {"create": 0.2, "agent": 2.5, "verify": 0.4, "stop": 0.1, "total": 3.2},
        "verifier_log": f"checked {of.name}: {reward}",
        "started_at": START,
        **fields,
    }
    return EpisodeRecord(**values)


def turn(*, solved: bool, name: str) -> TurnRecord:
    """One turn, with hostile output when it failed."""
    if solved:
        command, output, code = f"mkdir -p {name}/data", "", 0
    else:
        command, output, code = f"mkdri '{name}'", f"bash: mkdri: command not found\n{HOSTILE}", 127
    return TurnRecord(
        prompt_tokens=170,
        completion_tokens=14,
        text=f"```bash\n{command}\n```",
        finish_reason="stop",
        command=command,
        exit_code=code,
        output=output,
        generate_s=1.8,
        execute_s=0.1,
    )


def masked(attempt_id: str, group_id: str, of: TaskRef, version: int, **fields: Any) -> Any:
    """An episode that infrastructure lost."""
    failure = Failure(kind="SandboxError", message="the sandbox died")
    return episode(
        attempt_id, group_id, of, version,
        outcome="masked", reward=None, stop_reason="infrastructure", failure=failure,
        verifier_log="", turns=[], samples=[], **fields,
    )  # fmt: skip


def build(
    root: Path, *, config: CampaignConfig | None = None, finish: bool = True, gain: float = 0.12
) -> CampaignDir:
    """Write a campaign; `finish` False stops it in the middle of training."""
    config = config or campaign_config()
    directory = create("local-20260601-090000", root)
    train, heldout = tasks("train", config.tasks.train), tasks("held", config.tasks.heldout)
    freeze(
        directory, config, train=train, heldout=heldout,
        model=ModelPin(
            name="tiny-135m", source="path", pin="state/models/tiny",
            files={"model.safetensors": "ab" * 32, "config.json": "cd" * 32},
        ),
        code=CodePin(commit="1" * 40, dirty=False, packages={"ray": "2.50.0", "torch": "2.13.0"}),
        now=START,
    )  # fmt: skip
    gates = [
        GateResult(
            task_name=t.name, digest=t.digest, passed=True,
            oracle_reward=1.0, nothing_reward=0.0, seconds=0.9,
        )
        for t in [*train, *heldout]
    ]  # fmt: skip
    directory.write_gates(Gates(gates=gates))
    clock = iter(START + 7.0 * step for step in range(100_000))
    events = EventLog(directory.events, clock=lambda: next(clock))
    events.append(BEGIN, incarnation=0, frozen=sha256_file(directory.frozen))
    events.append(PINNED, file="gates.json", sha256=sha256_file(directory.gates))
    directory.lifecycle.touch()
    for stage in ("gates", "start", "train"):
        events.stage(stage)
    updates = config.schedule.updates if finish else config.schedule.updates // 2
    _train(directory, config, train, events, updates, gain)
    if finish:
        _evaluate(directory, config, heldout, events)
        events.append(PINNED, file="arms.json", sha256=sha256_file(directory.arms))
        events.append(STOPPED, problems=[], left=[])
        events.stage("done")
        write_json(directory.summary, summarize(load_evidence(directory)))
        write_json(directory.audit, audit(directory))
        write_json(directory.summary, summarize(load_evidence(directory)))
    return directory


def _train(
    directory: CampaignDir, config: CampaignConfig, train: list[TaskRef],
    events: EventLog, updates: int, gain: float,
) -> None:  # fmt: skip
    draws = random.Random(3)
    schedule = config.schedule
    with (
        TraceWriter(directory.trace("train")) as trace,
        TraceWriter(directory.failed_trace) as failed,
    ):
        for update in range(1, updates + 1):
            version = max(0, update - 1 - update % 2)
            records: list[EpisodeRecord] = []
            groups: list[TrainedGroup] = []
            for place in range(schedule.groups_per_batch):
                draw = (update - 1) * schedule.groups_per_batch + place
                group_id, of = f"g{draw:05d}.0", train[draw % len(train)]
                ids = [f"{group_id}-a{index}" for index in range(schedule.group_size)]
                for attempt_id in ids:
                    reward = float(draws.random() < 0.3 + gain * (update - 1))
                    records.append(episode(attempt_id, group_id, of, version, reward=reward))
                if update == 2 and place == 0:
                    lost = records.pop()
                    records.append(masked(lost.attempt_id, group_id, of, version))
                    ids.pop()
                groups.append(TrainedGroup(group_id=group_id, version=version, attempt_ids=ids))
            for record in records:
                dispatch(record, events)
                write(trace if record.outcome == "graded" else failed, record, events)
            graded = [record for record in records if record.outcome == "graded"]
            sha = hashlib.sha256(f"adapter {update}".encode()).hexdigest()
            directory.update_rows().append(
                UpdateRow(update=update, groups=groups, adapter_sha256=sha)
            )
            directory.metrics_rows().append(metrics_of(update, graded))
            events.append(PUBLISH, version=update, seconds=1.4 + 0.1 * update)


def prove(events: EventLog, config: CampaignConfig) -> None:
    """Every worker proves its way to every replica."""
    for worker in range(config.episodes.workers):
        reached: list[JsonValue] = ["http://"] * config.engine.replicas
        events.append(PROVEN, worker=worker, replicas=reached)


def dispatch(record: EpisodeRecord, events: EventLog) -> None:
    """Tell that the attempt of a record began, as the recorder does."""
    events.append(
        DISPATCH, attempt_id=record.attempt_id, group_id=record.group_id, task=record.task_name,
        digest=record.task_digest, version=record.version, replica=record.replica,
        stage=record.stage, arm=record.arm, adapter_sha256=record.adapter_sha256,
    )  # fmt: skip


def write(trace: TraceWriter, record: EpisodeRecord, events: EventLog) -> None:
    """Append a record and tell of it, as the recorder does."""
    sha256 = trace.append(record)
    events.append(
        ENDED, attempt_id=record.attempt_id, outcome=record.outcome, reward=record.reward,
        sha256=sha256,
    )  # fmt: skip


def metrics_of(update: int, graded: list[EpisodeRecord]) -> UpdateMetrics:
    """Metrics that agree with the episodes."""
    rewards = [record.reward for record in graded if record.reward is not None]
    mean = sum(rewards) / len(rewards)
    rewards_of: dict[str, set[float | None]] = {}
    for record in graded:
        rewards_of.setdefault(record.group_id, set()).add(record.reward)
    return UpdateMetrics(
        update=update,
        loss=-0.02 * update,
        grad_norm=0.8 / update,
        lr=4e-4,
        reward_mean=mean,
        reward_std=(mean * (1 - mean)) ** 0.5,
        episodes=len(graded),
        zero_variance_groups=sum(len(values) < 2 for values in rewards_of.values()),
        sampled_tokens=14 * len(graded),
        total_tokens=184 * len(graded),
        mismatch_kl=7e-5,
        mismatch_kl_by_staleness={0: 3e-5, 1: 9e-5},
        ratio_min=0.87,
        ratio_max=1.35,
        ratio_quantiles={"p01": 0.96, "p05": 0.98, "p50": 1.0, "p95": 1.02, "p99": 1.06},
        effective_sample_size=0.995 - 0.01 * update,
        clipped_fraction=0.01 * update,
        entropy=0.9 - 0.05 * update,
        staleness=dict(Counter(update - 1 - record.version for record in graded)),
        seconds=20.0 + (update * 7) % 9,
    )


def _evaluate(
    directory: CampaignDir, config: CampaignConfig, heldout: list[TaskRef], events: EventLog
) -> None:
    events.stage("heldout")
    prove(events, config)
    final = config.schedule.updates
    folder = directory.checkpoints / f"adapter-{final}"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(f"weights {final}".encode())
    pins = [
        ArmPin(arm="base", version=0, adapter_sha256=None),
        ArmPin(
            arm=f"step{final}",
            version=final,
            adapter_sha256=hashlib.sha256(f"adapter {final}".encode()).hexdigest(),
            directory=f"checkpoints/adapter-{final}",
            files=sha256_files(folder),
        ),
    ]
    directory.write_arms(Arms(arms=pins))
    draws = random.Random(5)
    with TraceWriter(directory.trace("heldout")) as trace:
        for pin in pins:
            for of in heldout[: config.heldout_tasks]:
                for index in range(config.heldout.attempts):
                    attempt_id = f"{pin.arm}-{of.name}-a{index}"
                    reward = float(draws.random() < (0.35 if pin.version == 0 else 0.9))
                    record = episode(
                        attempt_id, f"{pin.arm}-{of.name}", of, pin.version, stage="heldout",
                        arm=pin.arm, reward=reward, adapter_sha256=pin.adapter_sha256,
                    )  # fmt: skip
                    dispatch(record, events)
                    write(trace, record, events)
