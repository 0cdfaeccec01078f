"""An export read back by the real `datasets` library equals the campaign's records."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rl.evidence.dataset.build import Request, build
from rl.evidence.dataset.card import features, read_header, size_category
from rl.evidence.dataset.messages import episode_messages
from rl.evidence.dataset.schema import EPISODES, SETS, SetName, arrow_schema, column_table
from rl.evidence.layout import CampaignDir
from rl.evidence.stats import solved
from rl.records import EpisodeRecord, Sample
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.material import (
    act,
    json_rows,
    load,
    replace,
)

SPLITS = {"train": ("train",), "eval": ("eval", "heldout")}
SAMPLE_FIELDS = ("branch", "token_ids", "sampled", "logprobs")
TURN_FIELDS = (
    "purpose",
    "branch",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "problem",
    "command",
    "exit_code",
    "generate_s",
    "execute_s",
)
SAME_FIELDS = (
    "attempt_id",
    "group_id",
    "stage",
    "arm",
    "task_name",
    "task_digest",
    "adapter_sha256",
    "outcome",
    "reward",
    "stop_reason",
    "verifier_log",
    "started_at",
    "replica",
)


def records(campaign: CampaignDir, split: str) -> list[EpisodeRecord]:
    return [record for stage in SPLITS[split] for record in campaign.episodes(stage)]  # type: ignore[arg-type]


def expected(campaign: CampaignDir, record: EpisodeRecord) -> dict[str, Any]:
    """The row of a record, put together from the evidence by other code than the export's."""
    frozen = json.loads(campaign.frozen.read_text())
    tasks = {task["digest"]: task for task in [*frozen["train"], *frozen["heldout"]]}
    task = tasks[record.task_digest]
    updates = [json.loads(line) for line in campaign.updates.read_text().splitlines()]
    trained = {
        attempt: row["update"]
        for row in updates
        for group in row["groups"]
        for attempt in group["attempt_ids"]
    }
    config = synthetic.campaign_config()
    return {
        **{name: getattr(record, name) for name in SAME_FIELDS},
        "schema_version": 1,
        "run_id": frozen["run_id"],
        "task_family": task["family"],
        "task_tier": task["tier"],
        "instruction": task["instruction"],
        "policy_version": record.version,
        "solved": solved(record) if record.outcome == "graded" else None,
        "messages": episode_messages(config.agent, task["instruction"], record.turns),
        "samples": [
            {name: getattr(sample, name) for name in SAMPLE_FIELDS} for sample in record.samples
        ],
        "turns": [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in record.turns],
        "final_output": record.turns[-1].output if record.turns else None,
        "timings": [{"name": name, "seconds": s} for name, s in record.timings.items()],
        "failure_kind": record.failure.kind if record.failure else None,
        "failure_message": record.failure.message if record.failure else None,
        "trained_in_update": trained.get(record.attempt_id),
        "scrubbed": 0,
        "config_digest": frozen["config_digest"],
        "model_name": "tiny-135m",
        "model_pin": "state/models/tiny",
        "code_commit": "1" * 40,
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("streaming", [False, True])
def test_load_dataset_gives_the_records_back(
    made: CampaignDir, exported: Path, tmp_path: Path, split: str, streaming: bool
) -> None:
    loaded = load(exported, tmp_path, streaming=streaming)
    assert set(loaded) == set(SPLITS)
    wanted = [expected(made, record) for record in records(made, split)]
    assert list(loaded[split]) == wanted
    assert len(wanted) == {"train": 72, "eval": 48}[split]


@pytest.mark.parametrize("split", SPLITS)
def test_json_lines_hold_the_same_rows(made: CampaignDir, exported: Path, split: str) -> None:
    rows = json_rows(exported, split)
    assert rows == [expected(made, record) for record in records(made, split)]
    assert all(list(row) == [field.name for field in EPISODES] for row in rows)


def test_json_lines_are_read_by_the_library_too(exported: Path, tmp_path: Path) -> None:
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets

    files = str(exported / "data/jsonl/train-*.jsonl.zst")
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path))["train"]
    assert loaded["attempt_id"] == [row["attempt_id"] for row in json_rows(exported, "train")]


def test_failed_episodes_are_left_out_unless_asked_for(
    made: CampaignDir, exported: Path, tmp_path: Path
) -> None:
    build([made], tmp_path / "graded")
    outcomes = {row["outcome"] for row in json_rows(tmp_path / "graded", "train")}
    assert outcomes == {"graded"}
    (masked,) = (row for row in json_rows(exported, "train") if row["outcome"] == "masked")
    assert (masked["failure_kind"], masked["reward"]) == ("SandboxError", None)


def test_values_survive_to_the_last_bit(campaign: CampaignDir, tmp_path: Path) -> None:
    logprobs = [0.0, -0.1, -1e-300, -5e-324, -12345.678901234567]
    sample = Sample(
        token_ids=[0, 2**31 - 1, 5, 6, 7], sampled=[False, *[True] * 4], logprobs=logprobs
    )
    text = '\x00\u202e tab\t é 漢字 🦀 \\n "quoted" \r\n'
    record = synthetic.episode(
        "x-a0", "x", synthetic.task("train", 0), 0,
        samples=[sample], turns=[act(text), act("")], verifier_log=text, reward=0.1 + 0.2,
    )  # fmt: skip
    replace(campaign, [record])
    build([campaign], tmp_path / "out", Request(unaudited=True))
    (row,) = load(tmp_path / "out", tmp_path / "cache")["train"]
    assert row == expected(campaign, record)
    assert json_rows(tmp_path / "out", "train") == [row]


def test_the_card_is_what_the_library_would_write(exported: Path, tmp_path: Path) -> None:
    header = read_header((exported / "README.md").read_text(), "README.md")
    assert header["license"] == "other"
    assert [config["config_name"] for config in header["configs"]] == list(SETS)
    for info in header["dataset_info"]:
        loaded = load(exported, tmp_path, info["config_name"])
        library = loaded["train"].features._to_yaml_list()
        assert info["features"] == library == features(arrow_schema(info["config_name"]))
        assert {s["name"]: s["num_examples"] for s in info["splits"]} == {
            name: len(split) for name, split in loaded.items()
        }


def test_every_field_is_described_in_the_card(exported: Path) -> None:
    page = (exported / "README.md").read_text()
    for fields in SETS.values():
        for field in fields:
            assert f"| `{field.name}` |" in page
            assert field.about in page
            for inner in field.fields:
                assert f"| `{field.name}[].{inner.name}` |" in page


@pytest.mark.parametrize(
    ("rows", "name"), [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**8, "10M<n<100M")]
)
def test_sizes_are_named_as_the_hub_does(rows: int, name: str) -> None:
    assert size_category(rows) == name


@pytest.mark.parametrize("name", SETS)
def test_the_documentation_has_every_field(name: SetName) -> None:
    page = Path(__file__).parents[5] / "docs/dataset.md"
    assert column_table(name) in page.read_text()
