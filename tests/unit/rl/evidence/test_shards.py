"""Held-out shards that other runs have evaluated, in a campaign that takes them in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.config import CampaignConfig
from rl.config_file import parse_config, replaced
from rl.errors import ConfigurationError
from rl.evidence.audit import audit
from rl.evidence.code_pin import CodePin
from rl.evidence.dataset.rows import Source
from rl.evidence.evaluation import summarize_evaluation
from rl.evidence.events import BEGIN, STOPPED, EventLog
from rl.evidence.frozen import EvaluationPlan, freeze, load_frozen
from rl.evidence.layout import CampaignDir, create
from rl.evidence.rows import Arms, GateResult, Gates
from rl.evidence.shards import shard_tasks, take_in
from rl.evidence.store import run_row
from rl.evidence.summary import load_evidence, read_json, summarize
from rl.evidence.traces import TraceWriter
from rl.files import sha256_file, write_json
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.test_audit import edit_json, edit_trace

ATTEMPTS = 4


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    """A campaign that is trained and not evaluated."""
    directory = synthetic.build(tmp_path / "campaigns")
    whole = synthetic.campaign_config()
    assert load_frozen(directory).evaluation.attempts == ATTEMPTS
    assert whole.heldout_tasks == 6
    directory.trace("heldout").unlink()
    rows = [line for line in directory.events.read_text().splitlines() if '"heldout' not in line]
    kept = [line for line in rows if "base-" not in line and "step6-" not in line]
    directory.events.write_text("\n".join(kept) + "\n")
    for path in (directory.summary, directory.audit):
        path.unlink()
    return directory


def shard(
    campaign: CampaignDir,
    number: int,
    shards: int = 2,
    *,
    name: str = "",
    config: CampaignConfig | None = None,
    code: CodePin | None = None,
    plan: EvaluationPlan | None = None,
    reward: float = 1.0,
) -> CampaignDir:
    """A finished evaluation of one shard."""
    frozen = load_frozen(campaign)
    directory = create(name or f"shard{number}", campaign.root.parent.parent / "heldout")
    config = config or narrowed(frozen.config)
    plan = plan or frozen.evaluation.model_copy(update={"shards": 1})
    tasks = shard_tasks(frozen.heldout, number, shards)
    freeze(
        directory, config, train=frozen.train, heldout=tasks, model=frozen.model,
        code=code or frozen.code, kind="heldout", plan=plan, source=frozen.run_id,
        now=synthetic.START,
    )  # fmt: skip
    gates = [
        GateResult(task_name=t.name, digest=t.digest, passed=True, oracle_reward=1.0,
                   nothing_reward=0.0)
        for t in tasks
    ]  # fmt: skip
    directory.write_gates(Gates(gates=gates))
    arms = read_json(campaign.arms, Arms)
    assert arms is not None
    kept = directory.root / "adapters" / "step6"
    shutil.copytree(campaign.root / str(arms.final.directory), kept)
    final = arms.final.model_copy(update={"directory": "adapters/step6"})
    directory.write_arms(Arms(arms=[arms.arms[0], final]))
    events = EventLog(directory.events, clock=lambda: synthetic.START)
    events.append(BEGIN, incarnation=0, frozen=sha256_file(directory.frozen))
    directory.lifecycle.touch()
    synthetic.prove(events, config)
    TraceWriter(directory.failed_trace).close()
    with TraceWriter(directory.trace("heldout")) as trace:
        for pin in arms.arms:
            for task in tasks:
                for attempt in range(ATTEMPTS):
                    group = f"heldout-{pin.arm}-{task.name}"
                    record = synthetic.episode(
                        f"{group}-k{attempt}", group, task, pin.version, stage="heldout",
                        arm=pin.arm, reward=reward, adapter_sha256=pin.adapter_sha256,
                    )  # fmt: skip
                    synthetic.dispatch(record, events)
                    synthetic.write(trace, record, events)
    events.append(STOPPED, problems=[], left=[])
    events.stage("done")
    write_json(directory.audit, audit(directory))
    write_json(directory.summary, summarize_evaluation(directory))
    assert audit(directory).findings == []
    return directory


def narrowed(config: dict[str, object], **changes: object) -> CampaignConfig:
    own = {"engine.replicas": 1, "heldout.shards": 1, "episodes.concurrency": 4}
    values = own | {key.replace("__", "."): value for key, value in changes.items()}
    return parse_config(replaced(config, values), "shard")


def taken(campaign: CampaignDir, *shards: CampaignDir) -> CampaignDir:
    events = EventLog(campaign.events)
    for one in shards:
        assert take_in(campaign, one, events)
    write_json(campaign.summary, summarize(load_evidence(campaign)))
    write_json(campaign.audit, audit(campaign))
    write_json(campaign.summary, summarize(load_evidence(campaign)))
    return campaign


def codes(campaign: CampaignDir) -> set[str]:
    return {finding.code for finding in audit(campaign).findings}


def test_shards_are_disjoint_and_nearly_even() -> None:
    tasks = synthetic.tasks("held", 23)
    parts = [shard_tasks(tasks, number, 2) for number in (1, 2)]
    assert [len(part) for part in parts] == [12, 11]
    assert sorted(t.name for part in parts for t in part) == sorted(t.name for t in tasks)


def test_a_campaign_with_all_its_shards_is_whole(campaign: CampaignDir) -> None:
    before = codes(campaign)
    assert before == {"heldout-count"}
    shards = [shard(campaign, 1), shard(campaign, 2)]
    whole = taken(campaign, *shards)
    result = audit(whole)
    assert result.findings == []
    assert result.checked["held-out episodes"] == 2 * 6 * 4
    assert result.checked["held-out shards"] == 2
    summary = summarize(load_evidence(whole))
    assert summary.evaluation.graded == 48 and summary.missing == []
    assert summary.heldout is not None and summary.heldout.base.attempts == 24
    for one in shards:  # unchanged, where it was and where it is
        assert audit(CampaignDir(whole.shards_folder / one.run_id)).findings == []
    assert run_row(whole.root).graded["heldout"] == 48
    exported = [record for _, record in Source.opened(whole).episodes(failed=True)]
    assert sum(record.stage == "heldout" for record in exported) == 48


def test_taking_in_twice_changes_nothing(campaign: CampaignDir) -> None:
    one = shard(campaign, 1)
    events = EventLog(campaign.events)
    assert take_in(campaign, one, events)
    content = campaign.events.read_bytes()
    assert not take_in(campaign, one, events)
    assert campaign.events.read_bytes() == content


def test_a_driver_that_died_before_it_told_of_a_shard_tells_later(campaign: CampaignDir) -> None:
    one = shard(campaign, 1)
    content = campaign.events.read_bytes()
    take_in(campaign, one, EventLog(campaign.events))
    campaign.events.write_bytes(content)  # the event was never written
    assert "shard-changed" in codes(campaign)
    take_in(campaign, one, EventLog(campaign.events))
    assert "shard-changed" not in codes(campaign)


def test_one_shard_leaves_the_others_tasks_missing(campaign: CampaignDir) -> None:
    found = audit(taken(campaign, shard(campaign, 1))).findings
    assert {finding.code for finding in found} == {"heldout-count"}
    assert len(found) == 2 * 3


def refused(campaign: CampaignDir, one: CampaignDir, told: str) -> None:
    before = sorted(campaign.root.rglob("*"))
    content = campaign.events.read_bytes()
    with pytest.raises(ConfigurationError, match=told) as error:
        take_in(campaign, one, EventLog(campaign.events))
    assert error.value.remedy
    assert sorted(campaign.root.rglob("*")) == before
    assert campaign.events.read_bytes() == content


def test_other_conditions_are_refused(campaign: CampaignDir) -> None:
    frozen = load_frozen(campaign)
    warm = narrowed(frozen.config, agent__temperature=0.2)
    refused(
        campaign,
        shard(campaign, 1, name="warm", config=warm),
        r"configuration agent\.temperature: 1\.0 -> 0\.2",
    )
    seeded = narrowed(frozen.config, seed=9)
    refused(campaign, shard(campaign, 1, name="seed", config=seeded), "configuration seed")
    code = frozen.code.model_copy(update={"commit": "2" * 40})
    refused(campaign, shard(campaign, 1, name="code", code=code), "code commit")
    plan = EvaluationPlan(attempts=ATTEMPTS, shards=1, retries=50)
    refused(campaign, shard(campaign, 1, name="plan", plan=plan), "retries of the evaluation")


def test_how_fast_it_goes_is_its_own(campaign: CampaignDir) -> None:
    frozen = load_frozen(campaign)
    own = narrowed(frozen.config, limits__stall_s=99.0, resources__replica_cpus=2.0)
    assert take_in(campaign, shard(campaign, 1, config=own), EventLog(campaign.events))


def test_other_weights_are_refused(campaign: CampaignDir) -> None:
    one = shard(campaign, 1)

    def swap(arms: dict[str, object]) -> None:
        arms["arms"][1]["adapter_sha256"] = "0" * 64  # type: ignore[index]

    edit_json(one.arms, swap)
    refused(campaign, one, "other weights")


def test_an_unfinished_or_unclean_shard_is_refused(campaign: CampaignDir) -> None:
    one = shard(campaign, 1)
    audited = one.audit.read_bytes()
    one.audit.unlink()
    refused(campaign, one, "is not finished")
    one.audit.write_bytes(audited)
    finding = {"code": "x", "where": "y", "message": "z"}
    edit_json(one.audit, lambda row: row["findings"].append(finding))
    refused(campaign, one, "has 1 findings")


def test_a_task_is_evaluated_by_one_shard_alone(campaign: CampaignDir) -> None:
    take_in(campaign, shard(campaign, 1), EventLog(campaign.events))
    refused(campaign, shard(campaign, 1, 3, name="thirds"), "was begun by shard1 as well")


def test_an_evaluation_of_something_else_is_refused(campaign: CampaignDir) -> None:
    one = shard(campaign, 1)
    edit_json(one.frozen, lambda row: row.update(source="another-run"))
    refused(campaign, one, "is a heldout of 'another-run'")


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (lambda s: edit_trace(s.trace("heldout"), lambda r: r[0].update(reward=0.0)),
         "edited-reward"),
        (lambda s: edit_trace(s.trace("heldout"), lambda r: r.pop()), "lost-record"),
        (lambda s: shutil.rmtree(s.root), "shard-lost"),
        (lambda s: edit_json(s.frozen, lambda r: r.update(source="x")), "shard-misfit"),
        (lambda s: s.frozen.write_text("{"), "damaged-shard"),
        (lambda s: s.trace("heldout").write_bytes(b"torn"), "damaged-shard"),
        (lambda s: (s.logs / "driver.log").write_text("more"), "shard-changed"),
    ],
)  # fmt: skip
def test_what_is_done_to_a_shard_is_found(
    campaign: CampaignDir, harm: Callable[[CampaignDir], object], code: str
) -> None:
    whole = taken(campaign, shard(campaign, 1), shard(campaign, 2))
    harm(whole.shards[0])
    assert code in codes(whole)


def test_a_shard_that_was_exchanged_for_a_better_one_is_found(campaign: CampaignDir) -> None:
    whole = taken(campaign, shard(campaign, 1, reward=0.0), shard(campaign, 2))
    better = shard(campaign, 1, name="better")
    shutil.rmtree(whole.shards[0].root)
    shutil.copytree(better.root, whole.shards_folder / "shard1")
    assert {"shard-changed"} <= codes(whole)


def test_a_shard_that_nobody_took_in_is_found(campaign: CampaignDir) -> None:
    whole = taken(campaign, shard(campaign, 1), shard(campaign, 2))
    shutil.copytree(whole.shards[0].root, whole.shards_folder / "more")
    assert {"shard-changed", "shard-overlap", "heldout-count"} <= codes(whole)
