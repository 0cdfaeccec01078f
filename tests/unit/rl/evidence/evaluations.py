"""Synthetic evaluations: screens and held-out runs, complete and without findings."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from rl.config_file import parse_config
from rl.evidence.audit import audit
from rl.evidence.code_pin import CodePin
from rl.evidence.evaluation import summarize_evaluation
from rl.evidence.events import BEGIN, COUNTERS, STOPPED, EventLog
from rl.evidence.frozen import EvaluationPlan, ModelPin, freeze
from rl.evidence.layout import CampaignDir, create
from rl.evidence.rows import ArmPin, Arms, GateResult, Gates
from rl.evidence.traces import TraceWriter
from rl.files import sha256_file, sha256_files, write_json
from rl.records import TaskRef
from rl.screen_config import ScreenConfig
from tests.unit.rl.evidence.synthetic import (
    campaign_config,
    dispatch,
    episode,
    masked,
    prove,
    tasks,
    write,
)

SOLVES = (0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.5, 0.25)  # by task, in turn
PLAN = EvaluationPlan(attempts=4, shards=2, retries=1)
START = 1_780_000_000.0


def screen_config() -> ScreenConfig:
    """A screen over the synthetic tasks."""
    campaign = campaign_config().model_dump(mode="json")
    kept = ("model", "agent", "sandbox", "episodes", "engine", "limits", "resources", "seed")
    data = {key: campaign[key] for key in kept} | {
        "name": "screen",
        "tasks": {"source": "path", "path": "packages", "train": 3, "heldout": 1},
        "screen": {"attempts": 4, "shards": 2, "low": 0.1, "high": 0.9},
    }
    return parse_config(data, "screen.toml", model=ScreenConfig)


def build_screen(root: Path, count: int = 8) -> CampaignDir:
    """A finished screen of `count` tasks; the first has a masked attempt besides."""
    directory = create("screened", root)
    refs = tasks("held", count)
    _freeze(directory, screen_config(), refs)
    directory.write_arms(Arms(arms=[ArmPin(arm="base", version=0, adapter_sha256=None)]))
    _run(directory, refs, directory_arms=[("base", 0, None)])
    return directory


def build_heldout(root: Path, count: int = 6) -> CampaignDir:
    """A finished evaluation of base and the weights of update 6."""
    directory = create("after", root)
    refs = tasks("held", count)
    _freeze(directory, campaign_config(), refs, train=tasks("train", 4))
    folder = directory.root / "adapters" / "step6"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights 6")
    sha = hashlib.sha256(b"adapter 6").hexdigest()
    step = ArmPin(
        arm="step6", version=6, adapter_sha256=sha, directory="adapters/step6",
        files=sha256_files(folder),
    )  # fmt: skip
    base = ArmPin(arm="base", version=0, adapter_sha256=None)
    directory.write_arms(Arms(arms=[base, step]))
    _run(directory, refs, directory_arms=[("base", 0, None), ("step6", 6, sha)])
    return directory


def _freeze(directory, config, refs: list[TaskRef], train: list[TaskRef] | None = None) -> None:
    freeze(
        directory, config, train=train or [], heldout=refs,
        model=ModelPin(name="tiny", source="path", pin="tiny", files={"config.json": "cd" * 32}),
        code=CodePin(commit="1" * 40, dirty=False, packages={"ray": "2.60.0"}),
        kind="screen" if isinstance(config, ScreenConfig) else "heldout", plan=PLAN, now=START,
    )  # fmt: skip
    gates = [
        GateResult(
            task_name=ref.name, digest=ref.digest, passed=True, oracle_reward=1.0,
            nothing_reward=0.0,
        )
        for ref in refs
    ]  # fmt: skip
    directory.write_gates(Gates(gates=gates))


def _run(
    directory: CampaignDir, refs: list[TaskRef], directory_arms: list[tuple[str, int, str | None]]
) -> None:
    clock = iter(START + step for step in range(100_000))
    log = EventLog(directory.events, clock=lambda: next(clock))
    log.append(BEGIN, incarnation=0, frozen=sha256_file(directory.frozen))
    directory.lifecycle.touch()
    prove(log, campaign_config())
    log.append(COUNTERS, replica=0, when="begin", values={"prefix_cache_queries_total": 10.0})
    draws = random.Random(4)
    with (
        TraceWriter(directory.trace("heldout")) as trace,
        TraceWriter(directory.failed_trace) as failed,
    ):
        for arm, version, sha in directory_arms:
            for place, ref in enumerate(refs):
                group = f"heldout-{arm}-{ref.name}"
                wins = round(SOLVES[place % len(SOLVES)] * PLAN.attempts)
                rewards = [1.0] * wins + [0.0] * (PLAN.attempts - wins)
                draws.shuffle(rewards)
                for number, reward in enumerate(rewards):
                    attempt = f"{group}-k{number}"
                    record = episode(
                        attempt, group, ref, version, stage="heldout", arm=arm, reward=reward,
                        adapter_sha256=sha,
                    )  # fmt: skip
                    dispatch(record, log)
                    write(trace, record, log)
                if place == 0:
                    attempt = f"{group}-k{PLAN.attempts}"
                    lost = masked(
                        attempt, group, ref, version, stage="heldout", arm=arm, adapter_sha256=sha
                    )
                    dispatch(lost, log)
                    write(failed, lost, log)
    values = {"prefix_cache_queries_total": 110.0, "prefix_cache_hits_total": 25.0}
    log.append(COUNTERS, replica=0, when="end", values={**values})
    log.append(STOPPED, problems=[], left=[])
    log.stage("done")
    write_json(directory.audit, audit(directory))
    write_json(directory.summary, summarize_evaluation(directory))
