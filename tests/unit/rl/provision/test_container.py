"""What runs inside a container: claims, resuming, commits, shards, what comes after training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rl.provision.container as container
from rl.errors import DeadlineExceeded, InfrastructureError
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import Audit, Finding
from rl.files import write_json
from rl.provision.container import (
    Runtime,
    evaluate_shard,
    prepare,
    prove_volume,
    train_campaign,
    train_on_cluster,
)
from rl.provision.continuation import Calls, continue_campaign
from rl.provision.machine import Machine
from rl.provision.order import CONFIG, GATES, OWN, Answer, Order
from sandboxes.gates import GateReport, GateResult, load_report, save_report
from tests.support.modal_rented import configured

RUN = "run-1"
ORDER = Order(
    run_id=RUN,
    submission_id="run-1.a1",
    intent_sha256="0" * 64,
    app="terminal-rl-run-1.a1",
    claims="terminal-rl-claims",
    environment="main",
)


JOB_SERVER = "http://127.0.0.1:8265"


class Preempted(BaseException):
    """What Modal raises in the main thread; no Exception."""


@dataclass
class FakeMachine:
    """The process boundary: commands are noted, and end as the test says."""

    ends: Callable[[Sequence[str]], int] = lambda _: 0
    said: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    head: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(job_server=JOB_SERVER, dashboard_port=8265)
    )

    def start_head(self, host: str | None = None) -> None:
        self.said.append(f"head {host or 'alone'}")

    def await_nodes(self, count: int) -> None:
        self.said.append(f"{count} nodes")

    def join(self, head: str, limit_s: float) -> None:
        self.said.append(f"join {head}")

    def run(self, command: Sequence[str], limit_s: float) -> int:
        self.commands.append(list(command[1:]))
        self.said.append(command[2])
        return self.ends(list(command[1:]))

    def stop(self) -> None:
        self.said.append("stop")


@dataclass
class Volume:
    """Where things are, and what has been made durable."""

    root: Path
    claims: dict[str, str] = field(default_factory=dict)
    commits: int = 0
    tunnels: list[int] = field(default_factory=list)

    def runtime(self, call: str, machine: FakeMachine, **changes: Any) -> Runtime:
        def commit() -> None:
            self.commits += 1
            machine.said.append("commit")

        @contextmanager
        def tunnel(port: int) -> Generator[str]:
            self.tunnels.append(port)
            yield "https://somewhere.modal.host"

        (self.root / "sources").mkdir(exist_ok=True)
        (self.root / "state").mkdir(exist_ok=True)
        config = configured(**changes)
        (self.root / "sources" / CONFIG).write_text(config.model_dump_json())
        return Runtime(
            call=call,
            claim=lambda key: self.claims.setdefault(key, call),
            commit=commit,
            reload=lambda: machine.said.append("reload"),
            tunnel=tunnel,
            machine=machine,  # type: ignore[arg-type]
            state=self.root / "state",
            sources=self.root / "sources",
        )

    def begin(self, folder: str = "campaigns", run: str = RUN, frozen: bool = True) -> Path:
        path = self.root / "state" / folder / run
        path.mkdir(parents=True, exist_ok=True)
        if frozen:
            (path / "frozen.json").write_text("{}")
        return path


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def passed(digest: str) -> dict[str, GateResult]:
    result = GateResult(
        name=digest, digest=digest, verdict="passed", oracle=[1.0], nothing=[0.0], seconds=1.0
    )
    return {digest: result}


def answer(text: str) -> Answer:
    return Answer.model_validate_json(text)


def test_a_campaign_is_a_job_of_a_head_of_its_own(volume: Volume) -> None:
    machine = FakeMachine()
    runtime = volume.runtime("fc-1", machine)
    ended = answer(train_campaign(ORDER.model_dump_json(), runtime))
    assert (ended.ending, ended.exit_code, ended.resumed) == ("done", 0, False)
    assert machine.said == ["head alone", "rl.submit", "stop", "commit"]
    (command,) = machine.commands
    assert command == [
        *["-m", "rl.submit", "--address", JOB_SERVER],
        *["--config", str(runtime.sources / CONFIG), "--run-id", RUN],
        *[
            "--state",
            str(runtime.state),
            "--receipts",
            str(OWN / "receipts"),
            "--train-only",
        ],
    ]


def test_the_short_run_evaluates_and_reports_too(volume: Volume) -> None:
    machine = FakeMachine()
    train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", machine), whole=True)
    assert "--train-only" not in machine.commands[0]


def test_what_was_proven_of_tasks_is_added_to_what_is_known(volume: Volume) -> None:
    runtime = volume.runtime("fc-1", FakeMachine())
    gates = runtime.state / "gates" / "report.json"
    save_report(GateReport(results=passed("known")), gates)
    save_report(GateReport(results=passed("told")), runtime.sources / GATES)
    train_campaign(ORDER.model_dump_json(), runtime)
    assert set(load_report(gates).results) == {"known", "told"}


def test_a_preempted_call_continues_the_run_that_it_has_begun(volume: Volume) -> None:
    def preempted(command: Sequence[str]) -> int:
        if "--stop" in command:
            return 0
        volume.begin()
        raise Preempted

    first = FakeMachine(preempted)
    with pytest.raises(Preempted):
        train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", first))
    assert first.said == ["head alone", "rl.submit", "commit", "rl.submit", "stop", "commit"]
    assert first.commands[1][4:6] == ["--stop", RUN]

    second = FakeMachine()
    ended = answer(train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", second)))
    assert (ended.ending, ended.resumed) == ("done", True)
    (command,) = second.commands
    assert "--resume" in command and "--run-id" not in command and "--config" not in command


def test_a_run_that_froze_nothing_is_begun_again(volume: Volume) -> None:
    machine = FakeMachine()
    runtime = volume.runtime("fc-1", machine)
    left = volume.begin(frozen=False)
    ended = answer(train_campaign(ORDER.model_dump_json(), runtime))
    assert not ended.resumed and not left.exists()
    assert "--run-id" in machine.commands[0]


def test_a_commit_that_fails_does_not_keep_a_preempted_run_from_stopping(volume: Volume) -> None:
    def preempted(command: Sequence[str]) -> int:
        if "--stop" in command:
            return 0
        raise Preempted

    machine = FakeMachine(preempted)
    runtime = volume.runtime("fc-1", machine)
    commits: list[int] = []

    def commit() -> None:
        commits.append(1)
        if len(commits) == 1:
            raise OSError("no volume")

    runtime.commit = commit
    with pytest.raises(Preempted):
        train_campaign(ORDER.model_dump_json(), runtime)
    assert machine.said == ["head alone", "rl.submit", "rl.submit", "stop"]
    assert len(commits) == 2


def test_a_head_that_does_not_start_leaves_nothing(volume: Volume) -> None:
    machine = FakeMachine()

    def start_head(host: str | None = None) -> None:
        raise InfrastructureError("Ray did not start", "ray.log")

    machine.start_head = start_head  # type: ignore[method-assign]
    ended = answer(train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", machine)))
    assert ended.ending == "failed" and "Ray did not start" in ended.note
    assert machine.said == ["stop"]


def test_a_second_call_of_a_submission_does_nothing(volume: Volume) -> None:
    train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", FakeMachine()))
    other = FakeMachine()
    ended = answer(train_campaign(ORDER.model_dump_json(), volume.runtime("fc-2", other)))
    assert (ended.ending, ended.owner) == ("taken", "fc-1")
    assert other.said == []


def test_a_drivers_failure_is_the_answer(volume: Volume) -> None:
    runtime = volume.runtime("fc-1", FakeMachine(lambda _: 2))
    ended = answer(train_campaign(ORDER.model_dump_json(), runtime))
    assert (ended.ending, ended.exit_code) == ("failed", 2)
    assert volume.commits == 1


def test_a_run_beyond_its_bound_is_stopped_in_order_and_committed(volume: Volume) -> None:
    def late(command: Sequence[str]) -> int:
        if "--stop" in command:
            return 0
        raise DeadlineExceeded("was ended after 32760 s", "rl.submit")

    machine = FakeMachine(late)
    ended = answer(train_campaign(ORDER.model_dump_json(), volume.runtime("fc-1", machine)))
    assert ended.ending == "failed" and "32760 s" in ended.note
    assert machine.said[-4:] == ["commit", "rl.submit", "stop", "commit"]


def test_the_stop_comes_between_the_watchdog_and_the_functions_bound() -> None:
    limits = configured().limits
    assert limits.function_bound_s is not None
    assert limits.watchdog_s < limits.function_bound_s - container.END_MARGIN_S


def test_what_is_written_is_committed_at_intervals(volume: Volume) -> None:
    def run(_: Sequence[str]) -> int:
        limit = time.monotonic() + 20.0
        while volume.commits < 3 and time.monotonic() < limit:
            time.sleep(0.005)
        return 0

    runtime = volume.runtime("fc-1", FakeMachine(run), modal__commit_s=0.01)
    train_campaign(ORDER.model_dump_json(), runtime)
    assert volume.commits >= 3


def test_a_commit_that_fails_is_told_and_the_last_one_is_raised(
    volume: Volume, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[int] = []

    def run(_: Sequence[str]) -> int:
        limit = time.monotonic() + 20.0
        while not failed and time.monotonic() < limit:
            time.sleep(0.005)
        return 0

    def commit() -> None:
        failed.append(1)
        raise OSError("no volume")

    runtime = volume.runtime("fc-1", FakeMachine(run), modal__commit_s=0.01)
    runtime.commit = commit
    with pytest.raises(OSError, match="no volume"):
        train_campaign(ORDER.model_dump_json(), runtime)
    assert "a commit failed" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [True, False])
def test_the_dashboard_is_reached_only_if_it_is_asked_for(volume: Volume, wanted: bool) -> None:
    runtime = volume.runtime("fc-1", FakeMachine(), modal__dashboard=wanted)
    train_campaign(ORDER.model_dump_json(), runtime)
    assert volume.tunnels == ([8265] if wanted else [])


def test_a_shard_is_a_run_of_its_own_and_continued_by_its_name(volume: Volume) -> None:
    first = FakeMachine()
    evaluate_shard(ORDER.model_dump_json(), 1, 2, volume.runtime("fc-3", first))
    state = str(volume.root / "state")
    assert first.commands == [
        ["-m", "rl.heldout", RUN, "--shard", "1/2", "--run-id", "run-1-shard1", "--state", state]
    ]
    assert volume.claims == {"run-1.a1/heldout/1": "fc-3"}
    volume.begin("heldout", "run-1-shard1")
    again = FakeMachine()
    evaluate_shard(ORDER.model_dump_json(), 1, 2, volume.runtime("fc-3", again))
    assert again.commands == [["-m", "rl.heldout", "--resume", "run-1-shard1", "--state", state]]


def test_a_shard_that_was_evaluated_is_not_evaluated_again(volume: Volume) -> None:
    runtime = volume.runtime("fc-3", FakeMachine())
    directory = CampaignDir(volume.begin("heldout", "run-1-shard1"))
    directory.summary.write_text("{}")
    finding = Finding(code="lost-record", where="x", message="y")
    write_json(directory.audit, Audit(run_id=RUN, checked={}, findings=[finding]))
    unclean = FakeMachine()
    evaluate_shard(ORDER.model_dump_json(), 1, 2, volume.runtime("fc-3", unclean))
    assert unclean.commands
    write_json(directory.audit, Audit(run_id=RUN, checked={}, findings=[]))
    ended = answer(evaluate_shard(ORDER.model_dump_json(), 1, 2, runtime))
    assert (ended.ending, ended.note) == ("done", "was evaluated before")


def test_of_a_clusters_machines_the_first_has_the_head_and_the_others_join(
    volume: Volume,
) -> None:
    place = ["10.0.0.1", "10.0.0.2"]
    first, second = FakeMachine(), FakeMachine()
    text = ORDER.model_dump_json()
    ended = answer(train_on_cluster(text, volume.runtime("fc-1", first), (0, place)))
    assert ended.ending == "done"
    assert first.said == ["head 10.0.0.1", "2 nodes", "rl.submit", "stop", "commit"]
    train_on_cluster(text, volume.runtime("fc-1", second), (1, place))
    assert second.said == ["join 10.0.0.1", "stop"]


def test_an_order_of_another_version_is_refused(volume: Volume) -> None:
    other = ORDER.model_dump(mode="json") | {"unheard": 1}
    ended = answer(train_campaign(json.dumps(other), volume.runtime("fc-1", FakeMachine())))
    assert ended.ending == "failed" and "unheard" in ended.note


def test_preparing_asks_no_model_and_commits(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rl.prepare
    from rl.learner.base_model import PreparedModel

    path = volume.root / "model"
    monkeypatch.setattr(
        rl.prepare, "prepare_model", lambda *_: PreparedModel(path=path, name="tiny", files={})
    )
    tasks = rl.prepare.PreparedTasks(root=volume.root, train=[], heldout=[])
    monkeypatch.setattr(rl.prepare, "prepare_tasks", lambda *_: tasks)
    machine = FakeMachine()
    ended = answer(prepare(ORDER.model_dump_json(), volume.runtime("fc-9", machine)))
    assert ended.note == "tiny, 0 training and 0 held-out tasks"
    assert machine.said == ["commit"]


def test_a_volume_that_can_hold_no_evidence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_volume(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("rl.files.os.link", refused)
    with pytest.raises(InfrastructureError, match="cannot be written"):
        prove_volume(tmp_path)


# ---- what comes after training ------------------------------------------------


@dataclass
class FakeCalls:
    """Calls of the app, and how they end."""

    answers: dict[str, Answer]
    notes: dict[str, str] = field(default_factory=dict)
    spawned: list[tuple[int, int]] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)

    def made(self) -> Calls:
        def wait(call: str, limit_s: float) -> Answer:
            assert limit_s > 0
            self.waited.append(call)
            return self.answers[call]

        def spawn(text: str, shard: int, shards: int) -> str:
            self.spawned.append((shard, shards))
            return f"fc-w{shard}"

        return Calls(wait, spawn, self.notes.setdefault, lambda key: self.notes.get(key, ""))


DONE = Answer(ending="done", exit_code=0)


def continued(volume: Volume, machine: FakeMachine, calls: FakeCalls) -> Answer:
    runtime = volume.runtime("fc-2", machine)
    return answer(continue_campaign(ORDER.model_dump_json(), "fc-1", 2, runtime, calls.made()))


def test_shards_are_evaluated_after_training_then_reported(volume: Volume) -> None:
    machine, calls = FakeMachine(), FakeCalls({"fc-1": DONE, "fc-w1": DONE, "fc-w2": DONE})
    assert continued(volume, machine, calls).ending == "done"
    assert calls.waited == ["fc-1", "fc-w1", "fc-w2"]
    assert calls.spawned == [(1, 2), (2, 2)]
    assert machine.said == ["reload", "reload", "rl.final", "commit"]
    (command,) = machine.commands
    assert command[:4] == ["-m", "rl.final", "--resume", RUN]
    assert command[-4:] == ["--take-in", "run-1-shard1", "--take-in", "run-1-shard2"]


def test_nothing_is_evaluated_when_training_has_not_ended_well(volume: Volume) -> None:
    failed = Answer(ending="failed", exit_code=2, note="stalled")
    machine, calls = FakeMachine(), FakeCalls({"fc-1": failed})
    ended = continued(volume, machine, calls)
    assert (ended.ending, ended.exit_code) == ("failed", 2) and "stalled" in ended.note
    assert calls.spawned == [] and machine.commands == []


def test_a_campaign_that_has_reported_is_not_evaluated_again(volume: Volume) -> None:
    (volume.begin() / "summary.json").write_text("{}")
    machine, calls = FakeMachine(), FakeCalls({"fc-1": DONE})
    assert continued(volume, machine, calls).ending == "done"
    assert calls.spawned == [] and machine.commands == []


def test_a_preempted_continuation_calls_no_worker_twice(volume: Volume) -> None:
    answers = {"fc-1": DONE, "fc-w1": DONE, "fc-w2": DONE}
    first = FakeCalls(answers)
    continued(volume, FakeMachine(), first)
    second = FakeCalls(answers, notes=first.notes)
    assert continued(volume, FakeMachine(), second).ending == "done"
    assert second.spawned == []


def test_a_worker_that_was_called_and_not_noted_is_found_by_its_claim(volume: Volume) -> None:
    calls = FakeCalls(
        {"fc-1": DONE, "fc-lost": DONE, "fc-w2": DONE}, notes={"run-1.a1/heldout/1": "fc-lost"}
    )
    assert continued(volume, FakeMachine(), calls).ending == "done"
    assert calls.spawned == [(2, 2)] and "fc-lost" in calls.waited


def test_a_call_that_leaves_the_submission_to_another_is_followed_there(volume: Volume) -> None:
    taken = Answer(ending="taken", exit_code=2, owner="fc-0")
    calls = FakeCalls({"fc-1": taken, "fc-0": DONE, "fc-w1": DONE, "fc-w2": DONE})
    assert continued(volume, FakeMachine(), calls).ending == "done"
    assert calls.waited[:2] == ["fc-1", "fc-0"]


def test_a_workers_failure_is_told_with_what_to_do(volume: Volume) -> None:
    failed = Answer(ending="failed", exit_code=2, note="no replica")
    calls = FakeCalls({"fc-1": DONE, "fc-w1": DONE, "fc-w2": failed})
    machine = FakeMachine()
    ended = continued(volume, machine, calls)
    assert ended.ending == "failed" and "fc-w2" in ended.note and "--resume" in ended.note
    assert machine.commands == []


# ---- the processes of a container -----------------------------------------------


def test_a_command_that_outlives_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    script = "sleep 300 & echo $! > child; wait"
    with pytest.raises(DeadlineExceeded, match=r"was ended after 0\.5 s"):
        Machine(tmp_path).run(["sh", "-c", script], 0.5)
    child = int((tmp_path / "child").read_text())
    limit = time.monotonic() + 10.0
    while Path(f"/proc/{child}/status").exists() and time.monotonic() < limit:
        if "Z (zombie)" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_a_commands_exit_code_is_told(tmp_path: Path) -> None:
    assert Machine(tmp_path).run(["sh", "-c", "exit 7"], 10.0) == 7
