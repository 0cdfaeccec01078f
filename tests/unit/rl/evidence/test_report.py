import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl import report as command
from rl.errors import EvidenceError
from rl.evidence import charts
from rl.evidence.layout import CampaignDir
from rl.evidence.report import duration, visible, write_report
from rl.evidence.summary import load_evidence, summarize, summary_lines
from tests.unit.rl.evidence.synthetic import HOSTILE, build, campaign_config


class Page(HTMLParser):
    """Collects tags, addresses and text; fails on badly nested elements."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(directory: CampaignDir) -> Page:
    return Page(write_report(directory).read_text())


def test_the_page_says_whether_it_learned_and_how_surely(tmp_path: Path) -> None:
    directory = build(tmp_path)
    made = page(directory)
    summary = summarize(load_evidence(directory))
    assert summary.verdict == "improved" and summary.finished and summary.missing == []
    assert summary.headline in made.text
    for text in ("Audit clean", "8/24 before, 20/24 after", "No findings.", "12 of 12 passed"):
        assert text in made.text
    for update in range(1, 7):
        assert f"update {update}: mean reward" in made.text
    for row in summary.heldout.tasks if summary.heldout else ():
        assert row.task_name in made.text


def test_updates_show_their_mismatch_ratios_and_effective_sample(tmp_path: Path) -> None:
    directory = build(tmp_path)
    text = page(directory).text
    for part in ("At staleness 0", "3e-05", "0.96–1.06", "98%", "94%"):
        assert part in text
    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    for row in rows:  # as they were written before these figures existed
        for name in ("mismatch_kl_by_staleness", "ratio_quantiles", "effective_sample_size"):
            del row[name]
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0.87–1.35" in page(directory).text


def test_no_gain_is_called_no_significant_change(tmp_path: Path) -> None:
    config = campaign_config()
    config = config.model_copy(update={"heldout": config.heldout.model_copy(update={"tasks": 3})})
    directory = build(tmp_path, config=config)
    summary = summarize(load_evidence(directory))
    assert summary.verdict == "not significant"
    text = page(directory).text
    assert "No significant change" in text and "no outcome at all can reach" in text


def test_hostile_output_stays_text(tmp_path: Path) -> None:
    directory = build(tmp_path)
    source = write_report(directory).read_text()
    made = Page(source)
    assert "script" not in made.tags
    assert "<script>alert('x')</script>^[[31mred^[[0m^@<U+202E>evil" in made.text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202e]", source)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    made = page(build(tmp_path))
    assert made.addresses == ["data:,"]
    assert "default-src 'none'" in (tmp_path / "local-20260601-090000/report.html").read_text()


def test_an_unfinished_campaign_says_what_is_missing(tmp_path: Path) -> None:
    directory = build(tmp_path, finish=False)
    text = page(directory).text
    for part in ("Unfinished", "updates 4 to 6", "48 of 48 held-out attempts", "the audit"):
        assert part in text
    lines = summary_lines(summarize(load_evidence(directory)))
    assert lines[0].startswith("Not evaluated on held-out tasks yet")
    assert lines[-1].startswith("missing")


def test_a_campaign_that_only_froze_has_a_report(tmp_path: Path) -> None:
    directory = build(tmp_path, finish=False)
    for path in (directory.metrics, directory.updates, directory.events, directory.gates):
        path.unlink()
    directory.trace("train").unlink()
    assert "No update has been made yet." in page(directory).text


def test_a_report_during_a_write_leaves_the_torn_record_out(tmp_path: Path) -> None:
    directory = build(tmp_path, finish=False)
    directory.trace("train").write_bytes(directory.trace("train").read_bytes()[:-4])
    with directory.metrics.open("a") as file:
        file.write('{"update"')
    evidence = load_evidence(directory)
    assert len(evidence.train) == 35 and len(evidence.metrics) == 3


def test_closing_lines_hold_the_headline_numbers(tmp_path: Path) -> None:
    lines = summary_lines(summarize(load_evidence(build(tmp_path))))
    text = "\n".join(lines)
    assert "6 of 6 updates; mean reward 0.25 (first 2) -> 0.72 (last 3)" in text
    assert "base     8/24 solved (33%" in text
    assert "audit      no findings" in text
    assert max(map(len, lines)) < 100


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build(tmp_path)
    out = tmp_path / "page.html"
    assert command.main([str(directory.root), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")


DAMAGE: list[tuple[str, str, object]] = [
    ("metrics.jsonl", "reward_mean", 1e308),
    ("metrics.jsonl", "reward_mean", float("nan")),
    ("metrics.jsonl", "reward_std", float("inf")),
    ("metrics.jsonl", "seconds", -1e308),
    ("metrics.jsonl", "episodes", 10**400),
    ("metrics.jsonl", "staleness", {"0": 10**400}),
    ("events.jsonl", "time", 1e308),
    ("events.jsonl", "fields", {"stage": "x", "seconds": -(10**400)}),
    ("frozen.json", "created_at", 1e300),
]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    DAMAGE,
    ids=[f"{row[0]}-{row[1]}-{at}" for at, row in enumerate(DAMAGE)],
)
def test_a_number_beyond_measure_is_one_message(
    tmp_path: Path, name: str, key: str, value: object
) -> None:
    directory = build(tmp_path)
    before = write_report(directory).read_bytes()
    path = directory.root / name
    first, newline, rest = path.read_text().partition("\n")
    text = path.read_text() if name == "frozen.json" else first
    row = json.dumps({**json.loads(text), key: value})
    path.write_text(row if name == "frozen.json" else f"{row}{newline}{rest}")
    with pytest.raises(EvidenceError, match="nothing can have measured") as caught:
        command.main([str(directory.root)])
    assert name in caught.value.where and caught.value.remedy
    assert directory.report.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    ["events.jsonl", "metrics.jsonl", "traces/train.jsonl.zst", "arms.json", "gates.json"],
)
def test_a_folder_in_place_of_a_file_is_one_message(tmp_path: Path, name: str) -> None:
    directory = build(tmp_path)
    (directory.root / name).unlink()
    (directory.root / name).mkdir()
    with pytest.raises(EvidenceError, match="cannot be read: is a directory") as caught:
        command.main([str(directory.root)])
    assert caught.value.where.endswith(name) and caught.value.remedy


def test_visible_shows_what_browsers_would_hide() -> None:
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x1b\x7f\u200b\r\n\x9b") == "^[^?<U+200B>\n<U+009B>"
    assert visible("x" * 30, 10) == f"{'x' * 10}\n[... 20 more]"
    visible(HOSTILE + "\ud800").encode()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (12.34, "12.3 s"), (245, "4 min 05 s"), (7380, "2 h 03 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.37), (0, 9000), (-2.5, 3), (0, 1e-5)])
def test_ticks_are_few_and_cover_the_range(low: float, high: float) -> None:
    marks = charts.ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high - 1e-12 and 2 <= len(marks) <= 9


def test_chart_texts_are_escaped() -> None:
    bar = charts.Bar("<b>", 1.0, "<i>")
    svg = charts.bars([bar], label='"><script>', x_axis="x", y_axis="y")
    assert "<script>" not in svg and "<b>" not in svg and "<i>" not in svg


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine")
def test_a_real_browser_renders_it_without_complaint(tmp_path: Path) -> None:
    path = write_report(build(tmp_path))
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<circle") == 6 + 2
