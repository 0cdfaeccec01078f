"""Evaluations during training: what the audit holds against them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.evidence.audit import audit
from rl.evidence.events import EVAL_OVER, EventLog
from rl.evidence.layout import CampaignDir
from rl.evidence.report import render
from rl.evidence.rows import eval_arm
from rl.evidence.summary import load_evidence, summarize
from rl.evidence.traces import TraceWriter
from rl.files import write_json
from tests.unit.rl.evidence.synthetic import build, campaign_config, dispatch, episode, write
from tests.unit.rl.evidence.test_audit import edit_lines, edit_trace

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CampaignDir:
    """A campaign whose versions 2 and 4 were evaluated, on two tasks with two attempts."""
    whole = campaign_config()
    config = whole.model_validate(
        whole.model_dump(mode="json")
        | {
            "engine": whole.engine.model_dump(mode="json") | {"max_loras": 3},
            "eval": {"interval": 2, "attempts": 2, "tasks": 2},
        }
    )
    directory = build(tmp_path_factory.mktemp("evals"), config=config)
    weights = {row.update: row.adapter_sha256 for row in directory.update_rows().read()}
    events = EventLog(directory.events)
    tasks = load_evidence(directory).frozen.heldout[:2]
    with TraceWriter(directory.trace("eval")) as trace:
        for version in config.eval_versions:
            for cell in range(4):
                task = tasks[cell % 2]
                record = episode(
                    f"eval{version:04d}.0-c{cell:03d}-0", f"{eval_arm(version)}-{task.name}",
                    task, version, stage="eval", arm=eval_arm(version),
                    adapter_sha256=weights[version], reward=float(version > 2),
                )  # fmt: skip
                dispatch(record, events)
                write(trace, record, events)
            events.append(EVAL_OVER, version=version, graded=4, cells=4, reason="")
    write_json(directory.audit, audit(directory))
    write_json(directory.summary, summarize(load_evidence(directory)))
    return directory


@pytest.fixture
def campaign(clean: CampaignDir, tmp_path: Path) -> CampaignDir:
    return CampaignDir(shutil.copytree(clean.root, tmp_path / clean.run_id))


def test_a_clean_campaign_with_evaluations_has_no_findings(campaign: CampaignDir) -> None:
    result = audit(campaign)
    assert result.findings == []
    assert result.checked["evaluation episodes"] == 8
    rates = [(arm.version, arm.pass_rate) for arm in summarize(load_evidence(campaign)).evals]
    assert rates == [(2, 0.0), (4, 1.0)]


def test_the_report_shows_the_curve(campaign: CampaignDir) -> None:
    evidence = load_evidence(campaign)
    page = render(evidence, summarize(evidence))
    assert "Held-out pass rate on the way" in page
    assert "version 4: 4 of 4 solved, 100%" in page


def on_eval(index: int, **fields: Any) -> Callable[[CampaignDir], None]:
    return lambda c: edit_trace(c.trace("eval"), lambda rows: rows[index].update(fields))


def one_missing(c: CampaignDir) -> None:
    edit_trace(c.trace("eval"), lambda rows: rows.pop())


def end_untold(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        rows.remove(next(row for row in rows if row["kind"] == "eval_over"))

    edit_lines(c.events, change)


def one_too_many(c: CampaignDir) -> None:
    edit_trace(c.trace("eval"), lambda rows: rows.append({**rows[0], "attempt_id": "more"}))


def trained_on(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        rows[0]["groups"][0]["attempt_ids"][0] = "eval0002.0-c000-0"

    edit_lines(c.updates, change)


@pytest.mark.parametrize(
    ("code", "corrupt", "where"),
    [
        ("eval-count", one_missing, "arm update4"),
        ("eval-count", end_untold, "arm update2"),
        ("eval-count", one_too_many, "arm update2 task"),
        ("unexpected-eval", on_eval(0, version=3), "attempt eval0002.0-c000-0"),
        ("unexpected-eval", on_eval(0, arm="update4"), "attempt eval0002.0-c000-0"),
        ("arm-adapter", on_eval(0, adapter_sha256="0" * 64), "attempt eval0002.0-c000-0"),
        ("unknown-task", on_eval(0, task_name="move-held-05"), "attempt eval0002.0-c000-0"),
        ("edited-reward", on_eval(0, reward=1.0), "attempt eval0002.0-c000-0"),
        ("missing-attempt", trained_on, "attempt eval0002.0-c000-0 of update 1"),
    ],
)
def test_a_planted_corruption_is_found(
    campaign: CampaignDir, code: str, corrupt: Callable[[CampaignDir], None], where: str
) -> None:
    corrupt(campaign)
    findings = audit(campaign).findings
    assert any(f.code == code and where in f.where for f in findings), findings


def test_a_short_evaluation_that_says_why_is_no_finding(campaign: CampaignDir) -> None:
    one_missing(campaign)

    def change(rows: Rows) -> None:
        row = next(r for r in rows if r["kind"] == "eval_over" and r["fields"]["version"] == 4)
        row["fields"].update(graded=3, reason="infrastructure failed too often")
        told = "eval0004.0-c003-0"
        rows[:] = [r for r in rows if r["fields"].get("attempt_id") != told]

    edit_lines(campaign.events, change)
    write_json(campaign.summary, summarize(load_evidence(campaign)))
    assert audit(campaign).findings == []


def test_evaluations_of_weights_that_were_made_again_count_for_nothing(
    campaign: CampaignDir,
) -> None:
    gone = "f" * 64
    edit_trace(
        campaign.trace("eval"),
        lambda rows: rows.append({**rows[0], "attempt_id": "old", "adapter_sha256": gone}),
    )
    codes = {finding.code for finding in audit(campaign).findings}
    assert "arm-adapter" in codes
    campaign.superseded.write_text(f'{{"update": 2, "adapter_sha256": "{gone}"}}\n')
    codes = {finding.code for finding in audit(campaign).findings}
    assert codes == {"untold-record", "undispatched-attempt"}
