"""`python -m benchmarks.train_step`: our update against TRL's and a plain padded loop.

All three make one optimizer step, LoRA of rank 16 on every linear layer, fp32, on the
same model, tokens and groups, in alternating rounds of one run, each in a process of
its own. The modules under `benchmarks/training/` say how each is driven.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._table import keep, show
from benchmarks.training.workload import Case, Lengths
from rl.errors import EXIT_OK, ConfigurationError, InfrastructureError, run_command

SHARES = (0.25, 0.5, 0.75)
MODELS = Path("state/models")
WARM_UP_TOKENS = 64  # of a mean attempt
LENGTHS: tuple[Lengths, ...] = ("even", "uneven")
TRL_MISSING = (
    "trl is not installed, so TRL is left out; "
    "`make bench` installs it, as does `requirements/setup.sh main bench`"
)
# A small model in place of a real one: enough layers that an update is mostly matrices.
QUICK_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=768,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=4096)).save_pretrained(sys.argv[1])
"""


class Worker:
    """A contender's process."""

    def __init__(self, name: str, model: Path, budget: int, threads: int) -> None:
        """Start it; it loads while others do."""
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log")  # noqa: SIM115
        values = [name, str(model), str(budget), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.worker", *values],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def answer(self) -> dict[str, Any]:
        """The next line it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = (self._log.read().strip() or "it said nothing").splitlines()[-1]
            raise InfrastructureError(f"its process ended: {last}", self.name)
        return json.loads(line)

    def run(self, case: Case) -> dict[str, float]:
        """One update."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
        self._process.stdin.flush()
        return self.answer()


def measure(workers: Sequence[Worker], cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Alternate the contenders on every case; a row for each, by its median round."""
    for worker in workers:  # libraries set themselves up at a first update
        worker.run(dataclasses.replace(cases[0], tokens=WARM_UP_TOKENS))
    rows: list[dict[str, Any]] = []
    for case in cases:
        taken: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for _ in range(rounds):
            for worker in workers:
                taken[worker.name].append(worker.run(case))
        rows.extend(_rows(case, taken))
        done = " ".join(f"{r['contender']} {r['CPU s']:.1f}" for r in rows[-len(workers) :])
        print(f"p = {case.share:.0%}, {case.lengths}, CPU s: {done}", file=sys.stderr, flush=True)
    return rows


def _rows(case: Case, taken: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    ours = taken["ours"]
    return [
        {
            "p": f"{case.share:.0%}",
            "lengths": case.lengths,
            "contender": name,
            "wall s": statistics.median(result["wall_s"] for result in results),
            "CPU s": statistics.median(result["cpu_s"] for result in results),
            "peak MiB": round(max(result["peak_mib"] for result in results)),
            "ideal": case.ideal,
            "times ours, wall": _ratio(results, ours, "wall_s"),
            "CPU": _ratio(results, ours, "cpu_s"),
        }
        for name, results in taken.items()
    ]


def _ratio(theirs: list[dict[str, float]], ours: list[dict[str, float]], key: str) -> float:
    """Median over the rounds of their figure over ours."""
    return statistics.median(a[key] / b[key] for a, b in zip(theirs, ours, strict=True))


def _model(given: Path | None, folder: Path) -> Path:
    """The model to train; a small random one is written to `folder` if none is prepared."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ConfigurationError(
                "no model directory", str(given), "make one with `python -m rl.prepare model`"
            )
        return given
    prepared = sorted(path.parent for path in MODELS.glob("*/config.json"))
    return prepared[0] if prepared else _small_model(folder)


def _small_model(folder: Path) -> Path:
    subprocess.run([sys.executable, "-c", QUICK_MODEL, str(folder)], check=True)
    return folder


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if value < WARM_UP_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at least {WARM_UP_TOKENS}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must lie between 0 and 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description="One LoRA update: ours, TRL's GRPOTrainer and a plain padded loop, on the "
        "same model, tokens and groups, alternating in one run.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small random model, one share, one round")
    add("--model", type=Path, help=f"model directory (the first in {MODELS}, or a random one)")
    add("--share", type=_share, action="append", help="prompt share, repeatable (.25 .5 .75)")
    add("--tokens", type=_tokens, default=256, help="of a mean attempt (%(default)s)")
    add("--group", type=_positive, default=8, help="attempts of a group (%(default)s)")
    add("--groups", type=_positive, default=1, help="groups of an update (%(default)s)")
    add("--sampled", type=_share, default=0.5, help="of the tokens behind the prompt (%(default)s)")
    add("--budget", type=_positive, help="tokens per micro-batch (a group's, unshared)")
    add("--rounds", type=_positive, default=3, help="alternations (%(default)s)")
    add("--threads", type=_positive, default=2, help="of torch (%(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = _parser().parse_args(argv)
    if options.group < 2:
        raise ConfigurationError("a group has at least two attempts", "--group")
    shares: Sequence[float] = options.share or SHARES
    if options.quick:
        shares, options.tokens, options.rounds = (0.5,), 256, 1
    shape = (options.tokens, options.group, options.groups, options.sampled)
    cases = [Case(share, lengths, *shape) for share in shares for lengths in LENGTHS]
    names = ["ours", "padded"]
    if importlib.util.find_spec("trl"):
        names.append("trl")
    else:
        print(TRL_MISSING, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        model = _small_model(Path(folder)) if options.quick else _model(options.model, Path(folder))
        budget = options.budget or options.tokens * options.group
        rows = _run(names, (model, budget, options.threads), cases, options.rounds)
    settings = {"model": model.name, "budget": budget, **dataclasses.asdict(cases[0])}
    path = keep("train_step", rows, settings=settings, rounds=options.rounds)
    if options.json:
        print(json.dumps(rows))
    else:
        show("one update", rows)
        print(f"kept in {path}")
    return EXIT_OK


def _run(
    names: Sequence[str], shared: tuple[Path, int, int], cases: Sequence[Case], rounds: int
) -> list[dict[str, Any]]:
    workers: list[Worker] = []
    try:
        for name in names:
            workers.append(Worker(name, *shared))
        for worker in workers:
            worker.answer()
        return measure(workers, cases, rounds)
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    run_command(main)
