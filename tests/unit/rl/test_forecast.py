"""The forecast of time and cost."""

from __future__ import annotations

import json
import shutil
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config import CampaignConfig
from rl.config_file import load_config
from rl.errors import ConfigurationError
from rl.evidence.prices import DEFAULT, Prices, load_prices
from rl.final import main as final
from rl.forecast import Forecast, Spread, forecast, forecast_lines
from rl.forecast_config import SHIPPED, Durations, Range, load_durations
from tests.unit.rl.evidence.synthetic import build

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / SHIPPED).glob("*.toml"))
PRICES = load_prices(ROOT / DEFAULT)
FINAL = load_config(ROOT / "configs/final.toml")


def exact(value: float) -> dict[str, float]:
    return {"low": value, "likely": value, "high": value}


def durations(**changes: object) -> Durations:
    """Nothing is uncertain, and nothing takes time but attempts and the trainer."""
    values: dict[str, object] = {
        "as_of": "2026-01-01",
        "source": "a test",
        "measured": False,
        "attempt": exact(100.0),
        "attempt_spread": exact(0.0),
        "task_share": 0.5,
        "trainer_episode": exact(0.5),
        "publish": exact(0.0),
        "masked": exact(0.0),
        "stages": {
            name: exact(0.0)
            for name in ("prepare", "gate_each", "start", "verify", "load_arm", "report")
        },
    }
    return Durations.model_validate(values | changes)


def changed(config: CampaignConfig, **tables: dict[str, object]) -> CampaignConfig:
    data = config.model_dump()
    for name, values in tables.items():
        data[name] |= values
    return CampaignConfig.model_validate(data)


def test_a_campaign_without_chance_takes_what_can_be_counted_by_hand() -> None:
    # The first two batches fill the 128 slots, end at 100 and are trained at 132 and 164.
    # Batch 3 may be no staler than 1, so it starts with version 1, at 132, and batch 4 with
    # version 2, at 164: each pair is 132 s after the pair before it, and the last of ten
    # updates ends at 164 + 4 x 132.
    config = changed(FINAL, episodes={"concurrency": 128}, checkpoints={"updates": []})
    found = forecast(config, durations(), PRICES)
    # (The simulator's trainer works a little dearer on the first attempts that land.)
    train = found.seconds["train"]
    assert train.low == train.likely == train.high == pytest.approx(692.0, abs=0.5)
    # Held out: 12 tasks x 8 attempts on 64 slots are two rounds of 100 s, for each arm.
    assert found.seconds["heldout"] == Spread(low=400.0, likely=400.0, high=400.0)
    assert found.total_s == Spread.total(list(found.seconds.values()))


def test_a_clusters_gpus_are_priced_by_the_second() -> None:
    own = CampaignConfig.model_validate(FINAL.model_dump() | {"modal": None})
    found = forecast(own, durations(), PRICES)
    gpu = PRICES.modal.gpus["H100"]
    assert found.costs[0].amount.likely == pytest.approx(3 * gpu * found.total_s.likely)
    assert "start workers" not in found.seconds
    sandbox = PRICES.modal.sandbox
    second = 0.125 * sandbox.core_second + 0.125 * sandbox.gib_second
    # Every attempt takes 100 s; what is sampled beyond the last update is paid for as well.
    assert found.costs[2].amount.likely >= (640 + 368) * 100 * second
    assert "sandboxes of 1008 attempts" in found.costs[2].what
    assert found.total_cost.likely == pytest.approx(sum(c.amount.likely for c in found.costs))


def test_modals_containers_are_priced_while_they_are_there() -> None:
    found = forecast(FINAL, durations(), PRICES)
    training, worker, continuation, _ = found.costs
    gpu, core = PRICES.modal.gpus["H100"], PRICES.modal.container.core_second
    gib = PRICES.modal.container.gib_second
    seconds = {stage: spread.likely for stage, spread in found.seconds.items()}
    before = sum(seconds[s] for s in ("prepare", "gates", "start", "train", "checkpoint"))
    assert training.what.startswith("final_train: 1 x (H100!:3, 16 CPU)")
    assert training.amount.likely == pytest.approx(before * (3 * gpu + 16 * core + 96 * gib))
    evaluated = seconds["start workers"] + seconds["heldout"]
    assert worker.what.startswith("heldout_worker: 2 x (H100!:1, 6 CPU)")
    assert worker.amount.likely == pytest.approx(evaluated * 2 * (gpu + 6 * core + 32 * gib))
    whole = 2 * core + 16 * gib
    assert continuation.amount.likely == pytest.approx(found.total_s.likely * whole)


def test_what_is_not_rented_costs_nothing() -> None:
    local = load_config(ROOT / "configs/local.toml")
    found = forecast(local, durations(), PRICES)
    assert found.costs == [] and found.total_cost.high == 0
    assert "nothing is rented" in found.notes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["final", "smoke", "local"])
