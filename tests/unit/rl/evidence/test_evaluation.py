"""Evaluations: their numbers, their telemetry, and planted corruptions of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.errors import EvidenceError
from rl.evidence.audit import audit
from rl.evidence.evaluation import evaluation_lines, summarize_evaluation
from rl.evidence.events import STOPPED, EventLog
from rl.evidence.layout import CampaignDir
from rl.evidence.summary import load_evidence
from rl.evidence.telemetry import same_tokens, spread, telemetry, telemetry_lines
from tests.unit.rl.evidence.evaluations import build_heldout, build_screen
from tests.unit.rl.evidence.synthetic import episode, task
from tests.unit.rl.evidence.test_audit import edit_json, edit_lines, edit_trace


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CampaignDir:
    return build_heldout(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture
def evaluation(clean: CampaignDir, tmp_path: Path) -> CampaignDir:
    return CampaignDir(shutil.copytree(clean.root, tmp_path / clean.run_id))


def test_a_clean_evaluation_has_no_findings(evaluation: CampaignDir) -> None:
    result = audit(evaluation)
    assert result.findings == []
    assert result.checked["held-out episodes"] == 2 * (6 * 4 + 1)
    assert result.checked["arms"] == 2


def test_its_summary_has_every_arm_task_and_comparison(evaluation: CampaignDir) -> None:
    summary = summarize_evaluation(evaluation)
    assert summary.kind == "heldout"
    assert summary.attempts_planned == 48
    assert summary.outcomes == {"graded": 48, "masked": 2}
    assert [(arm.arm, arm.solved, arm.attempts, arm.masked) for arm in summary.arms] == [
        ("base", 12, 24, 1),
        ("step6", 12, 24, 1),
    ]
    (comparison,) = summary.comparisons
    assert comparison.difference == 0.0
    assert not comparison.significant
    assert [row.solved for row in summary.tasks["base"]] == [4, 0, 2, 2, 3, 1]  # by name
    assert summary.telemetry.prefix_hit_rate == 0.25
    lines = "\n".join(evaluation_lines(summary))
    assert "48 graded of 48 planned" in lines
    assert "not significant" in lines


def test_a_screen_has_no_report_of_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="is a screen, and no campaign"):
        load_evidence(build_screen(tmp_path))


def test_a_screen_is_audited_by_the_same_command(tmp_path: Path) -> None:
    directory = build_screen(tmp_path)
    assert audit(directory).findings == []
    edit_trace(directory.trace("heldout"), lambda rows: rows.pop())
    assert "heldout-count" in {finding.code for finding in audit(directory).findings}


Rows = list[dict[str, Any]]


def drop_proof(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        rows.remove(next(row for row in rows if row["kind"] == "proven"))

    edit_lines(c.events, change)


def late_proof(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        proof = next(row for row in rows if row["kind"] == "proven")
        rows.remove(proof)
        rows.append(proof)

    edit_lines(c.events, change)


def half_a_proof(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["kind"] == "proven")["fields"]["replicas"].pop()

    edit_lines(c.events, change)


def left_behind(c: CampaignDir) -> None:
    EventLog(c.events).append(STOPPED, problems=[], left=["process 7 of replica 0"])


def rates(c: CampaignDir) -> None:
    edit_json(c.summary, lambda summary: summary["tasks"]["base"][1].update(solved=4))


def other_weights(c: CampaignDir) -> None:
    (c.root / "adapters" / "step6" / "adapter_model.safetensors").write_bytes(b"other")


def trained_task(c: CampaignDir) -> None:
    def change(frozen: Any) -> None:
        frozen["train"][0]["digest"] = frozen["heldout"][2]["digest"]

    edit_json(c.frozen, change)


def copied_instruction(c: CampaignDir) -> None:
    def change(frozen: Any) -> None:
        frozen["train"][0]["instruction"] = frozen["heldout"][2]["instruction"].upper()

    edit_json(c.frozen, change)


def more_attempts(c: CampaignDir) -> None:
    edit_json(c.frozen, lambda frozen: frozen["plan"].update(attempts=5))


@pytest.mark.parametrize(
    ("code", "corrupt"),
    [
        ("unproven-worker", drop_proof),
        ("unproven-worker", late_proof),
        ("unproven-worker", half_a_proof),
        ("process-left", left_behind),
        ("summary-differs", rates),
        ("adapter-swapped", other_weights),
        ("leaked-task", trained_task),
        ("near-duplicate", copied_instruction),
        ("heldout-count", more_attempts),
    ],
)
def test_a_planted_corruption_is_found(
    evaluation: CampaignDir, code: str, corrupt: Callable[[CampaignDir], None]
) -> None:
    corrupt(evaluation)
    assert code in {finding.code for finding in audit(evaluation).findings}


def test_percentiles_are_numpys() -> None:
    values = [0.3, 5.0, 1.0, 2.0, 0.1, 9.0, 4.0]
    found = spread(values)
    for share, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(np.percentile(values, share))
    assert (found.count, found.largest) == (7, 9.0)


def test_telemetry_counts_turns_tokens_and_exits() -> None:
    ref = task("held", 0)
    records = [episode("a", "g", ref, 0), episode("b", "g", ref, 0, reward=0.0)]
    found = telemetry(records)
    assert (found.episodes, found.turns, found.sampled_tokens) == (2, 2, 28)
    assert found.prompt_tokens == 340
    assert found.exit_codes == {"0": 1, "127": 1}
    assert found.stop_reasons == {"completed": 2}
    assert found.tokens_per_s == pytest.approx(14 / 1.8)
    assert found.prefix_hit_rate is None
    assert found.spans["generate"].p50 == pytest.approx(1.8)
    assert any(line.startswith("exit codes") for line in telemetry_lines(found))


def test_same_tokens_are_told_by_attempt() -> None:
    ref = task("held", 0)
    before = [episode("a", "g", ref, 0), episode("b", "g", ref, 0), episode("c", "g", ref, 0)]
    sample = before[0].samples[0].model_copy(update={"token_ids": [1, 2, 4]})
    after = [before[0], before[1].model_copy(update={"samples": [sample]})]
    assert same_tokens(before, after) == (1, 2)


def test_the_summary_on_disk_is_plain_json(evaluation: CampaignDir) -> None:
    assert json.loads(evaluation.summary.read_text())["kind"] == "heldout"
