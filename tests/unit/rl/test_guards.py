"""Guards of a launch, what a rehearsal proves, and what stands in at one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rl.config_file import load_config
from rl.errors import CampaignError, ConfigurationError
from rl.evidence.code_pin import CodePin
from rl.evidence.intents import new_intent
from rl.evidence.receipts import Ledger
from rl.evidence.rehearsals import FILE, DryRun, Rehearsal, WalkedStep, require_rehearsed
from rl.files import write_json
from rl.guards import Launch, launch_guards, receipt_guard, rehearsal_guard, rents, require, walk
from rl.prepare import prepare_tasks
from rl.receipts import main as receipts
from rl.rehearsal import prepare_stand_ins, stand_in
from tests.support.modal_rented import account, modal_of_our_own
from tests.support.modal_server import WORKSPACE

ROOT = Path(__file__).parents[3]
CODE = CodePin(commit="c" * 40, dirty=False, packages={})
COMMAND = "python -m rl.final --rehearse"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    config = load_config(ROOT / "configs/local.toml", {"tasks.train": 2, "tasks.heldout": 2})
    tasks = prepare_tasks(config.tasks, tmp_path)
    return Launch(config, "local.toml", tasks.train, tasks.heldout, tasks.root, CODE, tmp_path)


def refusals(launch: Launch) -> dict[str, CampaignError | None]:
    return {one.name: one.refusal for one in walk(launch_guards(launch))}


def rehearsed(config_digest: str, code: CodePin = CODE, **changes: object) -> Rehearsal:
    values = {
        "name": "local",
        "config_digest": config_digest,
        "code": code,
        "stood_in": [],
        "steps": [WalkedStep(name="audit", expected="clean", found="clean", passed=True)],
        "dry_runs": [DryRun(name="train", planned=8, graded=8)],
        "began_at": 1.0,
        "seconds": 2.0,
    }
    return Rehearsal.model_validate(values | changes)


def keep(root: Path, rehearsal: Rehearsal, name: str = "one") -> None:
    (root / name).mkdir(parents=True)
    write_json(root / name / FILE, rehearsal)


def test_everything_that_is_wrong_is_named_at_once(launch: Launch) -> None:
    wrong = replace(
        launch, heldout=[launch.train[0]], code=CodePin(commit=None, dirty=False, packages={})
    )
    found = refusals(wrong)
    refused = {name for name, refusal in found.items() if refusal is not None}
    assert refused == {"task sets are disjoint", "every task has passed its gate", "code revision"}
    with pytest.raises(ConfigurationError, match="3 guards refuse the launch") as all_of_them:
        require(launch_guards(wrong))
    for name in refused:
        refusal = found[name]
        assert refusal is not None and refusal.remedy
        assert refusal.what.splitlines()[0] in str(all_of_them.value)


def test_changes_to_the_code_are_told_and_not_refused(launch: Launch) -> None:
    changed = CodePin(commit="c" * 40, dirty=True, diff_sha256="d" * 64, packages={})
    walked = {one.name: one for one in walk(launch_guards(replace(launch, code=changed)))}
    assert walked["code revision"].refusal is None
    assert "with changes (sha256 dddddddddddd)" in walked["code revision"].found


def test_only_what_is_rented_needs_a_rehearsal() -> None:
    assert rents(load_config(ROOT / "configs/final.toml"))
    assert not rents(load_config(ROOT / "configs/local.toml"))


def test_a_launch_needs_a_rehearsal_of_its_very_configuration_and_code(launch: Launch) -> None:
    root, digest = launch.state / "rehearsals", launch.config.digest()
    guard = rehearsal_guard(launch)
    with pytest.raises(ConfigurationError, match="has not been rehearsed") as none:
        guard.check()
    assert "python -m rl.final --config local.toml --rehearse" in none.value.remedy
    keep(root, rehearsed("another"), "other")
    with pytest.raises(ConfigurationError, match="has not been rehearsed"):
        guard.check()
    keep(root, rehearsed(digest, CODE.model_copy(update={"commit": "e" * 40})), "older")
    with pytest.raises(ConfigurationError, match="with other code"):
        guard.check()
    (root / "broken").mkdir()  # broken off: there is no record in it
    keep(root, rehearsed(digest))
    assert "dry runs train" in guard.check()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dry_runs": [DryRun(name="train", planned=8, graded=7)]}, "train: 7 of 8"),
        (
            {"steps": [WalkedStep(name="audit", expected="clean", found="dirt", passed=False)]},
            "audit: dirt",
        ),
    ],
)
def test_a_rehearsal_that_failed_is_none(tmp_path: Path, changes, problem: str) -> None:
    keep(tmp_path, rehearsed("digest", **changes))
    with pytest.raises(ConfigurationError, match=problem):
        require_rehearsed(tmp_path, "digest", CODE, COMMAND)
    keep(tmp_path, rehearsed("digest", began_at=2.0), "later")
    assert require_rehearsed(tmp_path, "digest", CODE, COMMAND).began_at == 2.0


def test_a_run_id_is_launched_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    guard = receipt_guard(ledger, "run")
    guard.check()
    with ledger.claim(new_intent("run", "run.a1", "modal", "workspace", "train")) as intent:
        pass
    with pytest.raises(CampaignError, match="may or may not run it"):
        guard.check()
    ledger.record(intent, {"call": "fc-1"})
    with pytest.raises(ConfigurationError, match=r"was submitted before \(run.a1\)") as refused:
        guard.check()
    assert "--resume run" in refused.value.remedy


@pytest.mark.parametrize("name", ["final", "smoke", "local"])
def test_what_stands_in_is_all_that_differs(name: str, tmp_path: Path) -> None:
    config = load_config(ROOT / f"configs/{name}.toml")
    before, after = config.model_dump(), stand_in(config, tmp_path).model_dump()
    differing = _differing(before, after)
    assert differing <= {
        "name",
        "model.source",
        "model.name",
        "model.path",
        "model.revision",
        "model.sha256",
        "model.renderer",
        "model.dtype",
        "engine.kind",
        "engine.device",
        "engine.extra_args",
        "engine.scripted",
        "trainer.backend",
        "trainer.prime",
        "trainer.device",
        "trainer.gradient_checkpointing",
        "sandbox.provider",
        "modal",
    }
    assert after["sandbox"]["provider"] == "bubblewrap"
    assert after["engine"]["kind"] == "scripted"
    assert after["trainer"]["device"] == "cpu"


def _differing(before: dict, after: dict) -> set[str]:
    found = set()
    for table, value in before.items():
        if isinstance(value, dict) and isinstance(after[table], dict):
            found |= {f"{table}.{key}" for key in value if value[key] != after[table][key]}
        elif value != after[table]:
            found.add(table)
    return found


@pytest.mark.parametrize(
    ("call_format", "opening"), [("fenced", "```bash\n"), ("tool", "<tool_call>")]
)
def test_the_stand_in_knows_every_packages_own_solution(
    launch: Launch, tmp_path: Path, call_format: str, opening: str
) -> None:
    agent = launch.config.agent.model_copy(update={"call_format": call_format, "examples": ()})
    config = launch.config.model_copy(update={"agent": agent})
    tasks = [*launch.train, *launch.heldout]
    prepare_stand_ins(config, tasks, launch.task_root, tmp_path / "stand-in")
    replies = json.loads((tmp_path / "stand-in/replies.json").read_text())
    assert set(replies) == {task.instruction for task in tasks}
    for task in tasks:
        reply = replies[task.instruction]
        script = (launch.task_root / task.path / "solution/solve.sh").read_text().rstrip()
        assert reply.startswith(opening)
        inner = reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        told = json.loads(inner)["arguments"]["command"] if call_format == "tool" else reply
        assert script in told
    assert (tmp_path / "stand-in/model/model.safetensors").is_file()


def test_receipts_are_listed_and_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state", str(tmp_path)]
    assert receipts([*state, "ls"]) == 0
    assert "nothing was submitted" in capsys.readouterr().out
    ledger = Ledger(tmp_path / "receipts")
    tags = {"app": "rl-run.a1", "claims": "rl-claims"}
    intent = new_intent("run", "run.a1", "modal", f"{WORKSPACE}/main", "train", tags=tags)
    with ledger.claim(intent):
        pass
    with modal_of_our_own() as server:
        account(server)
        assert receipts([*state, "inspect", "run"]) == 0
    shown = capsys.readouterr().out
    assert "run.a1: ambiguous" in shown
    assert "no app rl-run.a1; so nothing was called: --finding absent" in shown
    assert "python -m rl.receipts resolve run run.a1 --finding absent" in shown
    with pytest.raises(ConfigurationError, match="nothing was submitted as 'other'"):
        receipts([*state, "inspect", "other"])
    with pytest.raises(ConfigurationError, match="not of the form NAME=ID"):
        receipts(
            [
                *state,
                "resolve",
                "run",
                "run.a1",
                "--finding",
                "present",
                "--call",
                "x",
                "--because",
                "y",
            ]
        )
    resolve = [*state, "resolve", "run", "run.a1", "--finding", "present", "--call", "call=fc-1"]
    assert receipts([*resolve, "--because", "modal app list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["standing"] == "submitted" and row["calls"] == {"call": "fc-1"}
    assert row["reason"] == "modal app list"
