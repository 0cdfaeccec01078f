"""What a run cost by its own receipts: arithmetic that is checked by hand."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigurationError, EvidenceError
from rl.evidence.billing import Billing, ProviderReport, estimate, read_billing
from rl.evidence.events import Event
from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import Ending, LifecycleRow, StepName
from rl.evidence.prices import Prices, load_prices
from rl.evidence.rows import GateResult, Gates
from rl.evidence.traces import TraceWriter
from rl.evidence.usage import driver_spans, usage_of
from rl.files import write_json
from tests.unit.rl.evidence.synthetic import build, episode, masked, task

ROOT = Path(__file__).resolve().parents[4]
TABLE = """
as_of = 2026-01-02
source = "a test"
currency = "USD"
[modal]
gpu = "H100"
[modal.gpus]
H100 = 0.01
L4 = 0.001
[modal.container]
core_second = 0.0001
gib_second = 0.00001
[modal.sandbox]
core_second = 0.0004
gib_second = 0.00008
"""


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    (tmp_path / "prices.toml").write_text(TABLE)
    return load_prices(tmp_path / "prices.toml")


def row(
    step: StepName, time: float, ending: Ending | None = None, detail: str = "", driver: int = 0
) -> LifecycleRow:
    return LifecycleRow(
        step=step, incarnation=driver, number=0, detail=detail, time=time, deadline_s=9.0,
        ending=ending,
    )  # fmt: skip


def stage(name: str, time: float) -> Event:
    return Event(time=time, kind="stage", fields={"stage": name})


def whole(begun: float = 100.0, driver: int = 0) -> list[LifecycleRow]:
    """Receipts of a driver: its trainer for 50 s, everything for 80 s."""
    return [
        row("start", begun, driver=driver),
        row("start", begun + 5, "done", driver=driver),
        row("stop", begun + 45, detail="trainer", driver=driver),
        row("stop", begun + 50, "done", "trainer", driver=driver),
        row("stop", begun + 75, detail="all actors", driver=driver),
        row("stop", begun + 80, "done", "all actors", driver=driver),
    ]


def run_on_gpus(root: Path, **frozen: Any) -> CampaignDir:
    """A run's directory: one trainer GPU and two replicas, sandboxes on Modal."""
    directory = CampaignDir(root / "run-1")
    (directory.root / "traces").mkdir(parents=True)
    config = {
        "resources": {
            "trainer_gpus": 1.0, "replica_gpus": 1.0, "trainer_cpus": 4.0, "replica_cpus": 2.0,
            "worker_cpus": 1.0,
        },
        "engine": {"replicas": 2},
        "episodes": {"workers": 3},
        "sandbox": {"provider": "modal", "cpus": 0.5, "memory_mb": 2048},
    }  # fmt: skip
    values = {"run_id": "run-1", "created_at": 90.0, "config": config, "surprise": 1} | frozen
    directory.frozen.write_text(json.dumps(values))
    for each in whole():
        directory.lifecycle_rows().append(each)
    lines = [stage("train", 106.0), stage("done", 181.0)]
    directory.events.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    with TraceWriter(directory.trace("train")) as trace, TraceWriter(directory.failed_trace) as bad:
        for index in range(10):
            of = task("train", 0)
            trace.append(episode(f"a{index}", "g", of, 0, timings={"total": 20.0}))
        bad.append(masked("b0", "g", task("train", 0), 0, timings={"total": 7.0}))
        bad.append(masked("b1", "g", task("train", 0), 0, timings={}))
    gate: dict[str, Any] = {"task_name": "t", "digest": "d", "passed": True}
    gates = [GateResult(**gate, seconds=3.0), GateResult(**gate, seconds=4.0, reused=True)]
    write_json(directory.gates, Gates(gates=gates))
    return directory


def test_every_line_by_hand(tmp_path: Path, prices: Prices) -> None:
    made = estimate(usage_of(run_on_gpus(tmp_path)), prices)
    amounts = {line.item: (line.quantity, line.unit, line.amount) for line in made.lines}
    assert amounts == {
        "trainer: H100": (50.0, "GPU s", pytest.approx(0.5)),
        "trainer: CPU": (200.0, "core s", pytest.approx(0.02)),
        "replicas: H100": (160.0, "GPU s", pytest.approx(1.6)),
        "replicas: CPU": (320.0, "core s", pytest.approx(0.032)),
        "episode workers: CPU": (240.0, "core s", pytest.approx(0.024)),
        "sandboxes of train episodes: CPU": (100.0, "core s", pytest.approx(0.04)),
        "sandboxes of train episodes: memory": (400.0, "GiB s", pytest.approx(0.032)),
        "sandboxes of failed episodes: CPU": (3.5, "core s", pytest.approx(0.0014)),
        "sandboxes of failed episodes: memory": (14.0, "GiB s", pytest.approx(0.00112)),
        "sandboxes of gates: CPU": (1.5, "core s", pytest.approx(0.0006)),
        "sandboxes of gates: memory": (6.0, "GiB s", pytest.approx(0.00048)),
    }
    assert made.total == pytest.approx(2.2516)
    assert (made.begun, made.ended) == (90.0, 181.0)
    assert (made.currency, made.prices_as_of) == ("USD", date(2026, 1, 2))
    assert any("1 attempts have no time" in note for note in made.notes)


