"""prime-rl's rows are followed as they grow, and become our record of an update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import TrainerError
from rl.learner.prime.batches import PendingBatch
from rl.learner.prime.rows import MetricsRows, ratio_bounds, update_metrics
from tests.support.prime_config import prime_campaign, sampled_group

ROW: dict[str, Any] = {
    "loss/mean": 0.125,
    "optim/grad_norm": 0.5,
    "optim/lr": 7.0,
    "entropy/all/mean": 1.25,
    "mismatch_kl/all/mean": 0.01,
    "mismatch_kl/all/max": 0.1,
    "is_masked/mean": 0.02,
    "time/step": 9.0,
    "time/forward_backward": 3.0,
}


def write(path: Path, *rows: dict[str, Any], end: str = "\n") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def test_a_step_is_done_with_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = MetricsRows(path)
    assert rows.finished(1) is None
    write(path, {"step": 1, "loss/mean": 0.5})
    assert rows.finished(1) is None
    write(path, {"step": 1, "time/step": 2.0}, end="")
    assert rows.finished(1) is None
    write(path, end="\n")
    assert rows.finished(1) == {"step": 1, "loss/mean": 0.5, "time/step": 2.0}
    assert rows.finished(2) is None


def test_rows_of_the_run_before_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 2, "time/step": 1.0, "loss/mean": 9.0})
    rows = MetricsRows(path)
    assert rows.finished(2) is None
    write(path, {"step": 2, "time/step": 2.0, "loss/mean": 1.0})
    found = rows.finished(2)
    assert found is not None
    assert found["loss/mean"] == 1.0


@pytest.mark.parametrize("line", ["{torn", "[1]", '{"loss": 1}', '{"step": null}'])
def test_a_line_that_is_no_row_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = MetricsRows(path)
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(TrainerError, match="no row of metrics"):
        rows.finished(1)


def test_a_record_is_made_of_its_rows_and_of_our_groups() -> None:
    config = prime_campaign()
    groups = [sampled_group("g0", 1), sampled_group("g1", 0)]
    batch = PendingBatch(config, 16, 2)
    for group in groups:
        batch.add(2, 1, group)
    ranks = batch.ranks_of(2, ["g0", "g1"])
    metrics = update_metrics(config, 2, ROW, groups, ranks)
    count = sum(len(share) for share in ranks)
    assert metrics.loss == pytest.approx(0.125 * count)
    assert metrics.lr == pytest.approx(1e-2 * 2 / 4)
    assert metrics.grad_norm == 0.5
    assert (metrics.reward_mean, metrics.reward_std) == (0.5, 0.5)
    assert metrics.episodes == 8
    assert metrics.sampled_tokens == 2 * (2 + 3 + 4 + 5)
    assert metrics.total_tokens == 2 * (8 + 9 + 10 + 11)
    assert (metrics.prompt_tokens, metrics.tool_tokens) == (2 * 4 * 6, 0)
    assert metrics.sequences == 8
    assert metrics.computed_tokens == sum(batch.tokens for share in ranks for batch in share)
    assert metrics.staleness == {0: 4, 1: 4}
    assert metrics.zero_variance_groups == 0
    assert metrics.seconds == 3.0


@pytest.mark.parametrize("key", [key for key in ROW if key not in ("optim/lr", "time/step")])
def test_a_value_that_was_not_finite_is_an_error(key: str) -> None:
    config, group = prime_campaign(), sampled_group("g0")
    batch = PendingBatch(config, 64, 1)
    batch.add(1, 0, group)
    row = {name: value for name, value in ROW.items() if name != key}
    with pytest.raises(TrainerError, match=f"no {key}"):
        update_metrics(config, 1, row, [group], batch.ranks_of(1, ["g0"]))


@given(st.floats(-8, 8))
def test_no_ratio_lies_outside_its_bounds(log_ratio: float) -> None:
    low, high = ratio_bounds(math.expm1(log_ratio) - log_ratio)
    ratio = math.exp(log_ratio)
    assert low * (1 - 1e-6) - 1e-9 <= ratio <= high * (1 + 1e-6) + 1e-9
    nearest = min(abs(low - ratio), abs(high - ratio))
    assert nearest <= 1e-4 * max(1.0, ratio)
