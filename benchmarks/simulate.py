"""`python -m benchmarks.simulate`: the scheduler and three baselines under virtual time."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._table import keep
from benchmarks.simulation.plot import write_plots
from benchmarks.simulation.policy import POLICIES
from benchmarks.simulation.results import LEGEND, Result, simulate, table, throttled
from rl.config_file import describe
from rl.errors import EXIT_OK, ConfigurationError, run_command
from rl.files import disk_errors, write_json
from rl.simulation.bound import lower_bound
from rl.simulation.workloads import (
    Workload,
    WorkloadSet,
    find_workloads,
    load_set,
    revise,
    shipped,
)

QUICK_SHARE = 10  # --quick makes one update in so many, but at least
QUICK_UPDATES = 2
PROGRESS_S = 5.0  # between two lines of progress


class Progress:
    """Lines on standard error while a simulation takes long."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self.workload: Workload | None = None

    def __call__(self, policy: str, update: int) -> None:
        """`policy` has made `update`."""
        now = time.monotonic()
        if self.workload is None or now - self._shown < PROGRESS_S:
            return
        self._shown = now
        schedule = self.workload.schedule
        print(
            f"{self.workload.name}, {policy}: update {update} of {schedule.updates}, "
            f"{update * schedule.batch_size:,} episodes trained, {memory_mib():.0f} MiB",
            file=sys.stderr,
            flush=True,
        )


def memory_mib() -> float:
    """Most memory that this process has held, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs the product's own Scheduler, and three other scheduling rules,\n"
        "through a training campaign in virtual time, and compares them with the\n"
        "analytic lower bound on step time. No model, no sandbox, no GPU.",
        epilog="workloads:\n"
        + "\n".join(f"  {name:<14}{load_set(path).description}" for name, path in shipped().items())
        + "\n\npolicies:\n"
        "  ours          rl.schedule.scheduler.Scheduler, as in a campaign\n"
        "  sync          sample a batch, train on it, publish, sample the next\n"
        "  one_step_off  sample one batch while the one before is trained on\n"
        "  upstream      launch on every free slot, drop what has grown too stale\n"
        f"\n{LEGEND}\n",
    )
    made.add_argument(
        "--workload",
        default="reference",
        metavar="NAME|FILE",
        help="a set listed below or a TOML file of that form; SET:NAME takes one workload of it "
        "(%(default)s)",
    )
    made.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help="simulate this one; may be given several times (all)",
    )
    made.add_argument("--seed", type=int, help="another trace (the workload's own seed)")
    made.add_argument("--updates", type=int, help="another number of updates")
    made.add_argument(
        "--durations",
        metavar="PATH",
        help="draw from recorded durations instead: a campaign's directory, or a file of JSON "
        'lines {"task": NAME, "seconds": S}',
    )
    made.add_argument(
        "--equal-waste",
        action="store_true",
        help="also throttle upstream's rule to the concurrency that trains most at a waste of "
        "0.5%% at most",
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="PATH|-",
        help="write rows and details as JSON; -: to standard output, and nothing else there",
    )
    made.add_argument("--plot", metavar="DIR", help="write one SVG per workload there")
    made.add_argument("--quick", action="store_true", help="a tenth of the updates")
    made.add_argument(
        "--describe", action="store_true", help="list every key of a workload file, and stop"
    )
    return made


def chosen(options: argparse.Namespace) -> list[Workload]:
    """The workloads, as the command line changes them."""
    workloads: list[Workload] = []
    for workload in find_workloads(options.workload):
        changes: dict[str, Any] = {}
        updates = workload.schedule.updates if options.updates is None else options.updates
        if options.quick and options.updates is None:
            updates = min(updates, max(QUICK_UPDATES, updates // QUICK_SHARE))
        changes["schedule.updates"] = updates
        if options.seed is not None:
            changes["seed"] = options.seed
        if options.durations is not None:
            changes["durations.lognormal"] = None
            changes["durations.recorded"] = options.durations
        workloads.append(revise(workload, changes, "command line"))
    # Two that differed in nothing but their distribution are one over recorded durations.
    values = [workload.model_dump_json(exclude={"name"}) for workload in workloads]
    return [w for index, w in enumerate(workloads) if values.index(values[index]) == index]


def check_targets(options: argparse.Namespace) -> None:
    """Refuse what could not be written before anything long is computed for it."""
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ConfigurationError(
            "its folder does not exist", options.json, "make the folder, or name another --json"
        )
    if options.plot is not None:
        with disk_errors(Path(options.plot)):
            Path(options.plot).mkdir(parents=True, exist_ok=True)


def run(workload: Workload, options: argparse.Namespace, progress: Progress) -> list[Result]:
    """One workload under every policy asked for."""
    progress.workload = workload
    bound = lower_bound(workload)
    results = [
        simulate(workload, name, bound, on_update=progress)
        for name in dict.fromkeys(options.policy or POLICIES)
    ]
    if options.equal_waste:
        best = throttled(workload, bound, progress)
        if best is None:
            print(f"{workload.name}: upstream's rule always wastes", file=sys.stderr)
        else:
            results.append(best)
    return results


def main(argv: list[str]) -> int:
    """Simulate, and say what came of it."""
    options = parser().parse_args(argv)
    if options.describe:
        for key, text in describe(WorkloadSet):
            print(f"{key}\n    {text}")
        return EXIT_OK
    check_targets(options)
    progress = Progress()
    results: list[Result] = []
    for workload in chosen(options):
        own = run(workload, options, progress)
        results.extend(own)
        if options.json is None:
            print(table(own), end="\n\n", flush=True)
    rows = [result.row() for result in results if result.policy in POLICIES]
    details = [result.details() for result in results]
    if options.plot is not None:
        write_plots(results, Path(options.plot))
    if options.json == "-":
        print(json.dumps({"rows": rows, "details": details}))
    elif options.json is not None:
        write_json(Path(options.json), {"rows": rows, "details": details})
    else:
        seconds = sum(result.computed_s for result in results)
        path = keep("simulate", rows, details=details)
        print(f"{LEGEND}\n\n{seconds:.1f} s of one core, {memory_mib():.0f} MiB; kept in {path}")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
