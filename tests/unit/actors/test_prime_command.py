"""How prime-rl's interpreter is found and started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from actors.prime_command import prime_command, prime_python
from rl.errors import ConfigurationError
from tests.support.prime_config import prime_campaign

NAMED = {"RL_PRIME_PYTHON": sys.executable}


def test_one_process_per_gpu_reads_the_configuration_file() -> None:
    command = prime_command(prime_campaign(gpus=2.0), Path("/run/trainer.json"), NAMED)
    line = " ".join(command.train)
    assert line.startswith(f"{sys.executable} -m torch.distributed.run --standalone")
    assert "--nproc-per-node=2" in line
    assert line.endswith("-m prime_rl.trainer.rl.train @ /run/trainer.json")


def test_gpus_reach_it_and_the_owners_python_does_not() -> None:
    environ = {
        **NAMED,
        "CUDA_VISIBLE_DEVICES": "3",
        "PYTHONPATH": "/ours",
        "VIRTUAL_ENV": "/ours/.venv",
        "RANK": "5",
    }
    found = prime_command(prime_campaign(), Path("/x"), environ).environment
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "RANK"} & set(found)


def test_an_interpreter_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no such interpreter: /nowhere/python"):
        prime_python({"RL_PRIME_PYTHON": "/nowhere/python"})


def test_an_environment_in_the_repository_is_found(tmp_path: Path) -> None:
    local = tmp_path / ".venv-prime" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.touch()
    assert prime_python({}, tmp_path) == str(local)


def test_without_any_the_other_backend_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    with pytest.raises(ConfigurationError) as caught:
        prime_python({}, tmp_path)
    assert caught.value.where == "RL_PRIME_PYTHON"
    assert "'peft'" in caught.value.remedy
