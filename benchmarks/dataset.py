"""`python -m benchmarks.dataset`: episodes exported per core second, against `datasets`.

All contenders write the same episodes, alternating in one run, in one process that may
use one core, with Arrow's own threads off. Rates are per second of the processor.

- rows to Parquet: the same finished rows, in memory, to one Parquet file. `datasets` in two
  of the ways that it documents: a generator through an Arrow file, and a list in memory;
  the better one counts. (Its third, `IterableDataset.to_parquet`, takes twenty times as long.)
- rows to both formats: the same, and JSON Lines compressed with zstd beside it.
- trace to Parquet: from a campaign's trace, which both read with our reader; ours looks for
  secrets as well.
- trace to dataset: ours is `rl.dataset build` whole, but for the audit: both formats,
  secrets, checksums, card. `datasets` writes both formats.

Before a round counts, what each wrote is read back and compared with the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from rl.errors import EXIT_OK, InfrastructureError, run_command
from rl.records import EpisodeRecord, Sample, TurnRecord

SEED = 0
QUICK_EPISODES = 60
TURNS = 6  # of an episode: what a terminal task of middling length takes
PROMPT_TOKENS, REPLY_TOKENS, OUTPUT_TOKENS = 350, 120, 250
VOCABULARY = 50_000
WORDS = 4_000  # different ones; text repeats itself, and compressors live on that

Row = dict[str, Any]
Write = Callable[[Path], None]


def episodes(count: int, task_name: str, task_digest: str) -> Iterator[EpisodeRecord]:
    """Seeded episodes of several turns, with the shape of real ones."""
    draw = random.Random(SEED)
    words = ["".join(draw.choices("etaoinshrdlu/-._", k=draw.randint(2, 9))) for _ in range(WORDS)]
    common = [draw.randrange(VOCABULARY) for _ in range(WORDS)]
    prompt = draw.choices(common, k=PROMPT_TOKENS)

    def text(tokens: int) -> str:
        return " ".join(draw.choices(words, k=tokens * 3 // 4))

    for number in range(count):
        ids, sampled, logprobs = list(prompt), [False] * PROMPT_TOKENS, [0.0] * PROMPT_TOKENS
        turns: list[TurnRecord] = []
        for _ in range(TURNS):
            turns.append(
                TurnRecord(
                    prompt_tokens=len(ids),
                    completion_tokens=REPLY_TOKENS,
                    text=text(REPLY_TOKENS),
                    finish_reason="stop",
                    command=text(REPLY_TOKENS // 2),
                    exit_code=0,
                    output=text(OUTPUT_TOKENS),
                    generate_s=draw.random(),
                    execute_s=draw.random(),
                )
            )
            ids += draw.choices(common, k=REPLY_TOKENS + OUTPUT_TOKENS)
            sampled += [True] * REPLY_TOKENS + [False] * OUTPUT_TOKENS
            logprobs += [_as_engines_do(-draw.expovariate(3)) for _ in range(REPLY_TOKENS)]
            logprobs += [0.0] * OUTPUT_TOKENS
        yield EpisodeRecord(
            attempt_id=f"g{number // 8:05d}.0-a{number % 8}",
            group_id=f"g{number // 8:05d}.0",
            task_name=task_name,
            task_digest=task_digest,
            version=number // 64,
            replica=number % 2,
            outcome="graded",
            reward=float(draw.random() < 0.5),
            stop_reason="completed",
            samples=[Sample(token_ids=ids, sampled=sampled, logprobs=logprobs)],
            turns=turns,
            timings={"create": 0.2, "agent": draw.random(), "verify": 0.4, "total": 9.0},
            verifier_log=text(100),
            started_at=1_780_304_400.0 + number,
        )


def _as_engines_do(logprob: float) -> float:
    """The float32 nearest to `logprob`: what vLLM's answers hold."""
    return struct.unpack("f", struct.pack("f", logprob))[0]


def write_campaign(root: Path, count: int) -> Path:
    """A campaign's directory that holds `count` training episodes and nothing else."""
    from rl.config_file import parse_config
    from rl.evidence.code_pin import CodePin
    from rl.evidence.frozen import ModelPin, freeze
    from rl.evidence.layout import create
    from rl.evidence.traces import TraceWriter
    from rl.records import TaskRef

    directory = create("benchmark", root)
    task = TaskRef(name="a-task", digest="0" * 64, path="a-task", instruction="Do it.\n" * 20)
    config = parse_config(
        {
            "name": "benchmark",
            "model": {"source": "path", "name": "none", "path": "none"},
            "tasks": {"train": 1, "heldout": 1},
            "agent": {"system_prompt": "You work in bash.", "max_turns": 9, "max_new_tokens": 256},
            "episodes": {"concurrency": 8, "deadline_s": 300.0},
            "schedule": {"updates": 1, "batch_size": 8, "group_size": 8},
            "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 4096},
            "trainer": {"device": "cpu", "optimizer": {"lr": 4e-4}},
            "heldout": {"attempts": 1, "shards": 1},
            "limits": {"watchdog_s": 3600},
        },
        where="benchmark",
    )
    model = ModelPin(name="none", source="path", pin="none", files={})
    code = CodePin(commit=None, dirty=False, packages={})
    freeze(directory, config, train=[task], heldout=[], model=model, code=code)
    with TraceWriter(directory.trace("train")) as trace:
        for record in episodes(count, task.name, task.digest):
            trace.append(record)
    return directory.root


