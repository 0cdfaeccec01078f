"""`python -m benchmarks.episodes`: oracle attempts per second, ours against `harbor run`.

Both run the same packages, in the same sandboxes, with the same solution and
verifier, at the same concurrency, in alternating rounds of one run.  `harbor run`
is started once per round, so its own start is measured apart (a run over one
package) and taken out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from rl.config import SandboxConfig
from rl.errors import EXIT_OK, InfrastructureError, run_command
from sandboxes.attempt import AttemptLimits
from sandboxes.bank import write_bank
from sandboxes.gates import run_oracle
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import TaskPackage, load_folder

LIMITS = AttemptLimits(deadline_s=300.0, create_s=60.0, verifier_s=60.0, stop_s=30.0)
HARBOR_TIMEOUT_S = 900.0


def ours(packages: Sequence[TaskPackage], concurrency: int) -> float:
    """Seconds for one oracle attempt at every package."""

    async def run() -> None:
        provider = SandboxProvider(SandboxConfig())
        gate = asyncio.Semaphore(concurrency)

        async def attempt(package: TaskPackage) -> None:
            async with gate:
                result = await run_oracle(package, provider, LIMITS, f"bench-{package.name}")
            if result.reward != 1.0:
                raise InfrastructureError(f"scored {result.reward}", package.name)

        await asyncio.gather(*(attempt(package) for package in packages))

    start = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - start


def harbor(folder: Path, count: int, concurrency: int) -> float:
    """Seconds for `harbor run` over the packages in `folder`."""
    with tempfile.TemporaryDirectory() as jobs:
        command: list[str] = [
            *(str(Path(sys.executable).parent / "harbor"), "run", "-p", str(folder)),
            *("-a", "oracle", "-e", "sandboxes.bubblewrap:BubblewrapEnvironment"),
            *("-n", str(concurrency), "-o", jobs),
        ]
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=HARBOR_TIMEOUT_S,
            env={**os.environ, "HARBOR_TELEMETRY": "0", "PYTHONPATH": os.getcwd()},
        )
        seconds = time.perf_counter() - start
        results = [json.loads(path.read_text()) for path in Path(jobs).rglob("result.json")]
        solved = sum(
            item["verifier_result"]["rewards"] == {"reward": 1.0}
            for item in results
            if item.get("verifier_result")
        )
        if solved != count:
            raise InfrastructureError(f"harbor run solved {solved} of {count}", str(folder))
        return seconds


def measure(count: int, concurrency: int, rounds: int) -> list[dict[str, Any]]:
    """Alternate both; one row each, by the median round."""
    with tempfile.TemporaryDirectory() as root:
        bank, single = Path(root) / "bank", Path(root) / "single"
        write_bank(bank, (), count, seed=1)
        write_bank(single, (), 1, seed=1)
        packages = load_folder(bank)
        harbor_start = harbor(single, 1, 1)
        ours(packages[:1], 1)
        times: dict[str, list[float]] = {"ours": [], "harbor run": []}
        for number in range(rounds):
            times["ours"].append(ours(packages, concurrency))
            times["harbor run"].append(harbor(bank, count, concurrency) - harbor_start)
            print(f"round {number + 1}/{rounds} done", flush=True)
    rates = {who: count / statistics.median(seconds) for who, seconds in times.items()}
    return [
        {
            "loop": who,
            "attempts": count,
            "concurrency": concurrency,
            "attempts/s": rate,
            "ratio to harbor run": rate / rates["harbor run"],
        }
        for who, rate in rates.items()
    ]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.episodes",
        description="Oracle attempts per second through our episode loop and through "
        "`harbor run`, over the same packages and sandboxes, alternating in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--attempts", type=int, default=60, help="packages (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.quick:
        options.attempts, options.rounds = 18, 1
    rows = measure(options.attempts, options.concurrency, options.rounds)
    path = keep("episodes", rows)
    if options.json:
        print(json.dumps(rows))
    else:
        show("oracle attempts per second", rows)
        print(f"kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
