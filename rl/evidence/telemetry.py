"""Latency and tokens of a run's episodes: what a probe is for.

Invariants:
- Everything is a pure function of the records; what was not measured is absent.
- Percentiles are NumPy's, linear between the two nearest values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from pydantic import Field

from rl.records import EpisodeRecord, Record

QUANTILES: Final = (0.5, 0.9, 0.99)


class Spread(Record):
    """How one measure is distributed."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


class Telemetry(Record):
    """What the episodes took; times in seconds."""

    episodes: int = Field(description="ended ones, whatever their outcome")
    turns: int
    stop_reasons: dict[str, int] = Field(description="graded episodes by stop reason")
    problems: dict[str, int] = Field(description="turns without a command to run, by why")
    exit_codes: dict[str, int] = Field(description="commands by exit code")
    prompt_tokens: int = Field(description="over all turns, those of earlier turns counted again")
    sampled_tokens: int
    spans: dict[str, Spread] = Field(
        description="generate, execute: by turn; turns, tokens and the stages: by episode"
    )
    tokens_per_s: float | None = Field(
        description="sampled tokens of one episode over its generating time, median"
    )
    prefix_hit_rate: float | None = Field(
        description="share of prompt tokens that the engines had cached; None: not told"
    )


def telemetry(
    records: Iterable[EpisodeRecord], counters: Sequence[Mapping[str, float]] = ()
) -> Telemetry:
    """Measure `records`; `counters` are the engines', end less begin."""
    held = list(records)
    turns = [turn for record in held for turn in record.turns]
    spans: dict[str, list[float]] = {
        "generate": [turn.generate_s for turn in turns],
        "execute": [turn.execute_s for turn in turns if turn.command is not None],
        "turns": [float(len(record.turns)) for record in held if record.turns],
        "tokens": [float(_sampled(record)) for record in held if record.turns],
    }
    for record in held:
        for stage, seconds in record.timings.items():
            spans.setdefault(stage, []).append(seconds)
    speeds = [
        _sampled(record) / generating
        for record in held
        if (generating := sum(turn.generate_s for turn in record.turns)) > 0
    ]
    queries = sum(row.get("prefix_cache_queries_total", 0.0) for row in counters)
    hits = sum(row.get("prefix_cache_hits_total", 0.0) for row in counters)
    commands = Counter(str(turn.exit_code) for turn in turns if turn.command is not None)
    graded = [record for record in held if record.outcome == "graded"]
    return Telemetry(
        episodes=len(held),
        turns=len(turns),
        stop_reasons=dict(Counter(record.stop_reason for record in graded)),
        problems=dict(Counter(turn.problem for turn in turns if turn.problem is not None)),
        exit_codes=dict(commands),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        sampled_tokens=sum(map(_sampled, held)),
        spans={name: spread(values) for name, values in spans.items() if values},
        tokens_per_s=float(np.median(speeds)) if speeds else None,
        prefix_hit_rate=hits / queries if queries else None,
    )


def spread(values: Sequence[float]) -> Spread:
    """The distribution of at least one value."""
    data = np.array(values, dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.quantile(data, QUANTILES))
    return Spread(
        count=len(values),
        mean=float(data.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        largest=float(data.max()),
    )


def telemetry_lines(found: Telemetry) -> list[str]:
    """A table for a terminal."""
    lines = [f"{'seconds, counts':<16} {'n':>6} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9}"]
    for name, row in sorted(found.spans.items()):
        numbers = f"{row.mean:>9.3f} {row.p50:>9.3f} {row.p90:>9.3f} {row.p99:>9.3f}"
        lines.append(f"{name:<16} {row.count:>6} {numbers}")
    lines.append(f"sampled tokens   {found.sampled_tokens}, of prompts {found.prompt_tokens}")
    if found.tokens_per_s is not None:
        lines.append(f"tokens/s         {found.tokens_per_s:.1f} in one episode, median")
    if found.prefix_hit_rate is not None:
        lines.append(f"prefix cache     {found.prefix_hit_rate:.0%} of prompt tokens")
    for title, counts in (
        ("stop reasons", found.stop_reasons),
        ("problems", found.problems),
        ("exit codes", found.exit_codes),
    ):
        if counts:
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            lines.append(f"{title:<16} {', '.join(f'{key} {n}' for key, n in ordered)}")
    return lines


def same_tokens(before: Iterable[EpisodeRecord], after: Iterable[EpisodeRecord]) -> tuple[int, int]:
    """(attempts that sampled the same tokens, graded attempts of both), by attempt id."""
    first = {record.attempt_id: _tokens(record) for record in before if record.samples}
    second = {record.attempt_id: _tokens(record) for record in after if record.samples}
    both = first.keys() & second.keys()
    return sum(first[key] == second[key] for key in both), len(both)


def _tokens(record: EpisodeRecord) -> list[tuple[list[int], list[bool]]]:
    return [(sample.token_ids, sample.sampled) for sample in record.samples]


def _sampled(record: EpisodeRecord) -> int:
    return sum(turn.completion_tokens for turn in record.turns)
