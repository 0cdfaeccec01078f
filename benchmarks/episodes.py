"""`python -m benchmarks.episodes`: oracle attempts per second, ours against `harbor run`.

Both run the same packages, in the same sandboxes, with the same solution and
verifier, at the same concurrency, in alternating rounds of one run.  Ours runs as
a campaign runs it: in worker processes, each with its share of the slots.

Two rates are given.  *Running* is from the start of the first attempt to the end of
the last: for `harbor run` by its own records, so neither its start nor its report
counts against it.  *Whole* is the command's: from the start of its processes to
their end.  CPU time is the whole machine's, as sandboxes are not all children of ours,
per attempt: the difference to a run over one package, so that starting up is not
counted.  Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from rl.errors import EXIT_OK, ConfigurationError, InfrastructureError, run_command

RUN_TIMEOUT_S = 900.0  # one round of either
START, DONE = "start", "done"


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the packages: seconds running and in all, and CPU seconds."""

    running_s: float
    whole_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: every package of `folder` once."""

    folder: Path
    attempts: int
    concurrency: int
    workers: int


def ours(plan: Plan) -> Round:
    """One oracle attempt at every package, in worker processes of our own."""
    context = get_context("spawn")
    workers = min(plan.workers, plan.attempts, plan.concurrency)
    cpu, began = _cpu_s(), time.perf_counter()
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for index in range(workers):
            here, there = context.Pipe()
            slots = (plan.concurrency + index) // workers  # they add up to the concurrency
            process = context.Process(target=_work, args=(there, plan, index, workers, slots))
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        for pipe in pipes:
            _expect(pipe, START)
        running = time.perf_counter()
        for pipe in pipes:
            pipe.send(START)
        for pipe in pipes:
            _expect(pipe, DONE)
        running_s = time.perf_counter() - running
        for process in processes:
            process.join(RUN_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    whole_s = time.perf_counter() - began
    return Round(running_s, whole_s, _cpu_s() - cpu)


def _work(pipe: Connection, plan: Plan, index: int, workers: int, slots: int) -> None:
    """One worker: its share of the packages, `slots` at once."""
    import asyncio

    from rl.config import SandboxConfig
    from sandboxes.gates import DEFAULT_LIMITS
    from sandboxes.provider import SandboxProvider
    from sandboxes.reference import run_oracle
    from sandboxes.tasks import load_folder

    share = load_folder(plan.folder)[index::workers]
    provider = SandboxProvider(SandboxConfig())

    async def slot() -> None:
        while share:
            package = share.pop()
            result = await run_oracle(package, provider, DEFAULT_LIMITS, f"bench-{package.name}")
            if result.reward != 1.0:
                raise InfrastructureError(f"scored {result.reward}: {result.failure}", package.name)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(slots):
                group.create_task(slot())

    pipe.send(START)
    _expect(pipe, START)
    try:
        asyncio.run(run())
    except* InfrastructureError as group:
        pipe.send(str(group.exceptions[0]))
    else:
        pipe.send(DONE)


def _expect(pipe: Connection, wanted: str) -> None:
    """Wait for a word of the other end.

    Raises:
        InfrastructureError: it said something else, ended, or took too long.
    """
    try:
        said = pipe.recv() if pipe.poll(RUN_TIMEOUT_S) else f"nothing in {RUN_TIMEOUT_S:.0f} s"
    except EOFError:
        said = "nothing; it has ended"
    if said != wanted:
        raise InfrastructureError(f"a worker said {said}", "benchmarks.episodes")


def harbor(plan: Plan) -> Round:
    """`harbor run` with the oracle agent over the packages."""
    with tempfile.TemporaryDirectory() as jobs:
        command: list[str] = [
            *(str(Path(sys.executable).parent / "harbor"), "run", "-p", str(plan.folder)),
            *("-a", "oracle", "-e", "sandboxes.bubblewrap:BubblewrapEnvironment"),
            *("-n", str(plan.concurrency), "-o", jobs),
        ]
        cpu, began = _cpu_s(), time.perf_counter()
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=RUN_TIMEOUT_S,
            env={**os.environ, "HARBOR_TELEMETRY": "0", "PYTHONPATH": os.getcwd()},
        )
        whole_s = time.perf_counter() - began
        return Round(_span_s(Path(jobs), plan), whole_s, _cpu_s() - cpu)


def _span_s(jobs: Path, plan: Plan) -> float:
    """Seconds from the start of the first trial to the end of the last.

    Raises:
        InfrastructureError: not every package was solved.
    """
    found = [json.loads(path.read_text()) for path in jobs.rglob("result.json")]
    trials = [item for item in found if item.get("verifier_result")]
    solved = [item for item in trials if item["verifier_result"]["rewards"] == {"reward": 1.0}]
    if len(solved) != plan.attempts:
        raise InfrastructureError(
            f"harbor run solved {len(solved)} of {plan.attempts}", str(plan.folder)
        )
    starts = [datetime.fromisoformat(item["started_at"]) for item in solved]
    ends = [datetime.fromisoformat(item["finished_at"]) for item in solved]
    return (max(ends) - min(starts)).total_seconds()


def _cpu_s() -> float:
    """CPU time that the machine has spent on anything, in all."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, fields)
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


