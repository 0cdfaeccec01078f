"""How long a campaign will take and what it will cost, before it is begun.

Training runs in virtual time under the campaign's own scheduler (`rl.simulation`); the
held-out evaluation as the campaign runs it, shard by shard and arm by arm; the other stages
take what is assumed or was recorded of them.

Invariants:
- low <= likely <= high, of every figure: each is the least, the median and the greatest over
  the seeds, under the low, likely and high durations.
- The same configuration, durations and prices give the same forecast.
- What is not in it is said (`Forecast.notes`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from rl.config import CampaignConfig
from rl.evidence.prices import Prices
from rl.evidence.shards import shard_slots
from rl.forecast_config import Durations, Range
from rl.provision.functions import campaign_functions, functions, modal_of
from rl.records import Record
from rl.schedule.order import TaskOrder
from rl.schedule.scheduler import Scheduler
from rl.simulation.engine import Agenda, Engine, Run, SpeedCurve
from rl.simulation.trace import Trace
from rl.simulation.workloads import Workload
from rl.simulation.world import World

Level = Literal["low", "likely", "high"]
LEVELS: tuple[Level, ...] = get_args(Level)
SEEDS = 5
STALE_PRICES_DAYS = 180
WORKERS = "start workers"  # containers of their own evaluate what another has trained
TRAINING = ("prepare", "gates", "start", "train", "checkpoint")  # of the container with all GPUs
MIB_PER_GIB = 1024


class Spread(Record):
    """A figure of a forecast."""

    low: float = Field(description="least over the seeds, under the low durations")
    likely: float = Field(description="median over the seeds, under the likely durations")
    high: float = Field(description="greatest over the seeds, under the high durations")

    def times(self, factor: float) -> Spread:
        """The figure, scaled."""
        return Spread(low=self.low * factor, likely=self.likely * factor, high=self.high * factor)

    @staticmethod
    def total(parts: Sequence[Spread]) -> Spread:
        """The sum of figures, bound by bound."""
        return Spread(
            low=sum(part.low for part in parts),
            likely=sum(part.likely for part in parts),
            high=sum(part.high for part in parts),
        )


class CostLine(Record):
    """One thing that is rented."""

    what: str = Field(description="how much of it, and where it is used")
    amount: Spread = Field(description="in the table's currency")


class Forecast(Record):
    """See the module."""

    durations: str = Field(description="where they come from, and whether they were measured")
    seconds: dict[str, Spread] = Field(description="wall time by stage, s")
    total_s: Spread = Field(description="wall time in all, s")
    currency: str = Field(description="of all costs")
    prices_as_of: str = Field(description="the day on which the prices were read")
    costs: list[CostLine] = Field(description="what is rented; empty: nothing is")
    total_cost: Spread = Field(description="in the table's currency")
    notes: list[str] = Field(description="what it leaves out, and what should be looked at")


@dataclass(frozen=True, slots=True)
class _Times:
    """One simulated campaign: wall seconds by stage, and slot seconds of its attempts."""

    train_s: float
    heldout_s: float
    attempts_s: float


def forecast(
    config: CampaignConfig,
    durations: Durations,
    prices: Prices,
    recording: Path | None = None,
    today: date | None = None,
    seeds: int = SEEDS,
) -> Forecast:
    """The forecast of a campaign.

    Args:
        config: the campaign.
        durations: what its parts take.
        prices: what machines cost.
        recording: a campaign whose attempts' durations are drawn from.
        today: for the age of the prices.
        seeds: how many campaigns are simulated under each of low, likely and high.
    """
    runs: dict[Level, list[_Times]] = {
        level: [
            _simulated(config, durations, level, recording, config.seed + n) for n in range(seeds)
        ]
        for level in LEVELS
    }
    stages, tasks = durations.stages, config.tasks.train + config.heldout_tasks
    seconds = {
        "prepare": _fixed(stages.prepare),
        "gates": _fixed(stages.gate_each).times(tasks),
        "start": _fixed(stages.start),
        "train": _spread(runs, lambda run: run.train_s),
        "checkpoint": _fixed(stages.verify),
        **({WORKERS: _fixed(stages.start)} if config.modal else {}),
        "heldout": _spread(runs, lambda run: run.heldout_s),
        "report": _fixed(stages.report),
    }
    total = Spread.total(list(seconds.values()))
    sandboxes = _sandboxes(config, prices, _spread(runs, lambda run: run.attempts_s))
    machines = _containers if config.modal else _machines
    costs = [*machines(config, prices, seconds), *sandboxes]
    kind = "measured" if durations.measured else "assumed, not measured"
    return Forecast(
        durations=f"{durations.source}; {kind}, as of {durations.as_of}",
        seconds=seconds,
        total_s=total,
        currency=prices.currency,
        prices_as_of=str(prices.as_of),
        costs=costs,
        total_cost=Spread.total([line.amount for line in costs]),
        notes=_notes(config, prices, total, bool(costs), today or date.today()),
    )


# ---- time -------------------------------------------------------------------


def _simulated(
    config: CampaignConfig, durations: Durations, level: Level, recording: Path | None, seed: int
) -> _Times:
    workload = _workload(config, durations, level, recording, seed)
    schedule, order = workload.schedule, TaskOrder([""] * workload.durations.task_count, seed)
    slots, replicas = config.episodes.concurrency, config.engine.replicas
    world = World(
        workload,
        Scheduler(schedule, order, slots=slots, replicas=replicas),
        on_update=_unheard,
    )
    world.run()
    on_the_way = len(config.eval_versions) * config.eval_cells
    mean_s = world.tally.busy_s / max(1, world.tally.graded)
    heldout_s, heldout_busy_s = _evaluated(config, workload, durations, level)
    return _Times(
        # Attempts on the way take slots from training's: at worst one after the other.
        train_s=world.end_s + on_the_way * mean_s / slots,
        heldout_s=heldout_s,
        attempts_s=world.tally.busy_s + on_the_way * mean_s + heldout_busy_s,
    )


def _workload(
    config: CampaignConfig, durations: Durations, level: Level, recording: Path | None, seed: int
) -> Workload:
    """The campaign's training as the simulator takes it."""
    drawn: dict[str, object] = (
        {"recorded": str(recording)}
        if recording is not None
        else {
            "lognormal": {
                "tasks": config.tasks.train,
                "mean_s": max(_at(durations.attempt, level), 1e-3),
                "cv": _at(durations.attempt_spread, level),
                "task_share": durations.task_share,
            }
        }
    )
    batch_s = _at(durations.trainer_episode, level) * config.schedule.batch_size
    return Workload.model_validate(
        {
            "name": "forecast",
            "seed": seed,
            "slots": config.episodes.concurrency,
            # Rewards are not simulated: no group is replaced for its rewards.
            "schedule": config.schedule.model_dump() | {"refill_zero_variance": 0},
            "engine": {"replicas": config.engine.replicas, "speed": durations.speed},
            "durations": drawn | {"deadline_s": config.episodes.deadline_s},
            "trainer": {
                "update_s": max(batch_s, 1e-3),
                "sync_s": _at(durations.publish, level),
            },
            "failures": {"masked_share": _at(durations.masked, level)},
        }
    )