def test_shipped_durations_forecast_every_shipped_campaign(path: Path, name: str) -> None:
    given_durations, recording = load_durations(path)
    assert recording is None
    found = forecast(load_config(ROOT / f"configs/{name}.toml"), given_durations, PRICES, seeds=2)
    for spread in [*found.seconds.values(), found.total_s, found.total_cost]:
        assert 0 <= spread.low <= spread.likely <= spread.high
    assert found == forecast(
        load_config(ROOT / f"configs/{name}.toml"), given_durations, PRICES, seeds=2
    )
    assert any("in all" in line for line in forecast_lines(found))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.floats(0.0, 1.0))
def test_more_updates_never_take_less_time(updates: int, more: int, spread: float) -> None:
    def train(count: int) -> float:
        config = changed(FINAL, schedule={"updates": count}, checkpoints={"updates": []})
        given_durations = durations(attempt_spread=exact(spread))
        return forecast(config, given_durations, PRICES, seeds=1).seconds["train"].likely

    assert train(updates + more) > train(updates) > 0


def test_twice_the_price_is_twice_the_cost_and_no_more_time() -> None:
    modal = PRICES.modal.model_dump()
    dearer = Prices.model_validate(
        PRICES.model_dump()
        | {
            "modal": {
                "gpu": "H100",
                "gpus": {"H100": 2 * modal["gpus"]["H100"]},
                "container": {key: 2 * n for key, n in modal["container"].items()},
                "sandbox": {key: 2 * n for key, n in modal["sandbox"].items()},
            }
        }
    )
    one, two = (forecast(FINAL, durations(), prices, seeds=1) for prices in (PRICES, dearer))
    assert two.total_cost.likely == pytest.approx(2 * one.total_cost.likely)
    assert two.total_s == one.total_s


def test_old_prices_and_a_short_watchdog_are_noted() -> None:
    def notes(today: date, watchdog_s: float) -> str:
        config = changed(FINAL, limits={"watchdog_s": watchdog_s})
        return "\n".join(forecast(config, durations(), PRICES, today=today, seeds=1).notes)

    fresh = notes(PRICES.as_of, 32400.0)
    assert "days old" not in fresh and "watchdog" not in fresh
    late = notes(PRICES.as_of + timedelta(days=181), 60.0)
    assert "181 days old" in late and "exceeds limits.watchdog_s (60 s)" in late


def test_evaluations_on_the_way_take_time_and_sandboxes() -> None:
    data = FINAL.model_dump()
    data["eval"] = {"interval": 5, "attempts": 2}
    data["engine"]["max_loras"] = 3
    with_evals = CampaignConfig.model_validate(data)
    plain, more = (forecast(c, durations(), PRICES, seeds=1) for c in (FINAL, with_evals))
    assert more.seconds["train"].likely > plain.seconds["train"].likely
    assert "attempts" in more.costs[-1].what and more.costs[-1] != plain.costs[-1]


def test_a_campaigns_own_durations_are_taken_as_measured(tmp_path: Path) -> None:
    root = build(tmp_path / "run").root
    found, recording = load_durations(root)
    assert found.measured and recording == root
    forecast(FINAL, found, PRICES, recording, seeds=1)
    shutil.rmtree(root / "traces")
    (root / "metrics.jsonl").unlink()
    with pytest.raises(ConfigurationError):
        load_durations(root)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("attempts", exact(1.0), "did you mean 'attempt'"),
        ("attempt", {"low": 2.0, "likely": 1.0, "high": 3.0}, "in this order"),
        ("speed", [[2, 1.0]], "begins with"),
        ("masked", exact(1.5), "at most 1"),
        ("attempt", {"low": 1.0, "likely": float("inf"), "high": 3.0}, "attempt.likely"),
    ],
)
def test_wrong_durations_are_named(tmp_path: Path, key: str, value, wanted: str) -> None:
    data = json.loads(durations().model_dump_json()) | {key: value}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=wanted) as refused:
        load_durations(path)
    assert str(path) in str(refused.value)


def test_a_range_of_recorded_values_is_made_of_them() -> None:
    found = Range.of([float(n) for n in range(101)])
    assert (found.low, found.likely, found.high) == (10.0, 50.0, 90.0)
    assert Range.of([3.0]) == Range(low=3.0, likely=3.0, high=3.0)


def test_the_plan_tells_counts_and_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "configs/final.toml"
    assert final(["--config", str(config), "--plan", "--json", "--state", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["training"]["episodes"] == 640
    assert told["evaluation"]["attempts"] == 368
    assert told["resources"]["gpus_in_all"] == 3
    found = Forecast.model_validate(told["forecast"])
    assert "assumed, not measured" in found.durations
    assert not (tmp_path / "campaigns").exists()
    with pytest.raises(ConfigurationError, match="goes with --plan"):
        final(["--durations", str(FILES[0])])
