"""Launching on Modal: guards, intents and receipts, following, stopping, finding again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from grpclib import Status

import rl.provision.following as following
import rl.provision.launch as launching
from rl.config import CampaignConfig
from rl.config_file import load_config
from rl.errors import (
    CampaignError,
    ConfigurationError,
    DeadlineExceeded,
    EvidenceError,
    InfrastructureError,
)
from rl.evidence.code_pin import CodePin
from rl.evidence.receipts import Ledger
from rl.guards import Guard
from rl.prepare import PreparedTasks
from rl.provision.account import asking
from rl.provision.following import follow, newest, stop
from rl.provision.inquiry import told, what_exists
from rl.provision.launch import Request, launch, prepare_account
from rl.provision.order import Answer, read_order
from rl.receipts import main as receipts
from rl.rent import main as command
from tests.support.modal_apps import ModalApps, ModalCall
from tests.support.modal_rented import ROOT, TOKEN_SECRET, configured

APP = "terminal-rl-run-1.a1"
DONE = Answer(ending="done", exit_code=0).model_dump_json()


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Request]:
    """Requests whose other guards hold, and whose sources are one file."""
    holds = Guard("dry runs", lambda: "made")
    monkeypatch.setattr(launching, "launch_guards", lambda _: [])
    monkeypatch.setattr(launching, "rehearsal_guard", lambda _: holds)
    nothing = PreparedTasks(root=tmp_path, train=[], heldout=[])
    monkeypatch.setattr(launching, "prepare_tasks", lambda *_: nothing)

    def stage(folder: Path, config: CampaignConfig, code: CodePin) -> None:
        (folder / "submitted.json").write_text(config.model_dump_json())

    monkeypatch.setattr(launching, "stage", stage)
    (tmp_path / "state").mkdir(exist_ok=True)

    def request(**changes: object) -> Request:
        made = Request(
            "final_train", configured(), "configs/final.toml", "run-1", False, tmp_path / "state"
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    return request


def code_of(answers: dict[str, Answer]) -> int:
    return next((one.exit_code for one in answers.values() if one.ending != "done"), 0)


def standing(request: Request) -> list[tuple[str, str]]:
    entries = request.ledger.entries(request.run_id)
    return [(entry.intent.submission_id, entry.standing) for entry in entries]


def test_a_launch_leaves_intent_calls_and_receipt(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    calls = launch(request)
    assert calls == {"app": f"ap-{APP}", "final_train": "fc-1", "final_continue": "fc-2"}
    (entry,) = request.ledger.entries("run-1")
    assert (entry.standing, entry.calls) == ("submitted", calls)
    assert entry.intent.target == "our-lab/main"
    assert entry.intent.tags == {
        "app": APP,
        "claims": "terminal-rl-claims",
        "campaign": "run-1",
        "attempt": "1",
    }
    assert entry.intent.config_digest == request.config.digest()
    training, continuation = apps.calls
    order = read_order(training.arguments[0])
    assert (order.run_id, order.submission_id, order.app) == ("run-1", "run-1.a1", APP)
    assert order.intent_sha256 == request.ledger.digest(entry.intent)
    assert continuation.arguments == (training.arguments[0], "fc-1", 2)


def test_the_report_of_the_gates_travels_with_the_sources(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    (request.state / "gates").mkdir()
    report = b'{"results": {}}'
    (request.state / "gates" / "report.json").write_bytes(report)
    launch(request)
    uploaded = {
        file.filename: file.sha256_hex
        for asked in apps.asked("MountGetOrCreate")
        for file in asked.files
    }
    assert uploaded["/opt/terminal-rl/gates-report.json"] == hashlib.sha256(report).hexdigest()


def test_the_intent_is_on_disk_before_anything_is_made_at_modal(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    seen: list[list[tuple[str, str]]] = []
    made = apps.server.answers["AppGetByDeploymentName"]

    def look(asked: object) -> object:
        seen.append(standing(request))
        return made(asked)

    apps.server.answers["AppGetByDeploymentName"] = look
    launch(request)
    assert seen == [[("run-1.a1", "ambiguous")]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"modal__workspace": "their-lab"}, "'our-lab' is logged in, and 'their-lab'"),
        ({"modal__environment": "nowhere"}, "the environment 'nowhere'"),
        ({"modal__secrets": ["nobodys"]}, "the secret 'nobodys'"),
        ({"modal__state_volume": "unmade"}, "the volumes"),
        ({"modal__profile": "work"}, "MODAL_TOKEN_ID is set"),
    ],
)
def test_another_account_is_refused_before_anything_is_made(
    apps: ModalApps, request_of: Callable[..., Request], changes: dict[str, str], told: str
) -> None:
    request = request_of(config=configured(**changes))
    with pytest.raises(ConfigurationError, match=told) as refused:
        launch(request)
    assert refused.value.remedy and refused.value.where.startswith("modal.")
    assert apps.created() == [] and standing(request) == []


def test_an_unnamed_workspace_is_refused(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of(config=load_config(ROOT / "configs/final.toml"))
    with pytest.raises(ConfigurationError, match="no workspace is named"):
        launch(request)
    assert apps.created() == []


def test_everything_that_is_wrong_is_named_at_once(
    apps: ModalApps, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise ConfigurationError("has not been rehearsed", "rehearsals", "rehearse it")

    monkeypatch.setattr(launching, "rehearsal_guard", lambda _: Guard("dry runs", refuse))
    config = configured(modal__workspace="their-lab", modal__secrets=["nobodys"])
    with pytest.raises(ConfigurationError, match="3 guards refuse the launch") as refused:
        launch(request_of(config=config))
    assert "has not been rehearsed" in str(refused.value)
    assert apps.created() == []


def test_a_run_id_is_launched_once(apps: ModalApps, request_of: Callable[..., Request]) -> None:
    launch(request_of())
    before = len(apps.created())
    with pytest.raises(ConfigurationError, match=r"submitted before: run-1\.a1") as refused:
        launch(request_of())
    assert "rl.rent follow run-1" in refused.value.remedy
    assert len(apps.created()) == before


def test_another_machines_launch_of_the_run_is_found_at_modal(
    apps: ModalApps, request_of: Callable[..., Request], tmp_path: Path
) -> None:
    launch(request_of())
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigurationError, match="of another machine's launch"):
        launch(request_of(state=tmp_path / "elsewhere"))


def test_of_two_machines_at_once_one_gets_the_submission(
    apps: ModalApps, request_of: Callable[..., Request], tmp_path: Path
) -> None:
    launch(request_of())
    apps.apps.clear()  # as for a launcher that asked before the other one had deployed
    other = request_of(state=tmp_path / "elsewhere")
    other.state.mkdir()
    with pytest.raises(ConfigurationError, match="another launcher has taken it"):
        launch(other)
    assert len(apps.calls) == 2
    assert standing(other) == [("run-1.a1", "absent")]


def test_what_failed_before_a_call_is_known_to_be_absent(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    apps.failing["FunctionCreate"] = Status.FAILED_PRECONDITION
    request = request_of()
    with pytest.raises(InfrastructureError, match="deploying"):
        launch(request)
    assert standing(request) == [("run-1.a1", "absent")]
    apps.failing.clear()
    assert launch(request)["final_train"] == "fc-1"
    assert standing(request) == [("run-1.a1", "absent"), ("run-1.a2", "submitted")]


def test_a_lost_answer_is_ambiguous_until_somebody_has_looked(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    apps.lost.add("FunctionMap")  # it was called, and nobody is told
    request = request_of()
    with pytest.raises(InfrastructureError, match="calling final_train"):
        launch(request)
    apps.lost.clear()
    assert standing(request) == [("run-1.a1", "ambiguous")]
    with pytest.raises(EvidenceError, match=r"ambiguous|receipt") as refused:
        launch(request)
    assert "rl.receipts inspect run-1" in refused.value.remedy
    assert len(apps.calls) == 1
    (entry,) = request.ledger.entries("run-1")
    found = what_exists(entry.intent)
    assert ("call", "final_train", "fc-1", "running") in {
        (one.kind, one.name, one.id, one.detail) for one in found
    }
    assert "--finding present --call final_train=fc-1" in told(entry.intent, found)
    request.ledger.resolve("run-1", "run-1.a1", "present", "inspect", {"final_train": "fc-1"})
    apps.calls[0].output = DONE
    assert code_of(follow(newest(request.ledger, "run-1"))) == 0


def test_an_app_without_a_call_is_found_to_be_nothing(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    apps.failing["FunctionMap"] = Status.FAILED_PRECONDITION  # it was not called
    request = request_of()
    with pytest.raises(InfrastructureError, match="calling final_train"):
        launch(request)
    (entry,) = request.ledger.entries("run-1")
    assert entry.standing == "ambiguous"
    found = what_exists(entry.intent)
    assert [one.kind for one in found] == ["app", "claim"]
    assert told(entry.intent, found).endswith("so nothing was called: --finding absent")
    apps.failing.clear()
    request.ledger.resolve("run-1", "run-1.a1", "absent", "inspect shows no call")
    assert launch(request)["final_train"] == "fc-1"


def test_a_launcher_killed_before_it_asked_left_nothing_at_modal(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    intent = launching._intent(request, CodePin(commit=None, dirty=False, packages={}), [])
    with request.ledger.claim(intent):
        pass
    assert what_exists(intent) == []
    assert told(intent, []) == f"no app {APP}; so nothing was called: --finding absent"


def test_a_claim_tells_of_a_call_that_modal_has_forgotten(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    import modal

    request = request_of()
    launch(request)
    (entry,) = request.ledger.entries("run-1")
    modal.Dict.from_name("terminal-rl-claims")["run-1.a1/train"] = "fc-1"
    apps.calls.clear()
    apps.apps.clear()
    found = what_exists(entry.intent)
    assert "--finding present --call run-1.a1/train=fc-1" in told(entry.intent, found)


def test_another_workspace_is_not_asked_what_exists(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    launch(request_of())
    (entry,) = request_of().ledger.entries("run-1")
    apps.workspace = "their-lab"
    with pytest.raises(ConfigurationError, match="'their-lab' is logged in, and 'our-lab'"):
        what_exists(entry.intent)


def test_following_relays_the_log_and_ends_with_the_drivers_code(
    apps: ModalApps, request_of: Callable[..., Request], capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of()
    launch(request)
    apps.logs["fc-1"] = "update 1 of 10\n"
    ends = {
        "final_train": Answer(ending="done", exit_code=0, resumed=True),
        "final_continue": Answer(ending="failed", exit_code=2, note="no summary"),
    }
    apps.answer = lambda call: ends[call.function].model_dump_json()
    assert code_of(follow(newest(request.ledger, "run-1"))) == 2
    printed = capsys.readouterr().out
    assert "update 1 of 10\n" in printed
    assert "final_train: done, after a restart" in printed
    assert "final_continue: failed. no summary" in printed


def test_a_modal_that_is_away_for_a_while_is_asked_again(
    apps: ModalApps, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of()
    launch(request)
    asked: list[ModalCall] = []

    def answer(call: ModalCall) -> str:
        asked.append(call)
        if len(asked) == 1:
            from grpclib import GRPCError

            raise GRPCError(Status.FAILED_PRECONDITION, "away")
        return DONE

    apps.answer = answer
    assert code_of(follow(newest(request.ledger, "run-1"))) == 0
    assert len(asked) == 3


def test_a_call_that_does_not_end_meets_a_deadline(
    apps: ModalApps, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of()
    launch(request)
    monkeypatch.setattr(following, "POLL_S", 0.05)
    monkeypatch.setattr(following, "MAX_FUNCTION_S", 0.1)
    monkeypatch.setattr(following, "QUEUE_S", 0.1)
    with pytest.raises(DeadlineExceeded, match="has not ended within"):
        follow(newest(request.ledger, "run-1"))


def test_stopping_cancels_what_runs_and_nothing_else(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    launch(request)
    apps.calls[0].output = DONE
    assert stop(newest(request.ledger, "run-1")) == ["fc-2"]
    assert [call.cancelled for call in apps.calls] == [False, True]
    assert stop(newest(request.ledger, "run-1")) == []


def test_stopping_cancels_workers_that_the_continuation_has_called(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    launch(request)
    apps.calls[0].output = DONE
    apps.calls.append(ModalCall("fc-w1", "heldout_worker", ("{}", 1, 2)))
    apps.calls.append(ModalCall("fc-w2", "heldout_worker", ("{}", 2, 2), output=DONE))
    assert stop(newest(request.ledger, "run-1")) == ["fc-2", "fc-w1"]
    assert [call.id for call in apps.calls if call.cancelled] == ["fc-2", "fc-w1"]
    order = [asked.function_call_id for asked in apps.asked("FunctionCallCancel")]
    assert order == ["fc-2", "fc-w1"]  # what makes calls comes first


def test_receipts_ask_modal_what_there_is(
    apps: ModalApps, request_of: Callable[..., Request], capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of()
    launch(request)
    assert receipts(["--state", str(request.state), "inspect", "run-1"]) == 0
    shown = capsys.readouterr().out
    assert f"app {APP}: ap-{APP}" in shown and "call final_train: fc-1 running" in shown
    apps.workspace = "their-lab"
    assert receipts(["--state", str(request.state), "inspect", "run-1"]) == 0
    assert "could not be asked: the workspace 'their-lab'" in capsys.readouterr().out


def test_a_run_is_continued_when_the_attempt_before_has_ended(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    with pytest.raises(ConfigurationError, match="nothing was submitted as 'run-1'"):
        launch(request_of(resume=True))
    launch(request_of())
    with pytest.raises(ConfigurationError, match=r"fc-1 \(final_train\) has not ended"):
        launch(request_of(resume=True))
    for call in apps.calls:
        call.output = DONE
    apps.calls.append(ModalCall("fc-w1", "heldout_worker", ("{}", 1, 2)))
    with pytest.raises(ConfigurationError, match=r"fc-w1 \(heldout_worker\) has not ended"):
        launch(request_of(resume=True))
    apps.calls[-1].output = DONE
    calls = launch(request_of(resume=True))
    assert calls["app"] == "ap-terminal-rl-run-1.a2"
    assert [one for one, _ in standing(request_of())] == ["run-1.a1", "run-1.a2"]


def test_a_name_that_modal_would_not_take_is_refused(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    with pytest.raises(ConfigurationError, match="Modal takes 63"):
        launch(request_of(run_id="r" * 60))
    assert apps.created() == []


def test_preparing_makes_the_volumes_and_asks_for_no_gpu(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request_of()
    apps.volumes.clear()
    note = "1 model, 103 tasks"
    apps.answer = lambda _: Answer(ending="done", exit_code=0, note=note).model_dump_json()
    assert prepare_account(configured()) == note
    assert set(apps.volumes) == {"terminal-rl-state", "terminal-rl-models"}
    (created,) = apps.asked("FunctionCreate")
    assert created.function.function_name == "prepare_account"
    assert created.function.resources.gpu_config.count == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--max-steps", "10"], "--max-steps: 10 is not one of 1, 2"),
        (["train", "--concurrency", "128"], "--concurrency: 128 is not one of 16, 32"),
        (["final_train", "--run-id", "a", "--resume", "b"], "can't be combined"),
        (["final_train", "--set", "modal.worspace=x"], "did you mean 'workspace'"),
        (["final_train", "--config", "configs/local.toml"], "has no [modal] table"),
        (["follow", "nobody"], "nothing was submitted to Modal as 'nobody'"),
        (["stop", "nobody"], "nothing was submitted to Modal as 'nobody'"),
        (["follow", "no/body"], "can't be a run id"),
    ],
)
def test_wrong_input_is_refused_and_modal_is_not_asked(
    apps: ModalApps, tmp_path: Path, arguments: list[str], told: str
) -> None:
    with pytest.raises(CampaignError) as refused:
        command([*arguments, "--state", str(tmp_path)])
    assert told in str(refused.value)
    assert apps.server.books.calls == [] and list(tmp_path.iterdir()) == []


def test_the_commands_outcome_alone_is_on_standard_output_with_json(
    apps: ModalApps, request_of: Callable[..., Request], capsys: pytest.CaptureFixture[str]
) -> None:
    request_of()
    apps.answer = lambda _: DONE
    apps.logs["fc-1"] = "update 1 of 10\n"
    where = ["--state", str(request_of().state), "--json"]
    run = ["final_train", "--set", "modal.workspace=our-lab", "--run-id", "run-1"]
    assert command([*run, *where]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert told["exit_code"] == 0
    assert {name: call["ending"] for name, call in told["calls"].items()} == {
        "final_train": "done",
        "final_continue": "done",
    }
    assert "update 1 of 10" in printed.err and "guard holds: Modal workspace" in printed.err
    assert command(["stop", "run-1", *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": "run-1", "stopped": []}


def test_another_configuration_or_commit_does_not_continue_a_run(
    apps: ModalApps, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(request_of())
    apps.answer = lambda _: DONE
    changed = configured(seed=7)
    with pytest.raises(ConfigurationError, match="the configuration is another one"):
        launch(request_of(resume=True, config=changed))
    monkeypatch.setattr(
        launching, "pin_code", lambda _: CodePin(commit="f" * 40, dirty=False, packages={})
    )
    with pytest.raises(ConfigurationError, match="the commit is another one"):
        launch(request_of(resume=True))


def test_no_secret_is_in_receipts_requests_output_or_arguments(
    apps: ModalApps,
    request_of: Callable[..., Request],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canaries = [TOKEN_SECRET, "hf_canary-5d21", "drawn-canary-9a0c"]
    monkeypatch.setenv("HF_TOKEN", canaries[1])
    monkeypatch.setattr(launching.secrets, "token_hex", lambda _: canaries[2])
    wide = configured(modal__nodes=2, engine__replicas=14, heldout__shards=14)
    request = request_of(config=wide)
    launch(request)
    apps.answer = lambda _: DONE
    follow(newest(request.ledger, "run-1"))
    printed = "".join(capsys.readouterr())
    written = b"".join(path.read_bytes() for path in request.state.rglob("*") if path.is_file())
    for canary in canaries:
        assert canary not in printed
        assert canary.encode() not in written
        assert canary not in " ".join(sys.argv)
        holding = {
            name for name, asked in apps.books.calls if canary.encode() in asked.SerializeToString()
        }
        assert holding == ({"SecretGetOrCreate"} if canary == canaries[2] else set())


def test_a_silent_modal_is_one_message() -> None:
    async def ask() -> None:
        async with asking("who is logged in", 0.01):
            await asyncio.sleep(5)

    with pytest.raises(DeadlineExceeded, match="no answer within") as late:
        asyncio.run(ask())
    assert "status.modal.com" in late.value.remedy


def test_that_nobody_is_logged_in_is_told_once(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    for name in ("WorkspaceNameLookup", "EnvironmentGetOrCreate", "SecretGetOrCreate"):
        apps.failing[name] = Status.UNAUTHENTICATED
    with pytest.raises(ConfigurationError, match=r"guards refuse|not logged in") as refused:
        launch(request_of())
    assert str(refused.value).count("not logged in") == 1
    assert apps.created() == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.PERMISSION_DENIED, ConfigurationError),
        (Status.FAILED_PRECONDITION, InfrastructureError),
    ],
)
def test_a_refusal_of_modals_is_one_of_ours(
    apps: ModalApps,
    request_of: Callable[..., Request],
    status: Status,
    kind: type[CampaignError],
) -> None:
    apps.failing["DictGetOrCreate"] = status
    with pytest.raises(kind, match="the claims") as refused:
        launch(request_of())
    assert refused.value.remedy


def test_the_ledgers_file_is_plain_json(
    apps: ModalApps, request_of: Callable[..., Request]
) -> None:
    request = request_of()
    launch(request)
    path = request.state / "receipts" / "run-1" / "run-1.a1" / "receipt.json"
    assert json.loads(path.read_text())["calls"]["final_train"] == "fc-1"
    assert Ledger(request.state / "receipts").runs() == ["run-1"]


def test_modal_run_ends_a_refusal_with_one_message_and_exit_code_2(
    apps: ModalApps, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "modal", "run", "rl/modal_app.py::train", "--max-steps", "10"]
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False
    )
    told = done.stderr.decode()
    assert done.returncode == 2
    assert "error: --max-steps: 10 is not one of 1, 2" in told
    assert "Traceback" not in told + done.stdout.decode()
    assert "FunctionCreate" not in apps.created()
