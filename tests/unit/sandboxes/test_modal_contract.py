"""What Modal sandboxes of the reference campaign would be asked for.

Nothing is sent anywhere: the environment is constructed, and its requests read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.config_file import load_config
from sandboxes.bank import write_bank
from sandboxes.provider import SandboxProvider
from sandboxes.tasks import load_package

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environment(tmp_path: Path) -> Any:
    config = load_config(ROOT / "configs" / "final.toml")
    provider = SandboxProvider(config.sandbox, lifetime_s=config.episodes.deadline_s + 600.0)
    provider.preflight()
    package = load_package(write_bank(tmp_path / "bank", (), 1, 0)[0])
    return provider.create(package, "g00001.0-a3", tmp_path / "scratch")


def test_cpu_and_memory_are_scalar_requests_without_caps(environment: Any) -> None:
    # A scalar is a request; a tuple would be a request and a cap.
    assert environment._cpu_config() == 0.125
    assert environment._memory_config() == 128


def test_a_forgotten_sandbox_ends_by_itself(environment: Any) -> None:
    assert environment._sandbox_timeout == 2400
    assert environment._sandbox_idle_timeout == 600
