"""Each planted corruption of an otherwise clean campaign is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from rl import audit as command
from rl.evidence.audit import audit
from rl.evidence.events import DISPATCH, EventLog
from rl.evidence.frozen import config_digest
from rl.evidence.layout import CampaignDir, open_path
from rl.evidence.traces import read_frames
from tests.unit.rl.evidence.synthetic import build, masked, task

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CampaignDir:
    return build(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def campaign(clean: CampaignDir, tmp_path: Path) -> CampaignDir:
    return CampaignDir(shutil.copytree(clean.root, tmp_path / clean.run_id))


def edit_trace(path: Path, change: Callable[[Rows], object]) -> None:
    rows = [json.loads(frame.data) for frame in read_frames(path)]
    change(rows)
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    # As the records are written, so that a row that is not edited stays the same to the byte.
    lines = [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows]
    path.write_bytes(b"".join(compressor.compress(f"{line}\n".encode()) for line in lines))


def edit_lines(path: Path, change: Callable[[Rows], object]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def found(campaign: CampaignDir) -> dict[str, str]:
    return {finding.code: finding.where for finding in audit(campaign).findings}


def test_a_clean_campaign_has_no_findings(campaign: CampaignDir) -> None:
    result = audit(campaign)
    assert result.findings == []
    assert result.checked["training episodes"] == 72
    assert result.checked["held-out episodes"] == 48


def on_train(index: int, **fields: Any) -> Callable[[CampaignDir], None]:
    return lambda c: edit_trace(c.trace("train"), lambda rows: rows[index].update(fields))


def on_heldout(index: int, **fields: Any) -> Callable[[CampaignDir], None]:
    return lambda c: edit_trace(c.trace("heldout"), lambda rows: rows[index].update(fields))


def duplicate(c: CampaignDir) -> None:
    edit_trace(c.trace("train"), lambda rows: rows.append(rows[0]))


def missing_heldout(c: CampaignDir) -> None:
    edit_trace(c.trace("heldout"), lambda rows: rows.pop(0))


def extra_heldout(c: CampaignDir) -> None:
    edit_trace(c.trace("heldout"), lambda rows: rows.append({**rows[0], "attempt_id": "extra"}))


def missing_trained(c: CampaignDir) -> None:
    edit_trace(c.trace("train"), lambda rows: rows.pop(0))


def masked_with_reward(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["outcome"] == "masked")["reward"] = 0.0

    edit_trace(c.failed_trace, change)


def masked_counted(c: CampaignDir) -> None:
    failed = masked("x", "x", task("held", 0), 0).model_dump(mode="json")["failure"]
    edit_trace(
        c.trace("heldout"),
        lambda rows: rows[0].update(outcome="masked", reward=None, failure=failed),
    )


def leaked(c: CampaignDir) -> None:
    def change(frozen: Any) -> None:
        frozen["heldout"][0]["digest"] = frozen["train"][0]["digest"]

    edit_json(c.frozen, change)


def config_edited(c: CampaignDir) -> None:
    edit_json(c.frozen, lambda frozen: frozen["config"]["trainer"]["optimizer"].update(lr=1.0))


def bound_tightened(c: CampaignDir) -> None:
    def change(frozen: Any) -> None:
        frozen["config"]["schedule"]["max_staleness"] = 0
        frozen["config_digest"] = config_digest(frozen["config"])

    edit_json(c.frozen, change)


def config_broken(c: CampaignDir) -> None:
    edit_json(c.frozen, lambda frozen: frozen["config"].update(unknown=1))


def trained_twice(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        rows[1]["groups"][1] = rows[0]["groups"][0]

    edit_lines(c.updates, change)


def attempt_left_out(c: CampaignDir) -> None:
    edit_lines(c.updates, lambda rows: rows[0]["groups"][0]["attempt_ids"].pop())


def group_left_out(c: CampaignDir) -> None:
    edit_lines(c.updates, lambda rows: rows[0]["groups"].pop())


def group_version(c: CampaignDir) -> None:
    edit_lines(c.updates, lambda rows: rows[5]["groups"][0].update(version=4))


def update_gone(c: CampaignDir) -> None:
    edit_lines(c.updates, lambda rows: rows.pop(2))


def update_added(c: CampaignDir) -> None:
    edit_lines(c.metrics, lambda rows: rows.append({**rows[-1], "update": 7}))


def reward_of_metrics(c: CampaignDir) -> None:
    edit_lines(c.metrics, lambda rows: rows[0].update(reward_mean=0.99))


def masked_trained(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        group = rows[1]["groups"][0]
        group["attempt_ids"].append(f"{group['group_id']}-a3")

    edit_lines(c.updates, change)


def adapter_file(c: CampaignDir) -> None:
    (c.checkpoints / "adapter-6" / "adapter_model.safetensors").write_bytes(b"other weights")


def adapter_gone(c: CampaignDir) -> None:
    (c.checkpoints / "adapter-6" / "adapter_model.safetensors").unlink()
    (c.checkpoints / "adapter-6").rmdir()


def adapter_digest(c: CampaignDir) -> None:
    edit_json(c.arms, lambda arms: arms["arms"][1].update(adapter_sha256="0" * 64))


def older_arm(c: CampaignDir) -> None:
    edit_json(c.arms, lambda arms: arms["arms"][1].update(version=5))


def arms_gone(c: CampaignDir) -> None:
    c.arms.unlink()


def foreign_adapter(c: CampaignDir) -> None:
    edit_trace(c.trace("heldout"), lambda rows: rows[-1].update(adapter_sha256="0" * 64))


def adapter_of_base(c: CampaignDir) -> None:
    edit_json(c.arms, lambda arms: arms["arms"][0].update(adapter_sha256="0" * 64))


def edit_gate(**fields: Any) -> Callable[[CampaignDir], None]:
    return lambda c: edit_json(c.gates, lambda gates: gates["gates"][0].update(fields))


def gates_gone(c: CampaignDir) -> None:
    c.gates.unlink()


def gates_torn(c: CampaignDir) -> None:
    c.gates.write_bytes(c.gates.read_bytes()[:-9])


def folder_instead_of(name: str) -> Callable[[CampaignDir], None]:
    def corrupt(c: CampaignDir) -> None:
        path = c.root / name
        path.unlink()
        path.mkdir()

    return corrupt


def overflowing_rewards(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        for row in rows[:12]:
            row["reward"] = 1.7e308

    edit_trace(c.trace("train"), change)


def torn(c: CampaignDir) -> None:
    c.trace("train").write_bytes(c.trace("train").read_bytes()[:-9])


def flipped_byte(c: CampaignDir) -> None:
    data = bytearray(c.trace("heldout").read_bytes())
    data[120] ^= 0xFF
    c.trace("heldout").write_bytes(data)


def torn_metrics(c: CampaignDir) -> None:
    c.metrics.write_text(c.metrics.read_text()[:-5])


def lost(c: CampaignDir) -> None:
    EventLog(c.events).append(DISPATCH, attempt_id="never-seen")


def heldout_reward(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["reward"] == 0.0)["reward"] = 1.0

    edit_trace(c.trace("heldout"), change)


def summary_edited(c: CampaignDir) -> None:
    edit_json(c.summary, lambda summary: summary["evaluation"].update(graded=47, masked=1))


def drop_events(kind: str) -> Callable[[CampaignDir], None]:
    def change(rows: Rows) -> None:
        rows[:] = [row for row in rows if row["kind"] != kind]

    return lambda c: edit_lines(c.events, change)


def double_events(kind: str) -> Callable[[CampaignDir], None]:
    return lambda c: edit_lines(
        c.events, lambda rows: rows.extend([row for row in rows if row["kind"] == kind])
    )


def on_dispatch(**fields: Any) -> Callable[[CampaignDir], None]:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["kind"] == "dispatch")["fields"].update(fields)

    return lambda c: edit_lines(c.events, change)


def not_done(c: CampaignDir) -> None:
    def change(rows: Rows) -> None:
        rows[:] = [row for row in rows if row["fields"].get("stage") != "done"]

    edit_lines(c.events, change)


def other_instruction(c: CampaignDir) -> None:
    edit_json(c.frozen, lambda frozen: frozen["train"][1].update(instruction="Do nothing."))


def headline(c: CampaignDir) -> None:
    edit_json(c.summary, lambda summary: summary.update(headline="The model improved."))


def gone(name: str) -> Callable[[CampaignDir], None]:
    return lambda c: (c.root / name).unlink()


def metric(**fields: Any) -> Callable[[CampaignDir], None]:
    return lambda c: edit_lines(c.metrics, lambda rows: rows[0].update(fields))


CORRUPTIONS: list[tuple[str, Callable[[CampaignDir], None], str]] = [
    ("duplicate-attempt", duplicate, "attempt g00000.0-a0"),
    ("heldout-count", missing_heldout, "arm base task mkdir-held-00"),
    ("lost-attempt", missing_heldout, "attempt base-mkdir-held-00-a0"),
    ("heldout-count", extra_heldout, "arm base task mkdir-held-00"),
    ("heldout-count", masked_counted, "arm base task mkdir-held-00"),
    ("missing-attempt", missing_trained, "attempt g00000.0-a0 of update 1"),
    ("masked-reward", masked_with_reward, "attempt g00003.0-a3"),
    ("leaked-task", leaked, "held-out task mkdir-held-00"),
    ("config-digest", config_edited, "frozen.json config"),
    ("config-unreadable", config_broken, "frozen.json"),
    ("stale-episode", bound_tightened, "of update"),
    ("stale-episode", on_train(-1, version=6), "attempt g00017.0-a3 of update 6"),
    ("mixed-versions", on_train(-2, version=4), "attempt g00017.0-a2 of update 6"),
    ("mixed-versions", group_version, "of update 6"),
    ("trained-twice", trained_twice, "attempt g00000.0-a3"),
    ("omitted-attempt", attempt_left_out, "attempt g00000.0-a3"),
    ("group-size", attempt_left_out, "group g00000.0 of update 1"),
    ("batch-size", group_left_out, "update 1"),
    ("trained-ungraded", masked_trained, "attempt g00003.0-a3 of update 2"),
    ("wrong-group", on_train(0, group_id="other"), "attempt g00000.0-a0 of update 1"),
    ("missing-update", update_gone, "updates.jsonl update 3"),
    ("unexpected-update", update_added, "metrics.jsonl update 7"),
    ("metrics-differ", reward_of_metrics, "metrics.jsonl update 1"),
    ("metrics-differ", on_train(0, reward=0.5), "metrics.jsonl update 1"),
    ("mixed-tasks", on_train(1, task_name="touch-train-01"), "group g00000.0 of update 1"),
    ("unknown-task", on_train(0, task_digest="0" * 64), "attempt g00000.0-a0"),
    ("unknown-task", on_heldout(0, task_name="mkdir-train-00"), "attempt base-mkdir-held-00-a0"),
    ("no-verifier-log", on_heldout(3, verifier_log=" "), "attempt base-mkdir-held-00-a3"),
    (
        "infrastructure-scored",
        on_heldout(3, stop_reason="infrastructure"),
        "attempt base-mkdir-held-00-a3",
    ),
    ("unknown-arm", on_heldout(0, arm="step3"), "attempt base-mkdir-held-00-a0"),
    ("arm-version", on_heldout(0, version=6), "attempt base-mkdir-held-00-a0"),
    ("arm-version", older_arm, "arm step6"),
    ("adapter-swapped", adapter_file, "arm step6 file checkpoints/adapter-6/adapter_model"),
    ("adapter-swapped", adapter_digest, "arm step6"),
    ("adapter-missing", adapter_gone, "arm step6"),
    ("missing-arms", arms_gone, "arms.json"),
    ("torn-trace", torn, "train.jsonl.zst at byte"),
    ("damaged-trace", flipped_byte, "heldout.jsonl.zst at byte 0"),
    ("damaged-metrics", torn_metrics, "metrics.jsonl:6"),
    ("lost-attempt", lost, "attempt never-seen"),
    ("arm-adapter", foreign_adapter, "attempt step6-move-held-05-a3"),
    ("arm-adapter", on_heldout(-1, adapter_sha256=None), "attempt step6-move-held-05-a3"),
    ("arm-adapter", on_heldout(0, adapter_sha256="0" * 64), "attempt base-mkdir-held-00-a0"),
    ("arm-adapter", adapter_of_base, "arm base"),
    ("ungated-task", edit_gate(digest="0" * 64), "task mkdir-train-00"),
    ("failed-gate", edit_gate(passed=False), "task mkdir-train-00"),
    ("failed-gate", edit_gate(oracle_reward=0.5), "task mkdir-train-00"),
    ("failed-gate", edit_gate(nothing_reward=1.0), "task mkdir-train-00"),
    ("failed-gate", edit_gate(nothing_reward=None), "task mkdir-train-00"),
    ("missing-gates", gates_gone, "gates.json"),
    ("damaged-gates", gates_torn, "gates.json"),
    ("damaged-gates", folder_instead_of("gates.json"), "gates.json"),
    ("damaged-events", folder_instead_of("events.jsonl"), "events.jsonl"),
    ("damaged-arms", folder_instead_of("arms.json"), "arms.json"),
    ("damaged-metrics", folder_instead_of("metrics.jsonl"), "metrics.jsonl"),
    ("damaged-updates", folder_instead_of("updates.jsonl"), "updates.jsonl"),
    ("damaged-trace", folder_instead_of("traces/train.jsonl.zst"), "train.jsonl.zst"),
    ("damaged-trace", folder_instead_of("traces/heldout.jsonl.zst"), "heldout.jsonl.zst"),
    ("summary-unreadable", folder_instead_of("summary.json"), "summary.json"),
    ("metrics-differ", overflowing_rewards, "metrics.jsonl update 1"),
    ("undispatched-attempt", drop_events("dispatch"), "attempt g00000.0-a0"),
    ("dispatched-twice", double_events("dispatch"), "attempt g00000.0-a0"),
    ("ended-twice", double_events("ended"), "attempt g00000.0-a0"),
    ("dispatch-differs", on_dispatch(version=3), "attempt g00000.0-a0"),
    ("dispatch-differs", on_dispatch(digest="0" * 64), "attempt g00000.0-a0"),
    ("missing-event", drop_events("begin"), "events.jsonl"),
    ("missing-event", drop_events("stopped"), "events.jsonl"),
    ("unfinished", not_done, "events.jsonl"),
    ("changed-file", other_instruction, "frozen.json"),
    ("changed-file", edit_gate(task_name="other"), "gates.json"),
    ("changed-file", arms_gone, "arms.json"),
    ("missing-file", gone("lifecycle.jsonl"), "lifecycle.jsonl"),
    ("missing-file", gone("traces/failed.jsonl.zst"), "traces/failed.jsonl.zst"),
    ("summary-differs", headline, "summary.json headline"),
    ("metrics-differ", metric(reward_std=9.0), "metrics.jsonl update 1"),
    ("metrics-differ", metric(zero_variance_groups=7), "metrics.jsonl update 1"),
    ("edited-reward", heldout_reward, "attempt base-mkdir-held-00-a0"),
    ("edited-reward", on_train(5, reward=0.25), "attempt g00001.0-a1"),
    ("edited-record", on_train(5, verifier_log="[reward 1]"), "attempt g00001.0-a1"),
    ("lost-record", missing_trained, "attempt g00000.0-a0"),
    ("untold-record", extra_heldout, "attempt extra"),
    ("misplaced-record", masked_counted, "attempt base-mkdir-held-00-a0"),
    ("summary-differs", summary_edited, "summary.json"),
    ("invalid-record", on_train(0, surprise=1), "attempt g00000.0-a0"),
]


@pytest.mark.parametrize(
    ("code", "corrupt", "where"),
    CORRUPTIONS,
    ids=[f"{index}-{row[0]}" for index, row in enumerate(CORRUPTIONS)],
)
def test_a_planted_corruption_is_found_and_named(
    campaign: CampaignDir, code: str, corrupt: Callable[[CampaignDir], None], where: str
) -> None:
    corrupt(campaign)
    findings = audit(campaign).findings
    named = [finding for finding in findings if finding.code == code]
    assert any(where in finding.where for finding in named), findings


def test_an_unfinished_campaign_is_not_vouched_for(tmp_path: Path) -> None:
    assert {"missing-update", "missing-arms"} <= found(build(tmp_path, finish=False)).keys()


def test_the_command_needs_only_the_directory(
    campaign: CampaignDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = campaign.root.rename(tmp_path / "elsewhere")
    assert command.main([str(moved)]) == 0
    assert "no findings; checked 72 training episodes" in capsys.readouterr().out
    duplicate(open_path(moved))
    assert command.main([str(moved), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "duplicate-attempt"
