"""The records that cross actor boundaries and land in traces.

Invariants:
- Every record is frozen, typed and carries `schema_version`; unknown fields are
  refused on reading.
- `Sample` holds tokens exactly as the engine saw and sampled them: a token that
  the model did not sample has mask 0 and logprob 0.
- An `EpisodeRecord` is terminal: `graded` has a finite reward and a version,
  `masked` and `cancelled` have no reward at all.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

Outcome = Literal["graded", "masked", "cancelled"]
Stage = Literal[
    "train",
    "eval",  # of a version during training, on held-out tasks
    "heldout",  # of an arm, when nothing is trained: evaluation, screening, probe
]
StopReason = Literal[
    "completed",  # the model ended the episode itself, or its turns were used up as planned
    "turn_limit",
    "context_limit",  # no room for another turn, nor for a summary, or none was acceptable
    "time_limit",
    "no_command",  # no usable command in too many consecutive turns, or a turn beyond repair
    "infrastructure",
    "cancelled",
]


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION


class TaskRef(Record):
    """A task package pinned by content."""

    name: str = Field(description="package name, unique within a campaign")
    digest: str = Field(description="Harbor content digest, sha256 hex")
    path: str = Field(description="package folder, relative to the campaign's task root")
    family: str = Field(default="", description="family within a bank; empty if unknown")
    tier: int | None = Field(default=None, description="difficulty within a bank; None if unknown")
    instruction: str = Field(description="what the agent is told")


class AttemptSpec(Record):
    """One attempt, as the scheduler dispatches it."""

    attempt_id: str = Field(description="unique within the campaign")
    group_id: str = Field(description="the group, or the evaluation cell, it belongs to")
    task: TaskRef
    version: int = Field(ge=0, description="policy version v that samples it")
    stage: Stage = Field(default="train", description="what the attempt is for")
    arm: str | None = Field(default=None, description="evaluation arm; None in training")
    adapter_sha256: str | None = Field(
        default=None, description="evaluation: digest of the arm's adapter; None without one"
    )
    served_model: str = Field(description="name under which the replica serves the weights")
    replica: int = Field(ge=0, description="replica index")
    base_url: str = Field(description="the replica's address, http://host:port")
    seed: int = Field(description="sampling seed of the first turn")


class Sample(Record):
    """One training sequence: a branch of the episode's context.

    A token that the model sampled is marked so in one sample of its episode, unless it
    belongs to a rejected summary. The lists have one entry per token.
    """

    branch: int = Field(default=0, description="which of the episode's branches, from 0")
    token_ids: list[int]
    sampled: list[bool] = Field(description="true where the model sampled the token")
    logprobs: list[float] = Field(
        description="sampler's logprob after temperature, nats; 0 where not sampled"
    )

    @model_validator(mode="after")
    def _aligned(self) -> Sample:
        if not len(self.token_ids) == len(self.sampled) == len(self.logprobs):
            raise ValueError("token_ids, sampled and logprobs differ in length")
        return self

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that are trained on."""
        return sum(self.sampled)


TurnProblem = Literal[
    "cut",  # by the length limit, before a whole command
    "malformed",  # a call that can't be run
    "no_call",
    "empty",  # the rest are a summary's: it is rejected, and never trained on
    "too_long",
    "holds_call",
]


class TurnRecord(Record):
    """One reply of the model and what became of it.

    Its tokens are those from `prompt_tokens` on in the sample of its branch. The messages
    of a branch, in order: system, examples and task; then, after the first branch, the
    `handover` of the summary before it and the `kept_turns` latest turns; then for each
    record `asked` if it is not empty, the reply, and `answer` if it is not empty and another
    record of the branch follows.
    """

    purpose: Literal["act", "summary"] = Field(
        default="act", description="summary: it was asked to sum up, to make room"
    )
    branch: int = Field(default=0, description="the branch of the context it belongs to, from 0")
    prompt_tokens: int = Field(description="tokens of its branch before the reply")
    completion_tokens: int = Field(description="tokens of the reply")
    text: str = Field(description="the completion, decoded")
    finish_reason: str
    asked: str = Field(default="", description="summary: the user's message that asked for it")
    problem: TurnProblem | None = Field(
        default=None, description="why there was no command to run, or the summary was rejected"
    )
    closer: str = Field(
        default="", description="masked text behind an unfinished call, that closes it"
    )
    command: str | None = Field(default=None, description="the command that was run")
    left_out: int = Field(default=0, description="further calls of the reply, which were not run")
    exit_code: int | None = Field(default=None, description="124: stopped at its time limit")
    output: str = Field(default="", description="what the model was shown of its output")
    note: str = Field(default="", description="what the harness told the model instead")
    handover: str = Field(
        default="",
        description="accepted summary: the user's message with it, which opens the next branch",
    )
    kept_turns: int = Field(
        default=0, description="accepted summary: latest turns that the next branch repeats"
    )
    generate_s: float = 0.0
    execute_s: float = 0.0

    @property
    def answer(self) -> str:
        """The message that the reply led to: a command's output, or a note."""
        if self.command is None:
            return self.note
        text = f"{self.output}\n[exit status {self.exit_code}]"
        if self.left_out:
            text += f"\n[{self.left_out} further commands in this reply were not run]"
        return text


class Failure(Record):
    """Why an attempt was masked."""

    kind: str = Field(description="error class, such as SandboxError")
    message: str


