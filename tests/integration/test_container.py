"""A campaign's way through Modal's containers, on this machine: heads, jobs, shards, report.

Only what Modal itself is stands in: who calls, volumes that are folders, claims in a dict.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.local_head import JoinedNode, LocalHead
from rl.config_file import parse_config
from rl.errors import InfrastructureError
from rl.evidence.code_pin import pin_code
from rl.evidence.layout import CampaignDir
from rl.learner.stand_in import make_tiny_model
from rl.provision.container import Runtime, evaluate_shard, train_campaign
from rl.provision.continuation import Calls, continue_campaign
from rl.provision.machine import Machine
from rl.provision.order import Answer, Order
from rl.submitting import stage
from tests.support.campaigns import ROOT, SYSTEM, events, processes_naming, small_config

REPLIES = ["```bash\nmkdir -p a\n```", "```bash\nls\n```"]
RUN = "rented"
ORDER = Order(
    run_id=RUN,
    submission_id=f"{RUN}.a1",
    intent_sha256="0" * 64,
    app=f"rl-{RUN}.a1",
    claims="rl-claims",
    environment="main",
).model_dump_json()


class Modal:
    """What the containers of one submission share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.claims: dict[str, str] = {}
        self.commits = 0
        self._containers = 0

    def container(self, call: str) -> Runtime:
        """A fresh container: the volume is as it was, all else is new."""
        self._containers += 1
        own = self.folder / f"container{self._containers}"

        def commit() -> None:
            self.commits += 1

        return Runtime(
            call=call,
            claim=lambda key: self.claims.setdefault(key, call),
            commit=commit,
            reload=lambda: None,
            tunnel=lambda _: nullcontext("https://somewhere"),
            machine=Machine(self.folder / "sources", own / "ray"),
            state=self.folder / "state",
            sources=self.folder / "sources",
            receipts=own / "receipts",
        )


@pytest.fixture
def modal(tmp_path: Path) -> Modal:
    settings = small_config(
        make_tiny_model(tmp_path / "model", [SYSTEM, *REPLIES]),
        engine={"kind": "scripted", "scripted": {"replies": REPLIES, "latency_s": 0.3}},
        schedule={"updates": 2},
        checkpoints={"updates": []},
        heldout={"attempts": 1, "shards": 2},
        limits={"function_bound_s": 2400.0, "watchdog_s": 1200.0},
    )
    (tmp_path / "sources").mkdir()
    stage(tmp_path / "sources", parse_config(settings, "small"), pin_code(ROOT))
    return Modal(tmp_path)


def answer(text: str) -> Answer:
    return Answer.model_validate_json(text)


def interrupt_after_update(campaign: Path, update: int) -> threading.Thread:
    """Interrupts this process as Modal does a preempted container's."""

    def watch() -> None:
        limit = time.monotonic() + 240.0
        while time.monotonic() < limit:
            if sum(row["kind"] == "checkpoint" for row in events(campaign)) >= update:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.timeout(600)
def test_a_campaign_is_preempted_continued_evaluated_on_workers_and_reported(
    modal: Modal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [key for key in os.environ if key.startswith("RAY_")]:
        monkeypatch.delenv(name)
    state = modal.folder / "state"
    campaign = CampaignDir(state / "campaigns" / RUN)

    watcher = interrupt_after_update(campaign.root, 1)
    with pytest.raises(KeyboardInterrupt):
        train_campaign(ORDER, modal.container("fc-1"))
    watcher.join(10.0)
    assert modal.commits >= 2
    assert processes_naming(str(modal.folder)) == []
    assert not campaign.arms.exists()

    trained = answer(train_campaign(ORDER, modal.container("fc-1")))
    assert (trained.ending, trained.exit_code, trained.resumed) == ("done", 0, True)
    assert campaign.arms.exists() and not campaign.trace("heldout").exists()
    other = answer(train_campaign(ORDER, modal.container("fc-9")))
    assert (other.ending, other.owner) == ("taken", "fc-1")

    answers = {"fc-1": trained}

    def spawn(text: str, shard: int, shards: int) -> str:
        call = f"fc-w{shard}"
        answers[call] = answer(evaluate_shard(text, shard, shards, modal.container(call)))
        return call

    calls = Calls(
        wait=lambda call, _: answers[call],
        spawn=spawn,
        noted=modal.claims.setdefault,
        find=lambda key: modal.claims.get(key, ""),
    )
    ended = answer(continue_campaign(ORDER, "fc-1", 2, modal.container("fc-2"), calls))
    assert (ended.ending, ended.exit_code) == ("done", 0), ended.note

    audit: dict[str, Any] = json.loads(campaign.audit.read_text())
    assert audit["findings"] == []
    assert audit["checked"]["held-out shards"] == 2
    assert campaign.report.is_file()
    assert processes_naming(str(modal.folder)) == []


@pytest.mark.timeout(300)
def test_a_node_joins_a_head_by_its_token_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [key for key in os.environ if key.startswith("RAY_")]:
        monkeypatch.delenv(name)
    from ray.util import get_node_ip_address

    # A head for other nodes, which listens where they can reach it.
    head = LocalHead(tmp_path / "head", 1, 0, host=get_node_ip_address(), token="a" * 64)
    foreign = JoinedNode(tmp_path / "foreign", head.address, "b" * 64)
    node = JoinedNode(tmp_path / "node", head.address, "a" * 64)
    machine = Machine(ROOT, tmp_path / "unused")
    machine._head = head

    async def run() -> None:
        await head.start(120.0)
        try:
            with pytest.raises(InfrastructureError, match="Ray did not join"):
                await foreign.run(60.0, 30.0)
            joined = asyncio.create_task(node.run(240.0, 30.0))
            await asyncio.to_thread(machine.await_nodes, 2)
            assert not joined.done()
        finally:
            await head.stop(20.0)
        await asyncio.wait_for(joined, 120.0)

    asyncio.run(run())
    for own in (head, node, foreign):
        assert own.processes() == []
    assert "a" * 64 not in (tmp_path / "node" / "ray.log").read_text()
