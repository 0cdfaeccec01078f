"""A campaign's episodes as rows, scrubbed.

Invariants:
- A row has the columns of `schema.EPISODES` and nothing of a secret that was found.
- Where one was found in text that the tokens may hold, the row has no tokens.
- Every row names a task of its own campaign, on the right side of the split.
- One record is held at a time; of all the others only which update trained on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rl.agent_config import AgentConfig
from rl.errors import EvidenceError
from rl.evidence.dataset.messages import episode_messages
from rl.evidence.dataset.schema import EPISODES, SCHEMA_VERSION, Field, Split
from rl.evidence.dataset.scrub import Scrubber
from rl.evidence.frozen import Frozen, load_frozen
from rl.evidence.layout import STAGES, CampaignDir
from rl.evidence.stats import solved
from rl.evidence.traces import parse_record, read_frames
from rl.records import EpisodeRecord, Stage, TaskRef

Row = dict[str, Any]
SPLITS: Final[dict[Stage, Split]] = {"train": "train", "eval": "eval", "heldout": "eval"}
_TEXTS: Final = tuple(
    field for field in EPISODES if field.text or any(inner.text for inner in field.fields)
)


@dataclass(frozen=True, slots=True)
class Source:
    """One campaign, and what its rows need besides their records."""

    directory: CampaignDir
    frozen: Frozen
    agent: AgentConfig
    tasks: dict[Split, dict[str, TaskRef]]
    trained_in: dict[str, int]

    @classmethod
    def opened(cls, directory: CampaignDir) -> Source:
        """Read all but the episodes.

        Raises:
            EvidenceError: something is missing or damaged.
        """
        frozen = load_frozen(directory)
        updates = directory.update_rows().read(live=True)
        return cls(
            directory=directory,
            frozen=frozen,
            agent=frozen.serving_config().agent,
            tasks={
                "train": {task.digest: task for task in frozen.train},
                "eval": {task.digest: task for task in frozen.heldout},
            },
            trained_in={
                attempt_id: update.update
                for update in updates
                for group in update.groups
                for attempt_id in group.attempt_ids
            },
        )

    def episodes(self, *, failed: bool) -> Iterator[tuple[Split, EpisodeRecord]]:
        """Every record with its split, training first.

        Args:
            failed: those that were not graded as well.

        Raises:
            EvidenceError: a trace is damaged, or holds an episode of another stage.
        """
        places: list[tuple[Stage, CampaignDir]] = [(stage, self.directory) for stage in STAGES]
        for shard in self.directory.shards:
            places.append(("heldout", shard))
        for stage, directory in places:
            records = _records(directory.trace(stage))
            if failed:
                others = _records(directory.failed_trace)
                records = chain(records, (record for record in others if record.stage == stage))
            for record in records:
                if record.stage != stage:
                    raise EvidenceError(
                        f"is of stage {record.stage}, and lies among those of {stage}",
                        f"attempt {record.attempt_id} of {self.directory.root}",
                        f"audit the campaign: python -m rl.audit {self.directory.root}",
                    )
                yield SPLITS[stage], record

    def task(self, split: Split, record: EpisodeRecord) -> TaskRef:
        """The task of a record.

        Raises:
            EvidenceError: the campaign has no such task in this split.
        """
        task = self.tasks[split].get(record.task_digest)
        if task is None:
            raise EvidenceError(
                f"task '{record.task_name}' is none of the campaign's "
                f"{'training' if split == 'train' else 'held-out'} tasks",
                f"attempt {record.attempt_id} of {self.directory.root}",
                f"audit the campaign: python -m rl.audit {self.directory.root}",
            )
        return task

    def row(self, split: Split, record: EpisodeRecord) -> Row:
        """The row of a record, not scrubbed yet; raises as `task` does."""
        task, failure = self.task(split, record), record.failure
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.frozen.run_id,
            "attempt_id": record.attempt_id,
            "group_id": record.group_id,
            "stage": record.stage,
            "arm": record.arm,
            "task_name": record.task_name,
            "task_digest": record.task_digest,
            "task_family": task.family,
            "task_tier": task.tier,
            "instruction": task.instruction,
            "policy_version": record.version,
            "adapter_sha256": record.adapter_sha256,
            "outcome": record.outcome,
            "reward": record.reward,
            "solved": solved(record) if record.outcome == "graded" else None,
            "stop_reason": record.stop_reason,
            "messages": episode_messages(self.agent, task.instruction, record.turns),
            "samples": _samples(record),
            "turns": _turns(record),
            "final_output": _final_output(record),
            "timings": [{"name": key, "seconds": s} for key, s in record.timings.items()],
            "verifier_log": record.verifier_log,
            "failure_kind": failure.kind if failure else None,
            "failure_message": failure.message if failure else None,
            "started_at": record.started_at,
            "replica": record.replica,
            "trained_in_update": self.trained_in.get(record.attempt_id),
            "scrubbed": 0,
            "config_digest": self.frozen.config_digest,
            "model_name": self.frozen.model.name,
            "model_pin": self.frozen.model.pin,
            "code_commit": self.frozen.code.commit,
        }


def _records(path: Path) -> Iterator[EpisodeRecord]:
    return (parse_record(frame, path) for frame in read_frames(path))


def scrub_row(row: Row, scrubber: Scrubber) -> Counter[str]:
    """Replace the secrets in `row`; returns how many of each kind there were.

    The tokens go where a secret was in text that they may hold.
    """
    counts: Counter[str] = Counter()
    if scrubber.clean("\0".join(text for _, _, text in _text_places(row))):
        return counts
    for holder, field, text in _text_places(row):
        holder[field.name], found = scrubber.scrub(text)
        counts += found
        if found and field.in_tokens:
            row["samples"] = None
    row["scrubbed"] = counts.total()
    return counts


def _text_places(row: Row) -> Iterator[tuple[Row, Field, str]]:
    """Every text of a row that is not null: what holds it, under which field."""
    for field in _TEXTS:
        value = row[field.name]
        if field.text and value is not None:
            yield row, field, value
        inner_texts = [inner for inner in field.fields if inner.text]
        for struct in (value or ()) if inner_texts else ():
            for inner in inner_texts:
                if struct[inner.name] is not None:
                    yield struct, inner, struct[inner.name]


def _final_output(record: EpisodeRecord) -> str | None:
    """The one output that is in no message: nothing followed it."""
    last = record.turns[-1] if record.turns else None
    return last.output if last is not None and last.command is not None else None


def _samples(record: EpisodeRecord) -> list[Row]:
    return [
        {
            "branch": sample.branch,
            "token_ids": sample.token_ids,
            "sampled": sample.sampled,
            "logprobs": sample.logprobs,
        }
        for sample in record.samples
    ]


def _turns(record: EpisodeRecord) -> list[Row]:
    return [
        {
            "purpose": turn.purpose,
            "branch": turn.branch,
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "finish_reason": turn.finish_reason,
            "problem": turn.problem,
            "command": turn.command,
            "exit_code": turn.exit_code,
            "generate_s": turn.generate_s,
            "execute_s": turn.execute_s,
        }
        for turn in record.turns
    ]