def _evaluated(
    config: CampaignConfig, workload: Workload, durations: Durations, level: Level
) -> tuple[float, float]:
    """The held-out evaluation: wall seconds, and slot seconds of its attempts."""
    trace, shards = Trace(workload), config.heldout.shards
    tasks = config.heldout_tasks
    count = workload.durations.task_count
    rng = random.Random(f"heldout/{workload.seed}")
    stand_for = [rng.randrange(count) for _ in range(tasks)]
    longest = busy = 0.0
    for shard in range(shards):
        slots = shard_slots(config.episodes.concurrency, shard + 1, shards)
        ended = 0.0
        for arm in range(2):
            cells = [
                trace.fate(stand_for[task], arm, number).seconds
                for number in range(config.heldout.attempts)
                for task in range(shard, tasks, shards)
            ]
            took, used = _shard(cells, slots, durations, config.episodes.deadline_s)
            ended += took + _at(durations.stages.load_arm, level)
            busy += used
        longest = max(longest, ended)
    return longest, busy


def _shard(
    seconds: Sequence[float], slots: int, durations: Durations, deadline_s: float
) -> tuple[float, float]:
    """Attempts on one replica, `slots` at once, in order: wall seconds and slot seconds."""
    agenda, waiting, busy = Agenda(), list(reversed(seconds)), 0.0

    def ended(run: Run) -> None:
        nonlocal busy
        busy += agenda.now - run.started
        start()

    engine = Engine(1, SpeedCurve(durations.speed), deadline_s, agenda, ended)

    def start() -> None:
        if waiting:
            engine.start(Run("", None, 0, min(waiting.pop(), deadline_s), masked=False))

    for _ in range(min(slots, len(seconds))):
        start()
    while engine.running:
        agenda.step()
    return agenda.now, busy


def _unheard(update: int) -> None:
    del update


def _at(value: Range, level: Level) -> float:
    return {"low": value.low, "likely": value.likely, "high": value.high}[level]


def _fixed(value: Range) -> Spread:
    return Spread(low=value.low, likely=value.likely, high=value.high)


def _spread(runs: dict[Level, list[_Times]], figure: Callable[[_Times], float]) -> Spread:
    """Least, median and greatest, kept in order where the seeds outweigh the durations."""
    low = min(figure(run) for run in runs["low"])
    likely = max(low, statistics.median(figure(run) for run in runs["likely"]))
    return Spread(low=low, likely=likely, high=max(likely, *(figure(r) for r in runs["high"])))