@dataclass(slots=True)
class Contender:
    """One way of writing a dataset.

    Attributes:
        task: what is compared.
        name: the writer's.
        write: writes the dataset below a new folder.
        core_s: of each round.
        bytes: of all that was written.
    """

    task: str
    name: str
    write: Write
    core_s: list[float] = field(default_factory=list[float])
    bytes: int = 0

    def run(self, folder: Path, rows: list[Row] | None = None) -> None:
        """One round; with `rows` its outcome is compared with them and the time left out."""
        began = time.process_time()
        self.write(folder)
        taken = time.process_time() - began
        if rows is None:
            self.core_s.append(taken)
        elif read_back(folder) != rows:
            raise InfrastructureError(f"{self.name} wrote other rows ({self.task})", str(folder))
        files = [path for path in folder.rglob("*") if path.suffix in (".parquet", ".zst")]
        self.bytes = sum(path.stat().st_size for path in files)
        shutil.rmtree(folder)


def contenders(campaign: Path, rows: list[Row]) -> list[Contender]:
    """All of them; ours first in each comparison."""
    import datasets
    import zstandard

    from rl.evidence.dataset.build import Request, build
    from rl.evidence.dataset.rows import Source, scrub_row
    from rl.evidence.dataset.schema import arrow_schema
    from rl.evidence.dataset.scrub import Scrubber
    from rl.evidence.dataset.writing import SplitWriter
    from rl.evidence.layout import CampaignDir

    columns = datasets.Features.from_arrow_schema(arrow_schema("episodes"))

    def ours(lines: bool) -> Write:
        def write(folder: Path) -> None:
            writer = SplitWriter(folder, "episodes", "train", lines=lines)
            for row in rows:
                writer.add(row)
            writer.finish()

        return write

    def parsed() -> Iterator[Row]:
        source = Source.opened(CampaignDir(campaign))
        for split, record in source.episodes(failed=False):
            yield source.row(split, record)

    def generated(make: Callable[[], Iterator[Row]], *, lines: bool = False) -> Write:
        def write(folder: Path) -> None:
            made = datasets.Dataset.from_generator(
                make,
                features=columns,
                cache_dir=str(folder / "cache"),
                fingerprint="none",  # or it would hash the rows
            )
            made.to_parquet(folder / "train.parquet")
            if lines:
                with zstandard.open(folder / "train.jsonl.zst", "wb") as file:
                    made.to_json(file)  # its own `compression` knows no zstd

        return write

    def listed(folder: Path) -> None:
        folder.mkdir()
        datasets.Dataset.from_list(rows, features=columns).to_parquet(folder / "train.parquet")

    def whole(folder: Path) -> None:
        build([CampaignDir(campaign)], folder, Request(unaudited=True))

    def scrubbed(folder: Path) -> None:
        scrubber, writer = Scrubber(), SplitWriter(folder, "episodes", "train", lines=False)
        for row in parsed():
            scrub_row(row, scrubber)
            writer.add(row)
        writer.finish()

    parquet, both = "rows to Parquet", "rows to both formats"
    trace, whole_trace = "trace to Parquet", "trace to dataset"
    return [
        Contender(parquet, "rl.dataset", ours(lines=False)),
        Contender(parquet, "datasets, generator", generated(lambda: iter(rows))),
        Contender(parquet, "datasets, list", listed),
        Contender(both, "rl.dataset", ours(lines=True)),
        Contender(both, "datasets, generator", generated(lambda: iter(rows), lines=True)),
        Contender(trace, "rl.dataset", scrubbed),
        Contender(trace, "datasets, generator", generated(parsed)),
        Contender(whole_trace, "rl.dataset build", whole),
        Contender(whole_trace, "datasets, generator", generated(parsed, lines=True)),
    ]


def read_back(folder: Path) -> list[Row]:
    """The rows of the Parquet files below a folder."""
    import pyarrow.parquet as pq

    return [
        row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def measure(count: int, rounds: int) -> list[dict[str, Any]]:
    """Alternate all; one row each, by the median round."""
    import datasets
    import pyarrow as pa

    from rl.evidence.dataset.rows import Source
    from rl.evidence.layout import CampaignDir

    pa.set_cpu_count(1)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as root:
        campaign = write_campaign(Path(root), count)
        source = Source.opened(CampaignDir(campaign))
        rows = [source.row(split, record) for split, record in source.episodes(failed=False)]
        everyone = contenders(campaign, rows)
        for number in range(rounds + 1):  # the first is the comparison, and warms up
            for contender in everyone:
                contender.run(Path(root) / "out", rows if number == 0 else None)
            print(f"round {number}/{rounds} done", flush=True)
    return [_result(contender, everyone, count) for contender in everyone]


def _result(contender: Contender, everyone: list[Contender], count: int) -> dict[str, Any]:
    others = [
        statistics.median(one.core_s)
        for one in everyone
        if one.task == contender.task and one.name.startswith("datasets")
    ]
    seconds = statistics.median(contender.core_s)
    return {
        "task": contender.task,
        "writer": contender.name,
        "episodes": count,
        "core seconds": seconds,
        "slowest round": max(contender.core_s),
        "episodes/core s": count / seconds,
        "ratio to best datasets": min(others) / seconds,
        "MiB": contender.bytes / 2**20,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dataset",
        description="Episodes exported per core second, by rl.dataset and by the writers of "
        "the datasets library, alternating over the same rows and the same trace.",
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--episodes", type=int, default=600, help="how many (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.episodes < 1 or options.rounds < 1:
        parser.error("--episodes and --rounds must be at least 1")
    if options.quick:
        options.episodes, options.rounds = QUICK_EPISODES, 1
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = measure(options.episodes, options.rounds)
    path = keep("dataset", rows)
    if options.json:
        print(json.dumps(rows))
    else:
        show("episodes exported on one core", rows)
        print(f"kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
