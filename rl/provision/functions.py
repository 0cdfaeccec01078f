"""What each Modal function of a campaign is given: a pure function of the configuration.

Invariants:
- A function's bound lies above the watchdog that stops what runs in it in order.
- What has no GPU asks no model anything; what has GPUs has them all in one container, or
  all GPUs of each of its machines.
- The short run takes bounded values only: it can't become the long one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from rl.config import CampaignConfig
from rl.errors import ConfigurationError
from rl.modal_config import MAX_FUNCTION_S, MAX_GPUS, ModalConfig

FunctionName = Literal[
    "prepare_account", "train", "final_train", "final_cluster", "heldout_worker", "final_continue"
]
NAMES: Final[tuple[FunctionName, ...]] = get_args(FunctionName)
PREPARE_S: Final = 3_600  # a model of some ten GB over a common line
WAIT_MARGIN_S: Final = 1_800  # of the continuation, beyond what it waits for
CPU_CORES: Final = 2.0
CPU_MEMORY_GIB: Final = 16  # the report verifies the checkpoint: a 4B model in bfloat16
MIB_PER_GIB: Final = 1_024
SMOKE_GPUS: Final = 2
SMOKE_STEPS: Final = (1, 2)
SMOKE_CONCURRENCY: Final = (16, 32)


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One function.

    Attributes:
        name: its name in the app.
        gpu: what Modal is asked for, such as "H100!:3"; None: no GPU.
        cpus: cores that are requested.
        memory_mib: memory that is requested, MiB.
        timeout_s: bound of one call, s.
        max_containers: how many may run at once.
        nodes: containers of one call.
    """

    name: FunctionName
    gpu: str | None
    cpus: float
    memory_mib: int
    timeout_s: int
    max_containers: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one container."""
        return int(self.gpu.rpartition(":")[2]) if self.gpu else 0

    def row(self) -> dict[str, Any]:
        """For a plan."""
        return {
            "gpu": self.gpu or "none",
            "cpus": self.cpus,
            "memory_gib": self.memory_mib // MIB_PER_GIB,
            "timeout_s": self.timeout_s,
            "containers": self.max_containers,
        }


def modal_of(config: CampaignConfig) -> ModalConfig:
    """The configuration's `[modal]`.

    Raises:
        ConfigurationError: it has none, or its bounds can't be Modal's.
    """
    if config.modal is None:
        raise ConfigurationError("has no [modal] table", config.name, "see configs/final.toml")
    bound = config.limits.function_bound_s
    if bound is None or bound > MAX_FUNCTION_S:
        raise ConfigurationError(
            "must be given, and at most 24 h: Modal ends every function then",
            "limits.function_bound_s",
            f"set it to at most {MAX_FUNCTION_S:g}",
        )
    return config.modal


def bound_of(config: CampaignConfig) -> int:
    """The bound of what trains or evaluates, s.

    Raises:
        ConfigurationError: as for `modal_of`.
    """
    modal_of(config)
    return int(config.limits.function_bound_s or 0)


def functions(config: CampaignConfig, names: tuple[FunctionName, ...]) -> list[FunctionSpec]:
    """Some functions of the app.

    Raises:
        ConfigurationError: GPUs or bounds can't be had.
    """
    return [_spec(config, name) for name in names]


def _spec(config: CampaignConfig, name: FunctionName) -> FunctionSpec:
    modal, bound = modal_of(config), bound_of(config)
    replica = _whole(config.resources.replica_gpus, "resources.replica_gpus")
    trainer = _whole(config.resources.trainer_gpus, "resources.trainer_gpus")
    every = trainer + replica * config.engine.replicas
    on_cpu = (CPU_CORES, CPU_MEMORY_GIB * MIB_PER_GIB)
    on_gpu = (float(modal.cpus), modal.memory_gib * MIB_PER_GIB)
    match name:
        case "prepare_account":
            return FunctionSpec(name, None, *on_cpu, PREPARE_S)
        case "train":
            return FunctionSpec(name, _gpu(modal, _smoke_gpus(every)), *on_gpu, bound)
        case "final_train":
            _require(every, MAX_GPUS, "one container has that many at most; or set modal.nodes")
            return FunctionSpec(name, _gpu(modal, every), *on_gpu, bound)
        case "final_cluster":
            most = modal.nodes * MAX_GPUS
            _require(every, most, "so many machines have; raise modal.nodes")
            if every <= most - MAX_GPUS:
                raise ConfigurationError(
                    f"{most} GPUs would be paid for, and {every} are used",
                    "modal.nodes",
                    f"set it to {math.ceil(every / MAX_GPUS)}",
                )
            gpu, nodes = _gpu(modal, MAX_GPUS), modal.nodes
            return FunctionSpec(name, gpu, *on_gpu, bound, max_containers=nodes, nodes=nodes)
        case "heldout_worker":
            shards, gib = config.heldout.shards, modal.worker_memory_gib
            machine = (float(modal.worker_cpus), gib * MIB_PER_GIB)
            return FunctionSpec(name, _gpu(modal, replica), *machine, bound, max_containers=shards)
        case "final_continue":
            waits = min(int(MAX_FUNCTION_S), 2 * bound + WAIT_MARGIN_S)
            return FunctionSpec(name, None, *on_cpu, waits)


def campaign_functions(config: CampaignConfig) -> tuple[FunctionName, FunctionName, FunctionName]:
    """What trains, evaluates and continues the reference campaign.

    Raises:
        ConfigurationError: as for `modal_of`.
    """
    training = "final_train" if modal_of(config).nodes == 1 else "final_cluster"
    return training, "heldout_worker", "final_continue"


def smoke_overrides(max_steps: int, concurrency: int) -> dict[str, Any]:
    """What the short run replaces in its configuration.

    Raises:
        ConfigurationError: a value is not one of those that it takes.
    """
    for option, value, allowed in (
        ("--max-steps", max_steps, SMOKE_STEPS),
        ("--concurrency", concurrency, SMOKE_CONCURRENCY),
    ):
        if value not in allowed:
            raise ConfigurationError(
                f"{value} is not one of {', '.join(map(str, allowed))}",
                option,
                "a longer run is a campaign: launch final",
            )
    return {
        "schedule.updates": max_steps,
        "checkpoints.updates": [],
        "episodes.concurrency": concurrency,
        "engine.replicas": SMOKE_GPUS - 1,
        "heldout.shards": 1,
    }


def _smoke_gpus(every: int) -> int:
    if every != SMOKE_GPUS:
        raise ConfigurationError(
            f"the short run has {SMOKE_GPUS} GPUs, and this configuration asks for {every}",
            "resources",
            "give trainer and replica one each, as configs/smoke.toml does",
        )
    return every


def _gpu(modal: ModalConfig, count: int) -> str:
    return f"{modal.gpu}:{count}"


def _whole(gpus: float, key: str) -> int:
    if gpus < 1 or gpus != int(gpus):
        raise ConfigurationError(
            f"{gpus:g} GPUs can't be rented", key, "give a whole number of them"
        )
    _require(int(gpus), MAX_GPUS, "one machine has that many at most")
    return int(gpus)


def _require(gpus: int, most: int, why: str) -> None:
    if gpus > most:
        raise ConfigurationError(f"{gpus} GPUs are more than {most}", "resources", why)
