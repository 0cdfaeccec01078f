"""Charts as inline SVG: no script, no network, colours from the page's style.

Invariants:
- Every text that reaches the SVG is escaped here.
- A chart holds its data as text too: each mark has a hover title.
- Colours are CSS classes, so the page's light and dark modes apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 40
_TICKS = 5  # about so many on an axis: more crowd a half-width chart


type Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One mark of a curve, with the band around it."""

    x: int
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line over some x, such as a mean."""

    x_from: int
    x_to: int
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    value: float
    title: str


@dataclass(frozen=True, slots=True)
class Range:
    """One row of an interval chart, all shares of 1."""

    label: str
    kind: str
    value: float
    low: float
    high: float
    text: str


def curve(
    points: Sequence[Point], levels: Sequence[Level], *, label: str, x_axis: str, y_axis: str
) -> Markup:
    """A line with a band, over whole-numbered x."""
    lows, highs = [point.low for point in points], [point.high for point in points]
    y_low, y_high = min(0.0, *lows), max(1.0, *highs)
    first, last = points[0].x, points[-1].x

    def x_of(x: float) -> float:
        span = last - first
        inside = _WIDTH - _LEFT - _RIGHT - 16
        return _LEFT + 8 + (inside * (x - first) / span if span else inside / 2)

    def y_of(y: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (y_high - y) / (y_high - y_low)

    upper = [f"{x_of(p.x):.1f},{y_of(p.high):.1f}" for p in points]
    lower = [f"{x_of(p.x):.1f},{y_of(p.low):.1f}" for p in reversed(points)]
    line = " ".join(f"{x_of(p.x):.1f},{y_of(p.y):.1f}" for p in points)
    parts = [
        _y_axis(ticks(y_low, y_high), y_of, y_axis),
        _x_axis([(x_of(x), str(x)) for x in _whole_ticks(first, last)], x_axis),
        f'<polygon class="band" points="{" ".join(upper + lower)}"/>',
    ]
    for level in levels:
        start, end, y = x_of(level.x_from) - 8, x_of(level.x_to) + 8, y_of(level.y)
        parts.append(
            f'<line class="level" x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{escape(level.title)}</title></line>"
        )
    parts.append(f'<polyline class="curve" points="{line}"/>')
    parts.extend(
        f'<circle class="mark" cx="{x_of(p.x):.1f}" cy="{y_of(p.y):.1f}" r="4">'
        f"<title>{escape(p.title)}</title></circle>"
        for p in points
    )
    return _svg(parts, _WIDTH, _HEIGHT, label)


def bars(rows: Sequence[Bar], *, label: str, x_axis: str, y_axis: str, height: int = 190) -> Markup:
    """Vertical bars from 0."""
    top = max((bar.value for bar in rows), default=0.0) or 1.0
    marks = ticks(0.0, top)
    top = max(top, marks[-1])
    floor = height - _BOTTOM
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(rows))
    wide = min(46.0, step * 0.66)

    def y_of(y: float) -> float:
        return _TOP + (floor - _TOP) * (top - y) / top

    every = max(1, math.ceil(len(rows) / 20))
    centres = [_LEFT + step * (index + 0.5) for index in range(len(rows))]
    labels = [
        (centre, bar.label)
        for index, (centre, bar) in enumerate(zip(centres, rows, strict=True))
        if index % every == 0
    ]
    parts = [_y_axis(marks, y_of, y_axis), _x_axis(labels, x_axis, height)]
    parts.extend(
        f'<rect class="bar" x="{centre - wide / 2:.1f}" y="{y_of(bar.value):.1f}" rx="2" '
        f'width="{wide:.1f}" height="{max(0.0, floor - y_of(bar.value)):.1f}">'
        f"<title>{escape(bar.title)}</title></rect>"
        for centre, bar in zip(centres, rows, strict=True)
    )
    return _svg(parts, _WIDTH, height, label)


def ranges(rows: Sequence[Range], *, label: str) -> Markup:
    """Shares with their intervals, one row each, on an axis from 0% to 100%."""
    left, right, row_height = 74, 60, 46
    height = 12 + row_height * len(rows) + 34
    floor = height - 34

    def x_of(share: float) -> float:
        return left + (_WIDTH - left - right) * share

    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = x_of(share)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{floor}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{floor + 18}" text-anchor="middle">'
            f"{share * 100:.0f}%</text>"
        )
    for index, row in enumerate(rows):
        y = 12 + row_height * (index + 0.5)
        kind = escape(row.kind)
        parts.append(
            f'<g class="range {kind}"><title>{escape(row.text)}</title>'
            f'<rect x="{x_of(row.low):.1f}" y="{y - 9:.1f}" rx="9" height="18" '
            f'width="{max(2.0, x_of(row.high) - x_of(row.low)):.1f}"/>'
            f'<circle cx="{x_of(row.value):.1f}" cy="{y:.1f}" r="6"/>'
            f'<text class="name" x="0" y="{y + 4:.1f}">{escape(row.label)}</text>'
            f'<text class="value" x="{_WIDTH}" y="{y + 5:.1f}" text-anchor="end">'
            f"{row.value * 100:.0f}%</text></g>"
        )
    return _svg(parts, _WIDTH, height, label)


def ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """Round numbers that cover [low, high], about `count` of them."""
    span = (high - low) or 1.0
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _whole_ticks(first: int, last: int) -> list[int]:
    step = max(1, math.ceil((last - first) / 12))
    return list(range(first, last + 1, step))


def _y_axis(marks: Sequence[float], y_of: Scale, title: str) -> str:
    digits = 0 if all(float(mark).is_integer() for mark in marks) else 2
    if digits and all(math.isclose(mark * 10, round(mark * 10)) for mark in marks):
        digits = 1
    parts: list[str] = []
    for mark in marks:
        y = y_of(mark)
        if y < 0:
            continue
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{mark:.{digits}f}</text>"
        )
    middle = (y_of(marks[0]) + y_of(marks[-1])) / 2
    parts.append(
        f'<text class="axis" transform="translate(11 {middle:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(title)}</text>'
    )
    return "".join(parts)


def _x_axis(labels: Sequence[tuple[float, str]], title: str, height: int = _HEIGHT) -> str:
    floor = height - _BOTTOM
    parts = [
        f'<text class="tick" x="{x:.1f}" y="{floor + 16}" text-anchor="middle">'
        f"{escape(text)}</text>"
        for x, text in labels
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{height - 6}" text-anchor="middle">'
        f"{escape(title)}</text>"
    )
    return "".join(parts)


def _svg(parts: Sequence[str], width: int, height: int, label: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
