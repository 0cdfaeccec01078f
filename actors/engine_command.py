"""The command line and environment of one replica, from the configuration alone.

Invariants:
- Pure: nothing is started, and only the presence of an interpreter is read.
- The API key travels in the environment, never on the command line, and the
  server listens on one address: the loopback's, or its node's in the cluster.
- The engine applies nothing of its own to the policy's distribution: logprobs
  are those of the processed (tempered) distribution, and the sampling defaults
  that a model directory may carry are switched off.
- Variables that steer the owner's Python or its OpenMP do not reach the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.config import EngineConfig, ServingConfig
from rl.errors import ConfigurationError

BASE_MODEL_NAME = "base"
HOST = "127.0.0.1"
ENGINE_PYTHON_VARIABLE = "RL_ENGINE_PYTHON"
API_KEY_VARIABLE = "VLLM_API_KEY"
REPOSITORY = Path(__file__).resolve().parent.parent
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the only ones that vLLM takes
# The linear layers of Llama, Qwen, Mistral and SmolLM blocks.  Without this list the engine
# wraps the output layer too: no adapter of ours has it, it costs a vocabulary-wide product
# per token, and prompt logprobs in a batch with other requests then kill the engine.
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CPU_BLOCK_MULTIPLE = 32  # vLLM's CPU attention takes no other KV block
CPU_LORAS_PER_GPU_LORA = 2  # a version under evaluation stays in memory beside those in use
MIB = 1024 * 1024
NOT_INHERITED = frozenset(
    {
        "OMP_NUM_THREADS",  # Ray sets it to 1 for its workers
        "PYTHONHOME",
        "PYTHONPATH",  # names the owner's packages
        "PYTHONSTARTUP",
        "VIRTUAL_ENV",
        "VLLM_PORT",  # two replicas would take the same internal ports
    }
)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start one replica, and where it will answer."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    base_url: str


def engine_python(environ: Mapping[str, str], repository: Path = REPOSITORY) -> str:
    """The interpreter of the engine's environment.

    Raises:
        ConfigurationError: the one named by the environment variable is missing.
    """
    named = environ.get(ENGINE_PYTHON_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(
                f"no such interpreter: {named}",
                ENGINE_PYTHON_VARIABLE,
                "point it at the Python of the environment that has vLLM, or unset it",
            )
        return named
    # A submitted job runs in a copy of the sources: the engine's environment lies
    # beside the one that runs this.
    for place in (repository, Path(sys.prefix).parent):
        local = place / ".venv-engine" / "bin" / "python"
        if local.is_file():
            return str(local)
    return sys.executable


def engine_command(
    config: ServingConfig,
    index: int,
    model_dir: Path,
    port: int,
    api_key: str,
    cores: Sequence[int],
    environ: Mapping[str, str],
    repository: Path = REPOSITORY,
    host: str = HOST,
) -> EngineCommand:
    """The command of replica `index`.

    Args:
        config: the campaign.
        index: of the replica; chooses its cores.
        model_dir: a Hugging Face model directory.
        port: where it listens.
        api_key: what clients must present.
        cores: those that this machine may use.
        environ: the environment to build on.
        repository: where the project lies.
        host: the address that it listens on.

    Raises:
        ConfigurationError: the engine cannot run with these values.
    """
    build = _vllm if config.engine.kind == "vllm" else _scripted
    argv = build(config, model_dir, environ, repository)
    argv += ["--host", host, "--port", str(port), *config.engine.extra_args]
    environment = {key: value for key, value in environ.items() if key not in NOT_INHERITED}
    environment[API_KEY_VARIABLE] = api_key
    if config.engine.kind == "vllm":
        environment |= _vllm_environment(config.engine, index, cores)
    else:
        environment["PYTHONPATH"] = str(repository)
    return EngineCommand(tuple(argv), environment, f"http://{_in_url(host)}:{port}")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def replica_cores(index: int, count: int, cores: Sequence[int]) -> list[int]:
    """`count` cores for replica `index`, distinct between replicas while they last."""
    ordered = sorted(cores)
    if not ordered:
        raise ConfigurationError("no core is available", "engine.cpu_threads")
    if count > len(ordered):
        raise ConfigurationError(
            f"{count} threads per replica on a machine with {len(ordered)} usable cores",
            "engine.cpu_threads",
            f"set engine.cpu_threads to at most {len(ordered)}",
        )
    return [ordered[(index * count + offset) % len(ordered)] for offset in range(count)]


def _vllm(
    config: ServingConfig,
    model_dir: Path,
    environ: Mapping[str, str],
    repository: Path,
) -> list[str]:
    engine = config.engine
    argv = [engine_python(environ, repository), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_dir), "--served-model-name", BASE_MODEL_NAME]
    argv += ["--dtype", config.model.dtype, "--seed", str(config.seed)]
    argv += ["--max-model-len", str(engine.max_model_len)]
    argv += ["--max-num-seqs", str(engine.max_num_seqs)]
    argv += ["--tensor-parallel-size", str(engine.tensor_parallel)]
    argv += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    argv += ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    argv += ["--scheduling-policy", "priority"]  # lower is earlier: the older policy version
    if config.lora_rank is not None:
        argv += ["--enable-lora", "--max-lora-rank", str(_lora_rank(config.lora_rank))]
        argv += ["--max-loras", str(engine.max_loras)]
        argv += ["--max-cpu-loras", str(CPU_LORAS_PER_GPU_LORA * engine.max_loras)]
        argv += ["--lora-target-modules", *LORA_MODULES]
    if engine.kv_cache_mb is not None:
        argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_mb * MIB)]
    if engine.block_size is not None:
        argv += ["--block-size", str(_block_size(engine, engine.block_size))]
    if engine.device == "cpu":
        argv.append("--enforce-eager")
    return argv


def _scripted(
    config: ServingConfig,
    model_dir: Path,
    environ: Mapping[str, str],
    repository: Path,
) -> list[str]:
    del environ, repository
    scripted = config.engine.scripted
    if scripted is None:
        raise ConfigurationError("the scripted engine has no behaviour", "engine.scripted")
    argv = [sys.executable, "-m", "actors.scripted_engine", "--model", str(model_dir)]
    argv += ["--served-model-name", BASE_MODEL_NAME]
    argv += ["--max-model-len", str(config.engine.max_model_len)]
    return [*argv, "--behaviour", scripted.model_dump_json()]


def _vllm_environment(engine: EngineConfig, index: int, cores: Sequence[int]) -> dict[str, str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    if engine.device == "cpu":
        count = engine.cpu_threads * engine.tensor_parallel
        bound = replica_cores(index, count, cores)
        ranks = [bound[rank :: engine.tensor_parallel] for rank in range(engine.tensor_parallel)]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, rank)) for rank in ranks),
            "OMP_WAIT_POLICY": "PASSIVE",  # idle threads sleep: cores are shared
            "TORCHDYNAMO_DISABLE": "1",  # the first logprobs would wait for a compiler
        }
    return environment


def _lora_rank(rank: int) -> int:
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigurationError(
        f"rank {rank} is above the engine's largest, {LORA_RANKS[-1]}", "trainer.lora.rank"
    )


def _block_size(engine: EngineConfig, size: int) -> int:
    if engine.device == "cpu" and size % CPU_BLOCK_MULTIPLE:
        raise ConfigurationError(
            f"a KV block of {size} tokens is not a multiple of {CPU_BLOCK_MULTIPLE}",
            "engine.block_size",
            f"the engine's CPU attention takes multiples of {CPU_BLOCK_MULTIPLE} only",
        )
    return size
