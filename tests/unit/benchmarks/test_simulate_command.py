"""`python -m benchmarks.simulate` and the files it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import scheduler, simulate
from benchmarks.simulation.policy import POLICIES
from rl.config_file import describe
from rl.errors import CampaignError, ConfigurationError
from rl.evidence.traces import TraceWriter
from rl.simulation.recorded import read_recordings
from rl.simulation.trace import Trace
from rl.simulation.workloads import WorkloadSet, find_workloads, load_set, shipped
from tests.unit.benchmarks.simulated import small

ROOT = Path(__file__).resolve().parents[3]
ROW_KEYS = [
    "workload",
    "policy",
    "step_time_s",
    "bound_s",
    "trainer_utilisation",
    "replica_utilisation",
    "waste",
    "duration_bias",
    "max_staleness",
]
FILE = """
description = "a test"
[[workload]]
name = "one"
slots = 16
[workload.schedule]
updates = 3
batch_size = 8
group_size = 4
[workload.engine]
replicas = 2
[workload.durations.lognormal]
tasks = 4
mean_s = 10.0
cv = 0.5
task_share = 0.5
[workload.trainer]
update_s = 5.0
sync_s = 1.0
"""


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.simulate", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(arguments: Sequence[str]) -> str:
    with pytest.raises(CampaignError) as caught:
        simulate.main([*arguments, "--json", "-"])
    assert caught.value.remedy
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_has_the_rows_promised_and_nothing_else_on_standard_output() -> None:
    done = command("--workload", "reference", "--updates", "3", "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"rows", "details"}
    assert [list(row) for row in result["rows"]] == [ROW_KEYS] * 8 * 4
    assert list(POLICIES) == ["ours", "sync", "one_step_off", "upstream"]
    assert [row["policy"] for row in result["rows"]] == list(POLICIES) * 8
    for row, more in zip(result["rows"], result["details"], strict=True):
        assert (row["workload"], row["policy"]) == (more["workload"], more["policy"])
        assert row["max_staleness"] == max(map(int, more["staleness"]))
        assert more["trained"] == sum(more["staleness"].values())
    bounds = {(row["workload"], row["bound_s"]) for row in result["rows"]}
    assert len(bounds) == 8, "one bound per workload, whatever the policy"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--workload", "referense"], "did you mean 'reference'?"),
        (["--workload", "nonsense"], "shipped are curve, failures"),
        (["--workload", "reference:batch64"], "there is no workload 'batch64'"),
        (["--workload", "no/such.toml"], "no such file"),
        (["--workload", "."], "is a directory"),
        (["--updates", "0"], "'schedule.updates'"),
        (["--updates", str(10**30)], "'schedule.updates'"),
        (["--seed", "-1"], "'seed'"),
        (["--durations", "no-such-file"], "no such file"),
        (["--durations", "."], "holds no finished attempt"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(arguments: list[str], wanted: str) -> None:
    assert wanted in refusal(arguments)


def test_bad_input_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "w.toml", FILE.replace("slots = 16", "slotz = 16"))
    for arguments in (["--workload", path], ["--policy", "best"], ["--updates", "many"]):
        done = command(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert "did you mean 'slots'" in command("--workload", path).stderr


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("cv = 0.5", "cvv = 0.5", "unknown key 'durations.lognormal.cvv'; did you mean 'cv'?"),
        ("slots = 16", "slots = 16\nmean_s = 3.0", "'workload.durations.lognormal.mean_s'?"),
        ("slots = 16", "slots = 1", "slots may not be fewer than engine.replicas"),
        ("replicas = 2", "replicas = 2\nspeed = [[1, 0.5]]", "speed begins with (1, 1.0)"),
        ("replicas = 2", "replicas = 2\nspeed = [[1, 1.0], [1, 0.5]]", "rising attempts"),
        ("mean_s = 10.0", 'mean_s = "ten"', "'durations.lognormal.mean_s'"),
        ("batch_size = 8", "batch_size = 9", "not a multiple of group_size"),
        ("batch_size = 8", "batch_size = 8\nrefill_zero_variance = 1", "rewards are not simulated"),
        ("[workload.trainer]", "[workload.trainr]", "did you mean 'trainer'?"),
        ("[[workload]]", "[[workloads]]", "did you mean 'workload'?"),
        ("slots = 16", "slots = true", "'slots'"),
        ("[workload.durations.lognormal]", "[workload.durations]\n[other]", "either lognormal"),
        ("description = ", "description = [", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, old: str, new: str, wanted: str) -> None:
    path = write(tmp_path / "w.toml", FILE.replace(old, new, 1))
    message = refusal(["--workload", path])
    assert wanted in message
    assert path in message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("workload = 3", "'workload'"),
        ("workload = [3]", "'workload' is not a table"),
        ("common = 3", "'common' is not a table"),
        ("", "'description'"),
        ('description = "none"\nworkload = []', "'workload'"),
        (FILE + FILE.partition('a test"')[2], "two workloads have the same name: one"),
    ],
)
def test_a_file_of_another_shape_is_explained(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refusal(["--workload", write(tmp_path / "w.toml", text)])


def test_what_common_has_wrong_is_said_once(tmp_path: Path) -> None:
    text = '[common]\nslotz = 3\n[[workload]]\nname = "a"\n[[workload]]\nname = "b"\n'
    message = refusal(["--workload", write(tmp_path / "w.toml", 'description = "x"\n' + text)])
    assert message.count("unknown key 'slotz'") == 1


@pytest.mark.parametrize("path", shipped().values(), ids=shipped().keys())
def test_shipped_workloads_parse(path: Path) -> None:
    assert load_set(path).workload
    assert find_workloads(path.stem) == load_set(path).workload


def test_shipped_workloads_reach_from_three_gpus_to_a_thousand_replicas() -> None:
    found = [w for name in shipped() for w in find_workloads(name)]
    assert min((w.engine.replicas, w.slots) for w in found) == (2, 128)
    largest = max(found, key=lambda workload: workload.slots)
    assert (largest.engine.replicas, largest.slots) == (1024, 65_536)
    assert largest.schedule.updates * largest.schedule.batch_size > 1_000_000


def test_every_key_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(text.strip() for _, text in describe(WorkloadSet))
    assert simulate.main(["--describe"]) == 0
    assert "workload.failures.mtbf_s" in capsys.readouterr().out


def test_plots_are_whole_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "w.toml", FILE)
    folder = tmp_path / "plots" / "deep"
    out = tmp_path / "out.json"
    assert simulate.main(["--workload", path, "--json", str(out), "--plot", str(folder)]) == 0
    (plot,) = folder.iterdir()
    root = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    panels = root.findall("{http://www.w3.org/2000/svg}svg")
    labels = [panel.get("aria-label") for panel in panels]
    assert labels == [
        "step time",
        "trainer utilisation",
        "replica utilisation",
        "waste",
        *(f"staleness, {policy}" for policy in POLICIES),
    ]
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == 4


def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "run", lambda *arguments: pytest.fail("simulated all the same"))
    file = write(tmp_path / "file", "")
    for arguments in (["--json", f"{tmp_path}/none/out.json"], ["--plot", f"{file}/plots"]):
        with pytest.raises(CampaignError) as caught:
            simulate.main(arguments)
        assert caught.value.remedy


def test_the_table_says_what_the_rows_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "w.toml", FILE)
    monkeypatch.chdir(tmp_path)
    assert simulate.main(["--workload", path, "--policy", "ours", "--equal-waste"]) == 0
    text = capsys.readouterr().out
    kept = json.loads((tmp_path / "state/benchmarks/simulate.json").read_text(encoding="utf-8"))
    (row,) = kept["rows"]
    assert f"{row['step_time_s']:.1f}" in text
    assert f"{row['bound_s']:.1f}" in text


def test_recorded_durations_are_drawn_per_task(tmp_path: Path) -> None:
    lines = [("b", 20.0), ("a", 1.0), ("b", 30.0), ("a", 2.0)]
    path = tmp_path / "recorded.jsonl"
    text = "\n".join(json.dumps({"task": task, "seconds": s}) for task, s in lines)
    write(path, text + "\n")
    assert read_recordings(path) == ((1.0, 2.0), (20.0, 30.0))
    trace = Trace(small(durations={"recorded": str(path), "deadline_s": 25.0}))
    assert {trace.fate(0, n, 0).seconds for n in range(40)} == {1.0, 2.0}
    assert {trace.fate(1, n, 0).seconds for n in range(40)} == {20.0, 25.0}
    out = tmp_path / "out.json"
    assert simulate.main(["--durations", str(path), "--updates", "2", "--json", str(out)]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 4 * 4, "workloads that differed in their distribution alone are one now"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"task": "a"}',
        '{"task": "a", "seconds": -1}',
        '{"task": 1, "seconds": 1, "x": 1}',
    ],
)
def test_a_wrong_recording_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "r.jsonl", '{"task": "a", "seconds": 1}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match="not a recording") as caught:
        read_recordings(Path(path))
    assert caught.value.where == f"{path}:2"


def test_a_campaigns_own_durations_can_be_drawn(tmp_path: Path) -> None:
    from tests.unit.rl.evidence.synthetic import episode, task

    (tmp_path / "traces").mkdir()
    with TraceWriter(tmp_path / "traces" / "train.jsonl.zst") as writer:
        for index, seconds in enumerate((3.0, 4.0)):
            timings = {"total": seconds}
            writer.append(episode(f"a{index}", "g", task("train", 0), 0, timings=timings))
        writer.append(episode("a2", "g", task("train", 1), 0, timings={}))
    assert read_recordings(tmp_path) == ((3.0, 4.0),)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_lognormal_durations_have_the_mean_and_spread_asked_for(share: float) -> None:
    trace = Trace(
        small(durations__lognormal={"tasks": 200, "mean_s": 300.0, "cv": 1.0, "task_share": share})
    )
    seconds = [
        trace.fate(task, n, a).seconds for task in range(200) for n in range(20) for a in range(4)
    ]
    mean = sum(seconds) / len(seconds)
    cv = (sum((s - mean) ** 2 for s in seconds) / len(seconds)) ** 0.5 / mean
    assert mean == pytest.approx(300.0, rel=0.03)
    assert cv == pytest.approx(1.0, rel=0.1)


def test_another_seed_is_another_trace() -> None:
    equal_tasks = {"tasks": 12, "mean_s": 300.0, "cv": 0.5, "task_share": 0.0}
    traces = [Trace(small(seed=seed, durations__lognormal=equal_tasks)) for seed in (0, 0, 1)]
    first, again, other = ([t.fate(task, 0, 0) for task in range(12)] for t in traces)
    assert first == again
    assert not set(first) & set(other)


def test_masked_attempts_have_the_share_asked_for() -> None:
    trace = Trace(small(failures={"masked_share": 0.1}))
    fates = [trace.fate(task, n, a) for task in range(12) for n in range(100) for a in range(4)]
    masked = [fate for fate in fates if fate.masked_after is not None]
    assert len(masked) / len(fates) == pytest.approx(0.1, rel=0.15)
    assert all(0 < (fate.masked_after or 0) < fate.seconds for fate in masked)


def test_the_scheduler_benchmark_takes_every_episode_through() -> None:
    tiny = scheduler.Scale("tiny", 16, 2, 8, 4, 5, 3)
    assert scheduler.drive(tiny, 3) > 0
