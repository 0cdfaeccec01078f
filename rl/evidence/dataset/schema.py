"""The columns of every set in a dataset, with what each means.

Invariants:
- A set's rows have exactly these columns, in this order, in Parquet and in JSON Lines.
- Every field has a description; the card and the documentation are made from it.
- A type loses nothing: logprobs are 64 bits wide, as they are in the traces.
- `text` marks whatever was written by a model, a program, or a task's author: it is what
  secrets are looked for in. `in_tokens` marks text that an episode's tokens may repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa

SCHEMA_VERSION: Final = 1

# pyarrow's classes carry no types; these names say what is meant.
type ArrowType = Any
type ArrowSchema = Any
type ArrowBatch = Any

SetName = Literal["episodes", "sft", "preferences"]
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Field:
    """One column, or one field of the structs in it.

    Attributes:
        name: of the column.
        kind: its type.
        about: what it means.
        fields: of its structs, where it is a list of them.
        text: whether secrets are looked for in it.
        in_tokens: whether the episode's tokens may repeat it.
        repeated: whether few values of it recur, so that a dictionary makes it smaller.
    """

    name: str
    kind: ArrowType
    about: str
    fields: tuple[Field, ...] = ()
    text: bool = False
    in_tokens: bool = False
    repeated: bool = False


def _texts(name: str, about: str, *, in_tokens: bool) -> Field:
    return Field(name, pa.string(), about, text=True, in_tokens=in_tokens)


def _label(name: str, about: str) -> Field:
    return Field(name, pa.string(), about, repeated=True)


def _structs(name: str, about: str, *fields: Field) -> Field:
    kind = pa.list_(pa.struct([(field.name, field.kind) for field in fields]))
    return Field(name, kind, about, fields=fields)


def _chat(name: str, about: str) -> Field:
    return _structs(
        name,
        about,
        _label("role", "system, user, assistant or tool"),
        _texts("content", "the text", in_tokens=True),
    )


EPISODES: Final[tuple[Field, ...]] = (
    Field("schema_version", pa.int32(), "version of this table"),
    _label("run_id", "the campaign"),
    Field("attempt_id", pa.string(), "the episode; unique within its campaign"),
    _label("group_id", "attempts at one task under one policy version, or an evaluation cell"),
    _label("stage", "train; eval: during training; heldout: evaluation, screening or probe"),
    _label("arm", "set of weights under evaluation; null in training"),
    _label("task_name", "the task package"),
    _label("task_digest", "Harbor content digest of the package, sha256"),
    _label("task_family", "family within a bank; empty if unknown"),
    Field("task_tier", pa.int32(), "difficulty within a bank; null if unknown"),
    Field(
        "instruction",
        pa.string(),
        "what the agent is told, as the package has it",
        text=True,
        in_tokens=True,
        repeated=True,
    ),
    Field("policy_version", pa.int32(), "optimizer updates behind the weights that sampled it"),
    _label("adapter_sha256", "evaluation: the arm's adapter; null without one"),
    _label("outcome", "graded; masked: lost to infrastructure; cancelled"),
    Field("reward", pa.float64(), "the verifier's; null unless graded"),
    Field("solved", pa.bool_(), "whether the reward is full; null unless graded"),
    _label("stop_reason", "why the agent stopped"),
    _structs(
        "messages",
        "what was said, rebuilt from the record: each branch of the context from its beginning",
        Field("branch", pa.int32(), "branch of the context, from 0; a summary opens the next one"),
        _label("role", "system, user, assistant or tool"),
        _texts("content", "the text; of a reply: as decoded", in_tokens=True),
        Field(
            "sampled", pa.bool_(), "whether the branch's sample marks it as sampled, to be trained"
        ),
    ),
    _structs(
        "samples",
        "token sequences as the engine saw and sampled them, one per branch; null where a "
        "secret was removed from text that they may hold",
        Field("branch", pa.int32(), "branch of the context"),
        Field("token_ids", pa.list_(pa.int32()), "every token, in order"),
        Field("sampled", pa.list_(pa.bool_()), "per token: sampled by the model here"),
        Field(
            "logprobs",
            pa.list_(pa.float64()),
            "per token: the sampler's, after temperature, nats; 0 where not sampled",
        ),
    ),
    _structs(
        "turns",
        "each reply of the model and what became of it",
        _label("purpose", "act; summary: asked for to make room"),
        Field("branch", pa.int32(), "branch of the context"),
        Field("prompt_tokens", pa.int32(), "where its tokens begin in the branch's sample"),
        Field("completion_tokens", pa.int32(), "how many they are"),
        _label("finish_reason", "the engine's"),
        _label("problem", "why there was no command to run, or a summary was rejected; or null"),
        _texts("command", "the command that was run, or null", in_tokens=True),
        Field("exit_code", pa.int32(), "of the command; 124: stopped at its time limit"),
        Field("generate_s", pa.float64(), "time of the generation, s"),
        Field("execute_s", pa.float64(), "time of the command, s"),
    ),
    _texts(
        "final_output",
        "what the last command printed, where the episode ended with one, so that no message "
        "shows it; or null",
        in_tokens=True,
    ),
    _structs(
        "timings",
        "time by stage of the episode",
        _label("name", "create, agent, verify, stop or total"),
        Field("seconds", pa.float64(), "s"),
    ),
    _texts("verifier_log", "the verifier's output, cut", in_tokens=False),
    _label("failure_kind", "error class; null unless masked"),
    _texts("failure_message", "what failed; null unless masked", in_tokens=False),
    Field("started_at", pa.float64(), "unix time, s"),
    Field("replica", pa.int32(), "engine that sampled it"),
    Field("trained_in_update", pa.int32(), "update that trained on it; null: none did"),
    Field("scrubbed", pa.int32(), "secrets that were replaced in this row"),
    _label("config_digest", "sha256 of the campaign's configuration"),
    _label("model_name", "base model"),
    _label("model_pin", "commit, sha256 or path of the base model"),
    _label("code_commit", "git commit of the program; null outside a checkout"),
)

SFT: Final[tuple[Field, ...]] = (
    _chat("messages", "one branch of a solved training episode; it ends with a reply"),
    _label("run_id", "the campaign"),
    Field("attempt_id", pa.string(), "the episode"),
    Field("branch", pa.int32(), "branch of the context"),
    _label("task_name", "the task package"),
    _label("task_digest", "its content digest, sha256"),
    Field("policy_version", pa.int32(), "weights that sampled it"),
)

PREFERENCES: Final[tuple[Field, ...]] = (
    _chat("prompt", "system message, examples and task"),
    _chat("chosen", "what followed in a solved episode"),
    _chat("rejected", "what followed in an episode of the same group that was not solved"),
    _label("run_id", "the campaign"),
    _label("group_id", "the group of both"),
    Field("chosen_attempt_id", pa.string(), "the solved episode"),
    Field("rejected_attempt_id", pa.string(), "the other one"),
    Field("chosen_reward", pa.float64(), "of the solved episode"),
    Field("rejected_reward", pa.float64(), "of the other one"),
    _label("task_name", "the task package"),
    _label("task_digest", "its content digest, sha256"),
    Field("policy_version", pa.int32(), "weights that sampled both"),
)

SETS: Final[dict[SetName, tuple[Field, ...]]] = {
    "episodes": EPISODES,
    "sft": SFT,
    "preferences": PREFERENCES,
}


def arrow_schema(name: SetName) -> ArrowSchema:
    """The columns of a set as Arrow sees them."""
    return pa.schema([(field.name, field.kind) for field in SETS[name]])


def described(name: SetName) -> list[tuple[str, str, str]]:
    """Path, type and meaning of every field of a set, nested ones behind their column."""
    rows: list[tuple[str, str, str]] = []
    for field in SETS[name]:
        rows.append((field.name, _type_name(field.kind), field.about))
        rows += [
            (f"{field.name}[].{inner.name}", _type_name(inner.kind), inner.about)
            for inner in field.fields
        ]
    return rows


def column_table(name: SetName) -> str:
    """`described` as a Markdown table."""
    rows = [f"| `{path}` | {kind} | {about} |" for path, kind, about in described(name)]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _type_name(kind: ArrowType) -> str:
    if pa.types.is_list(kind):
        inner = kind.value_type
        return "list of struct" if pa.types.is_struct(inner) else f"list of {_type_name(inner)}"
    return {"double": "float64"}.get(str(kind), str(kind))
