"""The selection of a screen: which tasks are kept, and the split that is drawn from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl import audit, screen
from rl.config import TasksConfig
from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.layout import CampaignDir
from rl.evidence.selection import Selection, SelectionRule, read_selection, verdict_of
from rl.files import sha256_file
from rl.prepare import prepare_tasks
from rl.records import TaskRef
from rl.selection import select
from rl.split import load_tasks, subset
from sandboxes.bank import write_bank
from tests.unit.rl.evidence.evaluations import build_screen
from tests.unit.rl.evidence.test_audit import edit_trace

RULE = SelectionRule(low=0.1, high=0.9, train=3, heldout=2, seed=0)


@pytest.fixture
def screened(tmp_path: Path) -> CampaignDir:
    return build_screen(tmp_path / "screens")


def test_tasks_inside_the_bounds_are_kept_and_split(screened: CampaignDir) -> None:
    selection = select(screened, RULE)
    assert [task.rate for task in selection.tasks] == [0, 0.25, 0.5, 0.75, 1, 0.5, 0.5, 0.25]
    verdicts = Counter(task.verdict for task in selection.tasks)
    assert verdicts == {"kept": 6, "too hard": 1, "too easy": 1}
    kept = {task.digest for task in selection.tasks if task.verdict == "kept"}
    assert len(selection.train) == 3
    assert len(selection.heldout) == 2
    assert {*selection.train, *selection.heldout} <= kept
    assert not set(selection.train) & set(selection.heldout)


def test_a_selection_names_what_it_rests_on(screened: CampaignDir) -> None:
    where = select(screened, RULE).provenance
    assert where.screen == "screened"
    assert where.frozen_sha256 == sha256_file(screened.frozen)
    assert where.traces["heldout.jsonl.zst"] == sha256_file(screened.trace("heldout"))
    assert where.attempts == 4


def test_the_split_depends_on_seed_and_rule_alone(screened: CampaignDir) -> None:
    assert select(screened, RULE) == select(screened, RULE)
    seeds = {
        tuple(select(screened, RULE.model_copy(update={"seed": s})).heldout) for s in range(12)
    }
    assert len(seeds) > 1


def test_an_incomplete_screen_selects_nothing(screened: CampaignDir) -> None:
    edit_trace(screened.trace("heldout"), lambda rows: rows.pop(5))
    with pytest.raises(ConfigurationError, match="1 of 8 tasks don't have 4 graded") as caught:
        select(screened, RULE)
    assert "--resume screened" in caught.value.remedy


def test_too_few_kept_tasks_are_told_with_their_numbers(screened: CampaignDir) -> None:
    rule = RULE.model_copy(update={"train": 6})
    with pytest.raises(ConfigurationError, match=r"6 of 8 .* \(1 below, 1 above\), and 8 are"):
        select(screened, rule)


@given(rate=st.floats(0, 1), low=st.floats(0, 1), high=st.floats(0, 1))
def test_bounds_are_inside(rate: float, low: float, high: float) -> None:
    rule = RULE.model_copy(update={"low": min(low, high), "high": max(low, high)})
    assert (verdict_of(rate, rule) == "kept") == (rule.low <= rate <= rule.high)


def test_the_command_writes_a_selection_once(
    screened: CampaignDir, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(screened.root.parent.parent)
    select_it = ["--select", "screened", "--state", state]
    assert screen.main(select_it) == 0
    path = screened.root / "selection.json"
    assert f'split = "{path}"' in capsys.readouterr().out
    first = path.read_bytes()
    assert screen.main(select_it) == 0
    with pytest.raises(ConfigurationError, match="another selection already"):
        screen.main([*select_it, "--low", "0.3"])
    assert path.read_bytes() == first
    other = screened.root / "other.json"
    assert screen.main([*select_it, "--low", "0.3", "--train", "2", "--out", str(other)]) == 0
    assert read_selection(other).rule.low == 0.3
    with pytest.raises(ConfigurationError, match="low <= high"):
        screen.main([*select_it, "--low", "0.9", "--high", "0.1"])


def in_both(raw: Any) -> None:
    raw["train"][0] = raw["heldout"][0]


def not_kept(raw: Any) -> None:
    raw["train"][0] = next(t["digest"] for t in raw["tasks"] if t["verdict"] != "kept")


def too_few(raw: Any) -> None:
    raw["train"].pop()


def screened_twice(raw: Any) -> None:
    raw["tasks"].append(raw["tasks"][0])


def other_rate(raw: Any) -> None:
    raw["tasks"][0].update(rate=0.5, verdict="kept")


def negative(raw: Any) -> None:
    raw["tasks"][0].update(attempts=-1)


def other_verdict(raw: Any) -> None:
    next(t for t in raw["tasks"] if t["verdict"] == "too easy")["verdict"] = "kept"


CHANGES = [in_both, not_kept, too_few, screened_twice, other_rate, negative, other_verdict]


@pytest.mark.parametrize("change", CHANGES)
def test_a_selection_that_contradicts_itself_is_refused(
    screened: CampaignDir, change: Callable[[Any], None], tmp_path: Path
) -> None:
    raw = json.loads(select(screened, RULE).model_dump_json())
    change(raw)
    with pytest.raises(ValidationError):
        Selection.model_validate(raw)
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match="no valid selection"):
        read_selection(path)


def _selection_of(tasks: list[TaskRef], screened: CampaignDir, path: Path) -> Path:
    """A selection file over other tasks: the second trains, the first is held out."""
    raw = json.loads(select(screened, RULE).model_dump_json())
    template = raw["tasks"][1]
    raw["tasks"] = [template | {"name": task.name, "digest": task.digest} for task in tasks]
    raw["train"], raw["heldout"] = [tasks[1].digest], [tasks[0].digest]
    raw["rule"].update(train=1, heldout=1)
    path.write_text(json.dumps(raw))
    return path


def test_a_configuration_takes_the_split_of_a_selection(
    screened: CampaignDir, tmp_path: Path
) -> None:
    folder = tmp_path / "packages"
    write_bank(folder, (), 4, 0)
    tasks = load_tasks(folder)
    path = _selection_of(tasks, screened, tmp_path / "selection.json")
    config = TasksConfig(source="path", path=str(folder), split=str(path), train=1, heldout=1)
    prepared = prepare_tasks(config, tmp_path)
    assert [task.name for task in prepared.train] == [tasks[1].name]
    assert [task.name for task in prepared.heldout] == [tasks[0].name]
    with pytest.raises(ConfigurationError, match=r"holds 1 train tasks, and tasks\.train is 2"):
        prepare_tasks(config.model_copy(update={"train": 2}), tmp_path)
    (folder / tasks[0].path / "instruction.md").write_text("Do something else.")
    with pytest.raises(ConfigurationError, match=f"task '{tasks[0].name}' of it is not among"):
        prepare_tasks(config, tmp_path)


def test_an_audit_holds_the_selection_against_the_traces(
    screened: CampaignDir, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(screened.root.parent.parent)
    assert screen.main(["--select", "screened", "--state", state]) == 0
    assert audit.main([str(screened.root)]) == 0
    path = screened.root / "selection.json"
    raw = json.loads(path.read_text())
    raw["train"][0], raw["heldout"][0] = raw["heldout"][0], raw["train"][0]
    path.write_text(json.dumps(raw))
    assert audit.main([str(screened.root)]) == 2
    assert "selection-differs: selection.json train" in capsys.readouterr().out
    path.write_text("garbage")
    assert audit.main([str(screened.root)]) == 2
    assert "selection-unreadable" in capsys.readouterr().out


def test_nothing_is_selected_from_forged_rewards(screened: CampaignDir, tmp_path: Path) -> None:
    edit_trace(screened.trace("heldout"), lambda rows: rows[0].update(reward=1.0))
    state = str(screened.root.parent.parent)
    out = tmp_path / "forged.json"
    with pytest.raises(EvidenceError, match="audit has"):
        screen.main(["--select", "screened", "--state", state, "--out", str(out)])
    assert not out.exists()


def test_a_subset_has_every_family_in_proportion() -> None:
    tasks = [
        TaskRef(name=f"{family}{i}", digest=f"{family}{i}", path="", family=family, instruction="")
        for family, count in (("a", 6), ("b", 3), ("c", 3))
        for i in range(count)
    ]
    chosen = subset(tasks, 4, "--tasks")
    assert [task.name for task in chosen] == ["a0", "a1", "b0", "c0"]
    assert subset(tasks, 12, "--tasks") == tasks
    with pytest.raises(ConfigurationError, match="13 tasks are wanted"):
        subset(tasks, 13, "--tasks")