def test_another_gpu_has_another_price(tmp_path: Path, prices: Prices) -> None:
    usage = usage_of(run_on_gpus(tmp_path))
    (line,) = [each for each in estimate(usage, prices, "L4").lines if each.item == "trainer: L4"]
    assert line.amount == pytest.approx(0.05)
    with pytest.raises(ConfigurationError, match="no price for GPU 'H999'") as told:
        estimate(usage, prices, "H999", "prices.toml")
    assert "H100, L4" in str(told.value)


def test_a_run_that_only_evaluates_has_no_trainer(tmp_path: Path, prices: Prices) -> None:
    made = estimate(usage_of(run_on_gpus(tmp_path, kind="screen")), prices)
    assert not [line for line in made.lines if line.item.startswith("trainer")]
    assert [line for line in made.lines if line.item.startswith("replicas")]


def test_a_local_run_costs_nothing_and_says_so(tmp_path: Path, prices: Prices) -> None:
    made = estimate(usage_of(build(tmp_path)), prices)
    assert made.total == 0.0 and made.lines == []
    assert any("own machines are taken to cost nothing" in note for note in made.notes)
    assert any("sandboxes cost nothing: bubblewrap" in note for note in made.notes)


def test_drivers_that_follow_each_other_add_up(tmp_path: Path) -> None:
    events = [stage("train", 106.0), stage("train", 206.0)]
    spans = driver_spans([*whole(100.0, 0), *whole(200.0, 1)], events)
    assert [(s.begun, s.trainer_ended, s.ended, s.cut) for s in spans] == [
        (100.0, 150.0, 180.0, False),
        (200.0, 250.0, 280.0, False),
    ]


def test_a_driver_that_was_cut_off_counts_up_to_what_is_known(tmp_path: Path) -> None:
    rows = [row("start", 100.0), row("start", 105.0, "done"), *whole(200.0, 1)]
    events = [stage("train", 106.0), Event(time=150.0, kind="ended"), stage("train", 206.0)]
    first, second = driver_spans(rows, events)
    assert (first.begun, first.trainer_ended, first.ended, first.cut) == (100.0, 150.0, 150.0, True)
    assert not second.cut


def test_a_driver_that_came_to_evaluate_holds_no_trainer(tmp_path: Path) -> None:
    (span,) = driver_spans(whole(), [stage("heldout", 110.0)])
    assert span.trainer_ended == span.begun and span.ended == 180.0


def test_a_run_that_was_never_frozen_is_refused(tmp_path: Path) -> None:
    directory = run_on_gpus(tmp_path)
    directory.frozen.write_text('{"run_id": 1}')
    with pytest.raises(EvidenceError, match="no record of what a run was started with"):
        usage_of(directory)
    directory.frozen.unlink()
    with pytest.raises(EvidenceError, match="before it was frozen"):
        usage_of(directory)


def test_shipped_prices_parse() -> None:
    prices = load_prices(ROOT / "configs" / "billing" / "prices.toml")
    assert prices.modal.gpus["H100"] == 0.001097
    assert prices.modal.sandbox.core_second == 0.00003942


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("core_second = 0.0001\n", "core_secnd = 1.0\n", "did you mean 'core_second'"),
        ("[modal.sandbox]", "[modal.sandboxes]", "did you mean 'sandbox'"),
        ("H100 = 0.01", 'H100 = "dear"', "modal.gpus.H100"),
        ("H100 = 0.01", "H100 = -1.0", "modal.gpus.H100"),
        ("as_of = 2026-01-02", "as_of = 'long ago'", "as_of"),
        ('gpu = "H100"', 'gpu = "TPU"', "has no price in gpus"),
        ('source = "a test"', "", "source"),
    ],
)
def test_a_wrong_table_names_key_and_file(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in TABLE
    (tmp_path / "p.toml").write_text(TABLE.replace(old, new))
    with pytest.raises(ConfigurationError) as told:
        load_prices(tmp_path / "p.toml")
    assert why in str(told.value) and "p.toml" in str(told.value)
    assert "--prices" in told.value.remedy


def report(*rows: dict[str, Any], tag: str = "run-1") -> ProviderReport:
    return ProviderReport(
        provider="modal", workspace="w", fetched_at=1.0, start=0.0, end=3600.0, resolution="h",
        tag=tag, app="terminal-rl", rows=list(rows),
    )  # fmt: skip


def test_reports_stand_beside_the_estimate(tmp_path: Path, prices: Prices) -> None:
    made = estimate(usage_of(run_on_gpus(tmp_path)), prices)
    rows = {"description": "terminal-rl-sandboxes", "cost": "2.5"}
    billing = Billing(kind="campaigns", run_id="run-1", estimate=made)
    assert billing.difference is None
    billing = billing.model_copy(update={"reports": [report(), report(rows)]})
    assert billing.difference == pytest.approx(2.5 - 2.2516)
    path = tmp_path / "b.json"
    write_json(path, billing)
    assert read_billing(path) == billing
    assert read_billing(tmp_path / "none.json") is None
    path.write_text("{}")
    with pytest.raises(EvidenceError, match="not a valid billing record"):
        read_billing(path)
    with pytest.raises(ValueError, match="without a cost"):
        report({"description": "x", "cost": "much"})
