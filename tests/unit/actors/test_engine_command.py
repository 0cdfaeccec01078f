"""Golden command lines of both engines on both devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from actors.engine_command import engine_command, engine_python, replica_cores
from rl.errors import ConfigurationError
from tests.support.engine_config import engine_campaign

PYTHON = sys.executable  # a file that surely exists
ENVIRON = {"PATH": "/bin", "RL_ENGINE_PYTHON": PYTHON}


def test_cpu_command_is_golden() -> None:
    command = engine_command(
        engine_campaign("vllm"), 1, Path("/model"), 20100, "key", [0, 1], ENVIRON
    )
    assert " ".join(command.argv[1:]) == (
        "-m vllm.entrypoints.openai.api_server --model /model --served-model-name base "
        "--dtype float32 --seed 5 --max-model-len 512 "
        "--max-num-seqs 16 --tensor-parallel-size 1 --generation-config vllm "
        "--logprobs-mode processed_logprobs --enable-prefix-caching "
        "--disable-uvicorn-access-log --scheduling-policy priority --enable-lora "
        "--max-lora-rank 16 --max-loras 2 --max-cpu-loras 4 "
        "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj "
        "--kv-cache-memory-bytes 67108864 --block-size 32 --enforce-eager "
        "--host 127.0.0.1 --port 20100"
    )
    assert command.argv[0] == PYTHON
    assert command.environment == {
        **ENVIRON,
        "VLLM_API_KEY": "key",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert command.base_url == "http://127.0.0.1:20100"


@pytest.mark.parametrize(
    ("host", "url"), [("10.1.2.3", "http://10.1.2.3:20100"), ("fd00::7", "http://[fd00::7]:20100")]
)
def test_an_engine_that_others_ask_listens_on_its_nodes_address_alone(host: str, url: str) -> None:
    command = engine_command(
        engine_campaign("vllm"), 0, Path("/model"), 20100, "key", [0], ENVIRON, host=host
    )
    assert command.argv[-4:] == ("--host", host, "--port", "20100")
    assert command.base_url == url


def test_cuda_command_leaves_compilation_and_cores_to_the_engine() -> None:
    config = engine_campaign(
        "vllm", device="cuda", kv_cache_mb=None, block_size=None, extra_args=("--swap-space", "0")
    )
    command = engine_command(config, 0, Path("/model"), 20100, "key", [0], ENVIRON)
    assert "--enforce-eager" not in command.argv
    assert "--block-size" not in command.argv
    assert "--kv-cache-memory-bytes" not in command.argv
    assert command.argv[-2:] == ("--swap-space", "0")
    assert not any("OMP" in key or "DYNAMO" in key for key in command.environment)


def test_key_is_never_on_the_command_line() -> None:
    for kind in ("vllm", "scripted"):
        command = engine_command(
            engine_campaign(kind), 0, Path("/model"), 20100, "hidden-key", [0], ENVIRON
        )
        assert "hidden-key" not in " ".join(command.argv)
        assert command.environment["VLLM_API_KEY"] == "hidden-key"


def test_scripted_command_carries_its_behaviour() -> None:
    command = engine_command(
        engine_campaign("scripted", extra_args=("--fail-after", "3")),
        0,
        Path("/model"),
        20100,
        "key",
        [0],
        ENVIRON,
    )
    assert command.argv[:3] == (sys.executable, "-m", "actors.scripted_engine")
    assert '"solve_rate":0.5' in command.argv[command.argv.index("--behaviour") + 1]
    assert command.argv[-2:] == ("--fail-after", "3")


def test_owner_variables_do_not_reach_the_engine() -> None:
    environ = ENVIRON | {"PYTHONPATH": "/ray", "OMP_NUM_THREADS": "1", "VLLM_PORT": "1"}
    command = engine_command(engine_campaign("vllm"), 0, Path("/model"), 20100, "key", [0], environ)
    assert not {"PYTHONPATH", "OMP_NUM_THREADS", "VLLM_PORT"} & set(command.environment)


@pytest.mark.parametrize(
    ("index", "count", "cores", "expected"),
    [
        (0, 1, [0, 1], [0]),
        (1, 1, [0, 1], [1]),
        (2, 1, [0, 1], [0]),
        (1, 2, [8, 9, 10, 11], [10, 11]),
        (1, 2, [0, 1, 2], [2, 0]),
    ],
)
def test_cores_are_distinct_while_they_last(
    index: int, count: int, cores: list[int], expected: list[int]
) -> None:
    assert replica_cores(index, count, cores) == expected


def test_tensor_parallel_ranks_have_their_own_cores() -> None:
    config = engine_campaign("vllm", tensor_parallel=2, cpu_threads=2)
    command = engine_command(config, 0, Path("/m"), 20100, "key", range(4), ENVIRON)
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,2|1,3"


@pytest.mark.parametrize(
    ("keys", "where"),
    [({"block_size": 16}, "engine.block_size"), ({"cpu_threads": 9}, "engine.cpu_threads")],
)
def test_values_that_kill_the_engine_are_refused(keys: dict[str, int], where: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        engine_command(engine_campaign("vllm", **keys), 0, Path("/m"), 1, "k", [0, 1], ENVIRON)
    assert caught.value.where == where
    assert caught.value.remedy


def test_python_comes_from_variable_then_repository_then_beside_this_one_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    assert engine_python({}, tmp_path) == sys.executable
    beside = tmp_path / "elsewhere" / ".venv-engine" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert engine_python({}, tmp_path) == str(beside)
    local = tmp_path / ".venv-engine" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.touch()
    assert engine_python({}, tmp_path) == str(local)
    assert engine_python({"RL_ENGINE_PYTHON": PYTHON}, tmp_path) == PYTHON
    with pytest.raises(ConfigurationError, match="no such interpreter"):
        engine_python({"RL_ENGINE_PYTHON": "/missing/python"}, tmp_path)
