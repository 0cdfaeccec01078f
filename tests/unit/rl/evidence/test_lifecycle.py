from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl.errors import DeadlineExceeded, EvidenceError, InfrastructureError
from rl.evidence.audit import audit
from rl.evidence.layout import CampaignDir, create
from rl.evidence.lifecycle import (
    Lifecycle,
    LifecycleRow,
    LifecycleStep,
    StepName,
    lifecycle_steps,
)
from rl.evidence.recorder import Recorder
from tests.unit.rl.evidence.synthetic import build

SOON_S = 0.01


@pytest.fixture
def directory(tmp_path: Path) -> CampaignDir:
    return create("run", tmp_path)


def steps(directory: CampaignDir) -> list[LifecycleStep]:
    return lifecycle_steps(directory.lifecycle_rows().read())


def endings(directory: CampaignDir) -> list[str | None]:
    return [step.receipt.ending if step.receipt else None for step in steps(directory)]


def test_the_intent_is_on_disk_before_the_step_and_the_receipt_after(
    directory: CampaignDir,
) -> None:
    async def run() -> None:
        lifecycle = Lifecycle(directory.lifecycle_rows(), incarnation=2)
        async with lifecycle.step("start", 60.0, "two replicas"):
            (begun,) = steps(directory)
            assert begun.receipt is None
            assert (begun.intent.step, begun.intent.deadline_s) == ("start", 60.0)
        async with lifecycle.step("stop", 30.0):
            pass

    asyncio.run(run())
    started, stopped = steps(directory)
    assert started.name == "start (two replicas), driver 2"
    assert started.receipt is not None and started.receipt.ending == "done"
    assert started.receipt.seconds is not None and started.receipt.seconds >= 0
    assert stopped.name == "stop, driver 2"


def test_a_step_that_exceeds_its_deadline_is_ended_with_a_receipt(directory: CampaignDir) -> None:
    ended = []

    async def run() -> None:
        async with Lifecycle(directory.lifecycle_rows()).step("drain", SOON_S):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    with pytest.raises(DeadlineExceeded, match=r"limits\.drain_s"):
        asyncio.run(run())
    assert ended == [True]
    assert endings(directory) == ["late"]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (EvidenceError("torn"), "failed"),
        (TimeoutError(), "failed"),  # somebody else's
        (DeadlineExceeded("no answer", "trainer checkpoint"), "late"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_a_failure_leaves_the_step_as_itself_and_in_the_receipt(
    directory: CampaignDir, error: BaseException, ending: str
) -> None:
    async def run() -> None:
        async with Lifecycle(directory.lifecycle_rows()).step("checkpoint", 60.0):
            raise error

    with pytest.raises(type(error)):
        asyncio.run(run())
    assert endings(directory) == [ending]
    (step,) = steps(directory)
    assert step.receipt is not None and step.receipt.problem


@pytest.mark.parametrize(("name", "runs"), [("start", False), ("stop", True), ("drain", True)])
def test_a_disk_that_takes_no_intent_stops_beginnings_and_never_endings(
    tmp_path: Path, name: StepName, runs: bool
) -> None:
    missing = CampaignDir(tmp_path / "gone")
    done = []

    async def run() -> None:
        async with Lifecycle(missing.lifecycle_rows()).step(name, 60.0):
            done.append(True)

    with pytest.raises(InfrastructureError):
        asyncio.run(run())
    assert bool(done) == runs


def test_a_step_cut_off_with_its_driver_is_a_finding_until_another_takes_over(
    tmp_path: Path,
) -> None:
    directory = build(tmp_path)

    recorder = Recorder(directory)
    intent = LifecycleRow(
        step="checkpoint",
        incarnation=recorder.begin(),
        number=0,
        detail="update 5",
        time=0.0,
        deadline_s=60.0,
    )
    directory.lifecycle_rows().append(intent)
    recorder.close()
    assert endings(directory) == [None]
    assert [finding.code for finding in audit(directory).findings] == ["unfinished-step"]

    async def take_over() -> None:
        recorder = Recorder(directory)
        recorder.begin()
        async with recorder.lifecycle.step("start", 60.0):
            pass
        recorder.close()

    asyncio.run(take_over())
    assert audit(directory).findings == []
