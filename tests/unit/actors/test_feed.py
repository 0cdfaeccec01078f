"""The order in which the trainer gets its work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from actors.adapter_ref import AdapterRef
from actors.feed import TrainerFeed
from rl.errors import EvidenceError
from rl.records import EpisodeRecord, Group, UpdateMetrics
from rl.schedule.scheduler import FRESH, Frontier

ADAPTER = AdapterRef(1, sha256="", ref=None, put_s=0.0)


def episode(group: str, number: int) -> EpisodeRecord:
    return EpisodeRecord(
        attempt_id=f"{group}-a{number}",
        group_id=group,
        task_name="t",
        task_digest="d",
        version=0,
        replica=0,
        outcome="graded",
        reward=1.0,
        stop_reason="completed",
        started_at=0.0,
    )


def whole(group: str) -> Group:
    return Group(group_id=group, task_name="t", version=0, episodes=[episode(group, 0)])


class Method:
    def __init__(self, trainer: SlowTrainer, name: str) -> None:
        self.trainer = trainer
        self.name = name

    def remote(self, *arguments: Any) -> Any:
        return self.trainer.work(self.name, arguments)


class SlowTrainer:
    """Takes one call at a time and finishes it when the test says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.turn = asyncio.Semaphore(0)
        self.broken = ""

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    async def work(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "accumulate_attempts":
            what = "+".join(e.attempt_id for e in arguments[2])
        elif name == "accumulate":
            what = arguments[1].group_id
        else:
            what = str(arguments[1] if name == "step" else arguments[0])
        self.calls.append(f"{name} {what}")
        await self.turn.acquire()
        if name == self.broken:
            raise EvidenceError("broken")
        return {"step": ("metrics", ADAPTER), "checkpoint": "path"}.get(name)


class Desk:
    """A feed with its trainer, and what came of it."""

    def __init__(self, *, streaming: bool = True) -> None:
        self.trainer = SlowTrainer()
        self.jobs: list[asyncio.Task[None]] = []
        self.stepped: list[list[str]] = []
        self.checkpoints: list[tuple[str, int]] = []
        self.feed = TrainerFeed(
            self.trainer,
            deadline_s=10.0,
            start=self.start,
            on_step=self.step,
            write_checkpoint=self.write,
            streaming=streaming,
        )

    def start(self, job: Coroutine[Any, Any, None]) -> None:
        self.jobs.append(asyncio.create_task(job))

    def step(self, metrics: UpdateMetrics, groups: list[Group], adapter: AdapterRef) -> None:
        del metrics, adapter
        self.stepped.append([group.group_id for group in groups])

    async def write(self, frontier: Frontier) -> None:
        path = await self.trainer.checkpoint.remote(frontier)
        self.checkpoints.append((path, frontier["updates_done"]))

    async def finish(self) -> list[str]:
        """Let the trainer do all its work; its calls in order."""
        for _ in range(50):
            self.trainer.turn.release()
        await asyncio.gather(*self.jobs)
        return self.trainer.calls


def test_early_attempts_wait_for_whole_groups_which_take_over_what_still_waits() -> None:
    async def run() -> None:
        desk = Desk()
        desk.feed.attempt(1, episode("g0", 0))
        await asyncio.sleep(0)  # the trainer is at work on it now
        for number in (1, 2, 3):
            desk.feed.attempt(1, episode("g0", number))
            desk.feed.attempt(1, episode("g1", number))
        desk.feed.group(1, whole("g1"))
        assert await desk.finish() == [
            "accumulate_attempts g0-a0",
            "accumulate g1",
            "accumulate_attempts g0-a1+g0-a2",
            "accumulate_attempts g0-a3",
        ]

    asyncio.run(run())


def test_the_group_with_the_fewest_graded_attempts_is_worked_on_first() -> None:
    async def run() -> None:
        desk = Desk()
        desk.feed.attempt(1, episode("g0", 0))
        await asyncio.sleep(0)
        desk.feed.attempt(1, episode("g0", 1))
        desk.feed.attempt(1, episode("g1", 0))
        assert await desk.finish() == [
            "accumulate_attempts g0-a0",
            "accumulate_attempts g1-a0",
            "accumulate_attempts g0-a1",
        ]

    asyncio.run(run())


def test_a_checkpoint_comes_before_the_next_batch_and_steps_name_their_groups() -> None:
    async def run() -> None:
        desk = Desk()
        desk.feed.group(1, whole("g0"))
        desk.feed.step(1, [whole("g0")])
        desk.feed.checkpoint(FRESH)
        desk.feed.group(2, whole("g1"))
        assert await desk.finish() == [
            "accumulate g0",
            "step ['g0']",
            f"checkpoint {FRESH}",
            "accumulate g1",
        ]
        assert desk.stepped == [["g0"]]
        assert desk.checkpoints == [("path", 0)]

    asyncio.run(run())


def test_a_dropped_group_is_told_only_if_the_trainer_has_heard_of_it() -> None:
    async def run() -> None:
        desk = Desk()
        desk.feed.attempt(1, episode("g0", 0))
        await asyncio.sleep(0)
        desk.feed.attempt(1, episode("g1", 0))
        desk.feed.drop("g1")
        desk.feed.drop("g0")
        desk.feed.drop("g2")
        assert await desk.finish() == ["accumulate_attempts g0-a0", "drop g0"]

    asyncio.run(run())


def test_a_failure_of_the_trainer_ends_the_job_and_nothing_later_is_sent() -> None:
    async def run() -> None:
        desk = Desk()
        desk.trainer.broken = "accumulate"
        desk.feed.group(1, whole("g0"))
        desk.feed.step(1, [whole("g0")])
        with pytest.raises(EvidenceError, match="broken"):
            await desk.finish()
        desk.feed.group(1, whole("g1"))
        await asyncio.sleep(0)
        assert desk.trainer.calls == ["accumulate g0"]
        assert desk.stepped == []

    asyncio.run(run())


def test_without_streaming_a_whole_batch_is_given_in_the_order_of_its_draws() -> None:
    async def run() -> None:
        desk = Desk(streaming=False)
        desk.feed.attempt(1, episode("g00002.0", 0))
        groups = [whole("g00002.0"), whole("g00000.0"), whole("g00001.0")]
        for group in groups:
            desk.feed.group(1, group)
        desk.feed.drop("g00003.0")
        assert desk.jobs == []
        desk.feed.step(1, groups)
        calls = await desk.finish()
        assert calls[:3] == [f"accumulate g0000{n}.0" for n in range(3)]
        assert [call.partition(" ")[0] for call in calls[3:]] == ["step"]

    asyncio.run(run())