class EpisodeRecord(Record):
    """How one attempt ended."""

    attempt_id: str
    group_id: str
    task_name: str
    task_digest: str
    version: int
    stage: Stage = Field(default="train", description="what the attempt was for")
    arm: str | None = None
    adapter_sha256: str | None = Field(
        default=None, description="evaluation: digest of the arm's adapter; None without one"
    )
    replica: int
    outcome: Outcome
    reward: float | None = None
    stop_reason: StopReason
    samples: list[Sample] = Field(default_factory=list)
    turns: list[TurnRecord] = Field(default_factory=list)
    timings: dict[str, float] = Field(
        default_factory=dict, description="seconds by stage: create, agent, verify, stop, total"
    )
    verifier_log: str = Field(default="", description="the verifier's output, cut")
    failure: Failure | None = None
    started_at: float = Field(description="unix time, s")

    @classmethod
    def of(cls, spec: AttemptSpec, **fields: Any) -> EpisodeRecord:
        """The record of the attempt `spec`, with how it ended in `fields`."""
        return cls(
            attempt_id=spec.attempt_id,
            group_id=spec.group_id,
            task_name=spec.task.name,
            task_digest=spec.task.digest,
            version=spec.version,
            stage=spec.stage,
            arm=spec.arm,
            adapter_sha256=spec.adapter_sha256,
            replica=spec.replica,
            **fields,
        )

    @classmethod
    def cancelled(cls, spec: AttemptSpec, started_at: float) -> EpisodeRecord:
        """The record of an attempt that was given up before it ended."""
        return cls.of(spec, outcome="cancelled", stop_reason="cancelled", started_at=started_at)

    @model_validator(mode="after")
    def _terminal(self) -> EpisodeRecord:
        if self.outcome == "graded":
            if self.reward is None or not math.isfinite(self.reward):
                raise ValueError("a graded episode has a finite reward")
        elif self.reward is not None:
            raise ValueError(f"a {self.outcome} episode has no reward")
        if (self.outcome == "masked") != (self.failure is not None):
            raise ValueError("failure is given exactly for a masked episode")
        return self


class Group(Record):
    """The graded attempts of one group, ready to be trained on."""

    group_id: str
    task_name: str
    version: int
    episodes: list[EpisodeRecord]

    @property
    def rewards(self) -> list[float]:
        """Rewards in attempt order."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are equal, so that no advantage is left."""
        return len(set(self.rewards)) < 2


class UpdateMetrics(Record):
    """What one update did.

    r is a loss token's importance ratio: its probability under the policy in training over
    that under the sampler, within e^-20 to e^20.
    """

    update: int
    loss: float = Field(description="summed loss over trainer.loss.normalisation's divisor")
    grad_norm: float = Field(description="before it is clipped")
    lr: float
    reward_mean: float
    reward_std: float
    episodes: int
    zero_variance_groups: int = Field(description="groups whose rewards are all equal")
    sequences: int | None = Field(
        default=None, description="samples with a loss token; None: not recorded"
    )
    sampled_tokens: int = Field(description="loss tokens: sampled ones that are predicted")
    prompt_tokens: int | None = Field(
        default=None, description="tokens before a sample's first sampled one; None: not recorded"
    )
    tool_tokens: int | None = Field(
        default=None,
        description="tokens after it that were not sampled, such as tool output; "
        "None: not recorded",
    )
    total_tokens: int = Field(description="all tokens of the samples trained on")
    computed_tokens: int | None = Field(
        default=None,
        description="token positions that the model computed, padding included and shared ones "
        "once; depends on how the work was divided. None: not recorded",
    )
    mismatch_kl: float = Field(description="mean of r - 1 - ln r, sampler against trainer, nats")
    mismatch_kl_by_staleness: dict[int, float] = Field(
        default_factory=dict[int, float],
        description="the same of the loss tokens of each staleness, nats: at 0 sampler and "
        "trainer have the same weights, so that is the engines' own difference. "
        "Empty: not recorded",
    )
    ratio_min: float
    ratio_max: float
    ratio_quantiles: dict[str, float] = Field(
        default_factory=dict[str, float],
        description="p05: the least r that 5% of the loss tokens don't exceed, exact. "
        "Empty: not recorded",
    )
    effective_sample_size: float | None = Field(
        default=None,
        description="(sum r)^2 / sum r^2, as a share of the loss tokens; None: not recorded",
    )
    clipped_fraction: float = Field(
        description="share of loss tokens whose gradient the objective switched off or cut"
    )
    entropy: float = Field(description="mean entropy of the sampled positions, nats")
    staleness: dict[int, int] = Field(description="episodes by staleness")
    seconds: float = Field(description="computing time of the update, s")
    wall_s: float = Field(default=0.0, description="from the step before to this one, s")


class Probe(Record):
    """The trainer's logprobs of a fixed prompt under one version."""

    token_ids: list[int]
    logprobs: list[float] = Field(description="of token_ids[1:], temperature 1, nats")
    base_logprobs: list[float] = Field(
        default_factory=list,
        description="the same without the adapter; their difference is what it changes. "
        "Empty: not known",
    )


class AdapterBytes(Record):
    """A PEFT adapter as files, and its probe."""

    version: int
    files: dict[str, bytes] = Field(description="file name to content, a PEFT directory")
    sha256: str = Field(description="over the sorted names and contents")
    probe: Probe


class ReplicaFailure(Record):
    """Why a replica did not do what it was asked for."""

    generation: int = Field(description="of the replica, in which it failed")
    why: str


class Publication(Record):
    """How one version was published."""

    version: int
    replicas: dict[int, int] = Field(
        description="replicas that serve it, proven, and the generation of each: how often "
        "it had been lost before"
    )
    failed: dict[int, ReplicaFailure] = Field(description="replicas taken out of rotation")
    seconds: float = Field(description="wall time of the whole publication, s")
    parts: dict[int, dict[str, float]] = Field(
        description="per replica: put, transfer, write, load, probe, total, s"
    )
