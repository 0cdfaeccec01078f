"""`python -m benchmarks.packages`: task packages loaded, digested and listed per second.

Ours is what `rl.prepare tasks --from FOLDER --list` does, manifest included; Harbor's
is its own `Task` and content digest of each package.  Both read the same generated
folder, alternating in one run, in one process that may use one core; nothing is kept
from round to round but the kernel's own cache of files, which is warm for both.  Rates
are per second of the processor, so that other programs do not count; seconds passed
are shown beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from rl.errors import EXIT_OK, InfrastructureError, run_command

SEED = 0
QUICK_PACKAGES = 150
DATA_FILES = 4  # in each package's build context
DATA_BYTES = 2_000  # of each, by a seeded generator: about what a terminal task carries

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "bench/{name}"
description = "a generated package"
keywords = ["generated", "benchmark"]

[metadata]
family = "family-{family}"
tier = {tier}
tags = ["a", "b"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
network_mode = "no-network"

[environment.env]
LANG = "C.UTF-8"
"""


def write_packages(root: Path, count: int) -> None:
    """Write `count` packages below `root`."""
    generator = random.Random(SEED)
    for number in range(count):
        path = root / f"package-{number:05d}"
        fields = {"name": path.name, "family": number % 16, "tier": 1 + number % 3}
        files: dict[str, bytes] = {
            "task.toml": _TASK_TOML.format(**fields).encode(),
            "instruction.md": f"Put {number} files in order.\n".encode() * 8,
            "environment/Dockerfile": b"FROM debian:bookworm-slim\nWORKDIR /app\nCOPY data /app\n",
            "solution/solve.sh": b"#!/bin/sh\nset -e\ncd /app\n" * 4,
            "tests/test.sh": b"#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
            "tests/test_outcome.py": b"def test_outcome():\n    assert True\n" * 20,
        }
        for data in range(DATA_FILES):
            files[f"environment/data/{data}.bin"] = generator.randbytes(DATA_BYTES)
        for name, content in files.items():
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def ours(folder: Path) -> int:
    """Parse, digest, pin and list; returns how many lines."""
    from sandboxes.manifest import listing, pin_folder, prepare_cohort

    pinned = pin_folder(folder, "bench")
    if pinned.left_out is not None:
        raise pinned.left_out
    with tempfile.TemporaryDirectory() as root:
        cohort = prepare_cohort(pinned.source, "bench", Path(root), pinned.packages)
        return len(listing(cohort.manifest.packages))


def harbor(folder: Path) -> int:
    """Parse, digest and list by Harbor's own classes; returns how many lines."""
    from harbor.models.task.task import Task
    from harbor.publisher.packager import Packager

    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(folder.iterdir()):
            task = Task(path)
            lines.append(f"{task.name}\t{Packager.compute_content_hash(path)[0]}")
    return len(lines)


def measure(count: int, rounds: int) -> list[dict[str, Any]]:
    """Alternate both; one row each, by the median round."""
    contenders: dict[str, Callable[[Path], int]] = {"rl.prepare tasks": ours, "harbor": harbor}
    wall: dict[str, list[float]] = {who: [] for who in contenders}
    core: dict[str, list[float]] = {who: [] for who in contenders}
    with tempfile.TemporaryDirectory() as root:
        warm, folder = Path(root) / "warm", Path(root) / "packages"
        write_packages(warm, 2)
        write_packages(folder, count)
        for load in contenders.values():
            load(warm)  # imports are not what is measured
        for number in range(rounds):
            for who, load in contenders.items():
                began, began_core = time.perf_counter(), time.process_time()
                found = load(folder)
                wall[who].append(time.perf_counter() - began)
                core[who].append(time.process_time() - began_core)
                if found != count:
                    raise InfrastructureError(f"{who} listed {found} of {count}", str(folder))
            print(f"round {number + 1}/{rounds} done", flush=True)
    rates = {who: count / statistics.median(each) for who, each in core.items()}
    return [
        {
            "loader": who,
            "packages": count,
            "seconds": statistics.median(wall[who]),
            "slowest round": max(wall[who]),
            "core seconds": statistics.median(core[who]),
            "packages/core s": rates[who],
            "ratio to harbor": rates[who] / rates["harbor"],
        }
        for who in contenders
    ]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packages",
        description="Task packages parsed, digested and listed per second on one core, by "
        "`rl.prepare tasks` and by Harbor's own classes, alternating over the same folder.",
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--packages", type=int, default=3_000, help="how many (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.packages < 1 or options.rounds < 1:
        parser.error("--packages and --rounds must be at least 1")
    if options.quick:
        options.packages, options.rounds = QUICK_PACKAGES, 1
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = measure(options.packages, options.rounds)
    path = keep("packages", rows)
    if options.json:
        print(json.dumps(rows))
    else:
        show("task packages parsed, digested and listed, on one core", rows)
        print(f"kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
