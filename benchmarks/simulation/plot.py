"""One SVG per workload: step time, use of trainer and slots, waste, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from benchmarks.simulation.results import Result
from rl.evidence.charts import Bar, bars
from rl.files import write_bytes

_WIDTH, _HEIGHT, _GAP, _HEAD = 560, 190, 16, 36
_COLUMNS = 2
_STYLE = """
text { font: 11px sans-serif; fill: #444 }
.title { font-size: 16px; font-weight: bold }
.grid { stroke: #ddd }
.bar { fill: #4269d0 }
"""


def write_plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the plots of `results` into `folder`; returns the files.

    Raises:
        InfrastructureError: the folder can't be written.
    """
    paths: list[Path] = []
    for name in dict.fromkeys(result.workload for result in results):
        path = folder / f"{name}.svg"
        own = [result for result in results if result.workload == name]
        write_bytes(path, plot(own).encode())
        paths.append(path)
    return paths


def plot(results: Sequence[Result]) -> str:
    """The panels of one workload, a whole SVG document."""
    panels = [
        _step_time(results),
        _shares(results, "trainer utilisation", [r.trainer_utilisation for r in results]),
        _shares(results, "replica utilisation", [r.replica_utilisation for r in results]),
        _shares(results, "waste", [r.tally.waste for r in results]),
        *(_staleness(result) for result in results),
    ]
    rows = -(-len(panels) // _COLUMNS)
    width = _COLUMNS * (_WIDTH + _GAP) + _GAP
    height = _HEAD + rows * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
        Markup('<text class="title" x="{}" y="24">{}</text>').format(_GAP, results[0].workload),
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        x, y = _GAP + column * (_WIDTH + _GAP), _HEAD + row * (_HEIGHT + _GAP)
        size = f'<svg x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        parts.append(str(panel).replace("<svg ", size, 1))  # a Markup would escape it
    return "".join([*parts, "</svg>\n"])


def _step_time(results: Sequence[Result]) -> Markup:
    bound = results[0].bound.step_s
    rows = [
        Bar("bound", bound, f"lower bound: {bound:.1f} s"),
        *(
            Bar(r.policy, r.step_time_s, f"{r.policy}: {r.step_time_s:.1f} s per step")
            for r in results
        ),
    ]
    return bars(rows, label="step time", x_axis="step time by policy", y_axis="s")


def _shares(results: Sequence[Result], what: str, values: Sequence[float]) -> Markup:
    rows = [
        Bar(result.policy, 100 * value, f"{result.policy}: {value:.2%}")
        for result, value in zip(results, values, strict=True)
    ]
    return bars(rows, label=what, x_axis=f"{what} by policy", y_axis="%")


def _staleness(result: Result) -> Markup:
    total = sum(result.tally.staleness.values())
    rows: list[Bar] = []
    for staleness in range(result.max_staleness + 1):
        share = result.tally.staleness[staleness] / total
        text = f"{result.policy}: {share:.1%} of trained episodes at staleness {staleness}"
        rows.append(Bar(str(staleness), 100 * share, text))
    title = f"staleness, {result.policy}"
    return bars(rows, label=title, x_axis=title, y_axis="% of episodes")