LOOPS: dict[str, Callable[[Plan], Round]] = {"ours": ours, "harbor run": harbor}


def measure(plan: Plan, single: Plan, rounds: int) -> list[dict[str, Any]]:
    """Alternate both loops; one row each, of the medians."""
    starts = {who: run(single) for who, run in LOOPS.items()}
    found: dict[str, list[Round]] = {who: [] for who in LOOPS}
    for number in range(rounds):
        for who, run in LOOPS.items():
            found[who].append(run(plan))
        print(f"round {number + 1}/{rounds} done", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for who, runs in found.items():
        cpu_s = statistics.median(run.cpu_s for run in runs) - starts[who].cpu_s
        rows.append(
            {
                "loop": who,
                "attempts": plan.attempts,
                "concurrency": plan.concurrency,
                "running, attempts/s": plan.attempts / statistics.median(r.running_s for r in runs),
                "whole, attempts/s": plan.attempts / statistics.median(r.whole_s for r in runs),
                "CPU s/attempt": cpu_s / max(1, plan.attempts - single.attempts),
            }
        )
    reference = rows[-1]
    for row in rows:
        for kind in ("running", "whole"):
            key = f"{kind}, attempts/s"
            row[f"{kind}, ratio"] = row[key] / reference[key]
    return rows


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.episodes",
        description="Oracle attempts per second through our episode loop and through "
        "`harbor run`, over the same packages and sandboxes, alternating in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tasks", type=Path, help="a folder of packages (default: screen116)")
    parser.add_argument("--attempts", type=int, help="one at each of so many (default: all)")
    parser.add_argument("--concurrency", type=int, default=16, help="at once (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of ours (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.quick:
        options.attempts, options.rounds = 18, 1
    attempts = 1 if options.attempts is None else options.attempts
    numbers = (options.concurrency, options.workers, options.rounds, attempts)
    if min(numbers) < 1:
        raise ConfigurationError("must be at least 1", "a number on the command line")
    with tempfile.TemporaryDirectory() as root:
        rows = _measure_in(Path(root), options)
    path = keep("episodes", rows)
    if options.json:
        print(json.dumps(rows))
    else:
        show("oracle attempts per second", rows)
        print(f"kept in {path}")
    return EXIT_OK


def _measure_in(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lay the packages out, and one of them by itself, then measure."""
    from sandboxes.bank.cohorts import SCREEN116
    from sandboxes.tasks import load_folder

    if options.tasks is None:
        paths = SCREEN116.write(root / "bank")
    else:
        paths = [package.path for package in load_folder(options.tasks)]
    count = min(options.attempts or len(paths), len(paths))
    chosen = [paths[at * len(paths) // count] for at in range(count)]  # of all families
    plan = Plan(_folder(root / "tasks", chosen), count, options.concurrency, options.workers)
    single = Plan(_folder(root / "single", chosen[:1]), 1, options.concurrency, options.workers)
    return measure(plan, single, options.rounds)


def _folder(path: Path, packages: list[Path]) -> Path:
    """A folder that shows `packages`."""
    path.mkdir()
    for package in packages:
        (path / package.name).symlink_to(package)
    return path


if __name__ == "__main__":
    run_command(main)
