"""One contender in a process of its own, so that its memory is its own.

`python -m benchmarks.training.worker CONTENDER MODEL BUDGET THREADS` loads the model,
answers a line on standard output, then makes one update for every line on standard
input, a case as JSON, and answers with what it took.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig

from benchmarks.training.workload import Attempt, Case, make_groups


class Contender(Protocol):
    """A way to make an update."""

    def prepare(self, groups: list[list[Attempt]]) -> None:
        """What a trainer does once and not at every update."""
        ...

    def update(self, groups: list[list[Attempt]]) -> None:
        """One optimizer step on all of `groups`."""
        ...


def contender(name: str, model_dir: Path, budget: int, threads: int) -> Contender:
    """The contender of that name, its model loaded."""
    # Each process imports its own contender alone, as its user's would.
    if name == "ours":
        from benchmarks.training.ours import Ours

        return Ours(model_dir, budget, threads)
    if name == "padded":
        from benchmarks.training.padded import Padded

        return Padded(model_dir, budget)
    from benchmarks.training.trl_step import Trl

    return Trl(model_dir, budget)


def reset_peak() -> None:
    """Forget the most memory held so far, so that the next peak is the update's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mib() -> float:
    """Most memory held since `reset_peak`, MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else float("nan")


def give_back() -> None:
    """Return freed memory to the system, or an earlier case's peak would count again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc


def measure(who: Contender, groups: list[list[Attempt]]) -> dict[str, float]:
    """Seconds and memory of one update."""
    reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    who.update(groups)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": peak_mib(),
    }


def main() -> None:
    """Serve cases until standard input ends."""
    name, model_dir, budget, threads = sys.argv[1:]
    # Libraries print to standard output; the answers have it to themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(int(threads))
    vocabulary = int(AutoConfig.from_pretrained(model_dir).vocab_size)
    who = contender(name, Path(model_dir), int(budget), int(threads))
    print(json.dumps({"torch": torch.__version__}), file=answers)
    last = ""
    groups: list[list[Attempt]] = []
    for line in sys.stdin:
        if line != last:  # further rounds find memory as an update leaves it for the next
            values: dict[str, Any] = json.loads(line)
            groups, last = make_groups(Case(**values), vocabulary), line
            who.prepare(groups)
            give_back()
        print(json.dumps(measure(who, groups)), file=answers)


if __name__ == "__main__":
    main()
