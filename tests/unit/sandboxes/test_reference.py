"""The attempts with a known end, without a sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from rl.errors import TaskPackageError
from sandboxes import reference
from sandboxes.attempt import Provider
from sandboxes.bank import write_bank
from sandboxes.gates import DEFAULT_LIMITS
from sandboxes.reference import run_oracle
from sandboxes.tasks import TaskPackage, load_package


@pytest.fixture
def package(tmp_path: Path) -> TaskPackage:
    return load_package(write_bank(tmp_path / "bank", ["mkdir"], 1, seed=0)[0])


class SlowSandbox:
    """Starts and stops, but never finishes an upload."""

    session_id = "slow"

    def create(self, *_: object) -> SlowSandbox:
        return self

    def shell(self, _env: object) -> None:
        return None

    async def start(self, _force: bool) -> None:
        pass

    async def stop(self, *, delete: bool) -> None:
        assert delete

    async def upload_dir(self, *_: object) -> None:
        await asyncio.Event().wait()


def test_upload_without_end_is_the_infrastructures_fault(
    package: TaskPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "UPLOAD_TIMEOUT_S", 0.01)
    provider = cast(Provider, SlowSandbox())
    result = asyncio.run(run_oracle(package, provider, DEFAULT_LIMITS, "a"))
    assert result.outcome == "masked" and result.failure is not None
    assert result.failure.kind == "DeadlineExceeded"
    assert package.name in result.failure.message and "uploaded" in result.failure.message


def test_package_without_a_solution_is_refused(package: TaskPackage) -> None:
    assert package.solution_script is not None
    package.solution_script.unlink()
    bare = load_package(package.path)
    with pytest.raises(TaskPackageError, match="has no solution") as caught:
        asyncio.run(run_oracle(bare, cast(Provider, SlowSandbox()), DEFAULT_LIMITS, "a"))
    assert caught.value.remedy