# ---- costs ------------------------------------------------------------------


def _machines(
    config: CampaignConfig, prices: Prices, seconds: Mapping[str, Spread]
) -> list[CostLine]:
    """A cluster with GPUs, from the first stage to the last."""
    need, total_s = config.resources, Spread.total(list(seconds.values()))
    gpus = need.trainer_gpus + need.replica_gpus * config.engine.replicas
    cpus = need.trainer_cpus + need.replica_cpus * config.engine.replicas
    cpus += need.worker_cpus * config.episodes.workers
    if not gpus:
        return []
    name, price = prices.gpu(None, "the price table")
    core_s = prices.modal.container.core_second
    return [
        CostLine(
            what=f"{gpus:g} {name} from the first stage to the last",
            amount=total_s.times(gpus * price),
        ),
        CostLine(what=f"{cpus:g} CPU cores beside them", amount=total_s.times(cpus * core_s)),
    ]


def _containers(
    config: CampaignConfig, prices: Prices, seconds: Mapping[str, Spread]
) -> list[CostLine]:
    """Modal's containers, each for the stages that it is there for."""
    training, worker, continuation = functions(config, campaign_functions(config))
    evaluated_s = Spread.total([seconds[WORKERS], seconds["heldout"]])
    total_s = Spread.total(list(seconds.values()))
    trained_s = Spread.total([seconds[stage] for stage in TRAINING])
    lines: list[CostLine] = []
    for spec, lasts in ((training, trained_s), (worker, evaluated_s), (continuation, total_s)):
        price, machine = 0.0, prices.modal.container
        if spec.gpus:
            price = spec.gpus * prices.gpu(modal_of(config).gpu.rstrip("!"), "modal.gpu")[1]
        price += spec.cpus * machine.core_second
        price += spec.memory_mib / MIB_PER_GIB * machine.gib_second
        what = f"{spec.name}: {spec.max_containers} x ({spec.gpu or 'no GPU'}, {spec.cpus:g} CPU)"
        lines.append(CostLine(what=what, amount=lasts.times(spec.max_containers * price)))
    return lines


def _sandboxes(config: CampaignConfig, prices: Prices, attempts_s: Spread) -> list[CostLine]:
    """Sandboxes, where each attempt rents one."""
    sandbox, price = config.sandbox, prices.modal.sandbox
    if sandbox.provider != "modal":
        return []
    gib = sandbox.memory_mb / MIB_PER_GIB
    second = sandbox.cpus * price.core_second + gib * price.gib_second
    attempts = config.training_episodes + config.heldout_attempts
    attempts += len(config.eval_versions) * config.eval_cells
    what = f"sandboxes of {attempts} attempts, {sandbox.cpus:g} CPU and {gib:g} GiB each"
    return [CostLine(what=what, amount=attempts_s.times(second))]


def _notes(
    config: CampaignConfig, prices: Prices, total_s: Spread, rented: bool, today: date
) -> list[str]:
    notes: list[str] = []
    limit = config.limits.watchdog_s
    if total_s.high > limit:
        notes.append(
            f"the high forecast exceeds limits.watchdog_s ({limit:g} s): the run would stop there "
            "and go on with --resume"
        )
    if not rented:
        return [*notes, "nothing is rented"]
    age = (today - prices.as_of).days
    if age > STALE_PRICES_DAYS:
        notes.append(f"the prices are {age} days old: check them at {prices.source}")
    left_out = [] if config.modal else ["memory beside the GPUs"]
    left_out += ["storage", "network", "the provider's factors for region and for work that may"]
    notes.append(
        f"not in it: {', '.join(left_out)} not be preempted, downloads before the first run"
    )
    return notes


def forecast_lines(found: Forecast) -> list[str]:
    """The forecast for a reader."""
    lines = [f"forecast (durations: {found.durations}):"]
    lines += [f"  {stage}: {_time(spread)}" for stage, spread in found.seconds.items()]
    lines.append(f"  in all: {_time(found.total_s)}")
    for line in found.costs:
        lines.append(f"  {line.what}: {_money(line.amount, found.currency)}")
    if found.costs:
        money = _money(found.total_cost, found.currency)
        lines.append(f"  cost in all: {money}, by list prices of {found.prices_as_of}")
    return lines + [f"  note: {note}" for note in found.notes]


def _time(spread: Spread) -> str:
    return f"{_clock(spread.likely)} ({_clock(spread.low)} to {_clock(spread.high)})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _money(spread: Spread, currency: str) -> str:
    return f"{spread.likely:.2f} {currency} ({spread.low:.2f} to {spread.high:.2f})"
