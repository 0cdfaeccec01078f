"""Chats to fine-tune on, and pairs of them: the `sft` and `preferences` sets.

Invariants:
- Only graded training episodes are used, and none that a secret was removed from.
- An `sft` row is one branch of a solved episode, as it happened but for summaries that
  were rejected.
- A pair is of one group: same task, same weights, same prompt; one episode was solved and
  the other was not, each went through one branch, and they say different things.
- Pairs are chosen by attempt id alone: the same campaign gives the same pairs.
- One group is held at a time, without its tokens; of all episodes only where they lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

import zstandard

from rl.evidence.dataset.messages import (
    ChatMessage,
    chat,
    episode_messages,
    opening_length,
    without_rejected_summaries,
)
from rl.evidence.dataset.rows import Row, Source
from rl.evidence.dataset.scrub import Scrubber
from rl.evidence.stats import solved
from rl.evidence.traces import Frame, parse_record, read_frames
from rl.files import read_errors
from rl.records import EpisodeRecord

DEFAULT_PAIRS_PER_GROUP = 4


def sft_rows(source: Source, record: EpisodeRecord) -> Iterator[Row]:
    """A row for each branch of a solved training episode; none of another."""
    if record.stage != "train" or record.outcome != "graded" or not solved(record):
        return
    task = source.task("train", record)
    turns = without_rejected_summaries(record.turns)
    messages = episode_messages(source.agent, task.instruction, turns)
    for branch, said in groupby(messages, key=lambda message: message["branch"]):
        branch_messages = list(said)
        if not any(message["sampled"] for message in branch_messages):
            continue
        yield {
            "messages": chat(branch_messages),
            "run_id": source.frozen.run_id,
            "attempt_id": record.attempt_id,
            "branch": branch,
            "task_name": record.task_name,
            "task_digest": record.task_digest,
            "policy_version": record.version,
        }


@dataclass(slots=True)
class _Group:
    """Where the episodes of one group lie, by attempt id."""

    solved: dict[str, Frame] = field(default_factory=dict[str, Frame])
    others: dict[str, Frame] = field(default_factory=dict[str, Frame])


def preference_rows(source: Source, scrubber: Scrubber, most: int) -> Iterator[Row]:
    """At most `most` pairs of each group, groups by their name.

    Raises:
        EvidenceError: the trace is damaged.
    """
    groups = _indexed(source)
    for group_id in sorted(groups):
        yield from islice(_pairs(source, scrubber, groups[group_id]), most)


def _indexed(source: Source) -> dict[str, _Group]:
    """Where the graded training episodes lie that a pair can be made of."""
    groups: defaultdict[str, _Group] = defaultdict(_Group)
    path = source.directory.trace("train")
    for frame in read_frames(path):
        record = parse_record(frame, path)
        if len({turn.branch for turn in record.turns}) == 1:
            group = groups[record.group_id]
            side = group.solved if solved(record) else group.others
            side[record.attempt_id] = Frame(frame.index, frame.offset, frame.end, b"")
    return {name: group for name, group in groups.items() if group.solved and group.others}


def _pairs(source: Source, scrubber: Scrubber, group: _Group) -> Iterator[Row]:
    """Every pair of a group, each episode once before any is used twice."""
    chosen = _candidates(source, scrubber, group.solved)
    rejected = _candidates(source, scrubber, group.others)
    for shift in range(len(rejected)):
        for place, good in enumerate(chosen):
            bad = rejected[(place + shift) % len(rejected)]
            if good.completion != bad.completion:
                yield _pair(source, good, bad)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One side of a pair."""

    record: EpisodeRecord
    prompt: list[ChatMessage]
    completion: list[ChatMessage]


def _candidates(source: Source, scrubber: Scrubber, places: dict[str, Frame]) -> list[_Candidate]:
    """Episodes by attempt id, those that say the same but once, and none with a secret."""
    found: list[_Candidate] = []
    opening = opening_length(source.agent)
    for name in sorted(places):
        record = _read(source, places[name])
        turns = without_rejected_summaries(record.turns)
        instruction = source.task("train", record).instruction
        said = chat(episode_messages(source.agent, instruction, turns))
        one = _Candidate(
            record=record.model_copy(update={"samples": [], "turns": []}),
            prompt=said[:opening],
            completion=said[opening:],
        )
        if any(one.completion == other.completion for other in found):
            continue
        if not any(scrubber.scrub(message["content"])[1] for message in said):
            found.append(one)
    return found


def _pair(source: Source, good: _Candidate, bad: _Candidate) -> Row:
    return {
        "prompt": good.prompt,
        "chosen": good.completion,
        "rejected": bad.completion,
        "run_id": source.frozen.run_id,
        "group_id": good.record.group_id,
        "chosen_attempt_id": good.record.attempt_id,
        "rejected_attempt_id": bad.record.attempt_id,
        "chosen_reward": good.record.reward,
        "rejected_reward": bad.record.reward,
        "task_name": good.record.task_name,
        "task_digest": good.record.task_digest,
        "policy_version": good.record.version,
    }


def _read(source: Source, place: Frame) -> EpisodeRecord:
    """The record that lies at a place of the training trace."""
    path = source.directory.trace("train")
    with read_errors(path), path.open("rb") as file:
        file.seek(place.offset)
        frame = file.read(place.end - place.offset)
    data = zstandard.ZstdDecompressor().decompressobj().decompress(frame)
    return parse_record(Frame(place.index, place.offset, place.end, data), path)
