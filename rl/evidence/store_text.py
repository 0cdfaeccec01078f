"""How the evidence of a state directory is shown to a person.

Invariants:
- A terminal gets tables and a bar; a log or a pipe gets plain lines with nothing in
  them that only a terminal understands.
- Names come from disk and may hold anything: they are shown as text, never as markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, override

from rl.evidence.archive_manifest import Meter

if TYPE_CHECKING:
    from rich.progress import Progress

    from rl.evidence.billing import Billing
    from rl.evidence.store import RunRow, Store

LOG_INTERVAL_S: Final = 20.0  # as of a campaign's progress in a log
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI = 1024.0
_SMALL_AMOUNT = 0.01  # below it, two decimals would show nothing


def size(count: float) -> str:
    """A number of bytes for a person."""
    for unit in _UNITS[:-1]:
        if count < _KIBI:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _KIBI
    return f"{count:.1f} {_UNITS[-1]}"


def when(moment: float | None) -> str:
    """A unix time for a person."""
    if moment is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def print_store(store: Store) -> None:
    """Show a state directory."""
    finished = [run for run in store.runs if run.status == "finished"]
    others = [run for run in store.runs if run.status != "finished"]
    _print_runs("Finished runs", finished)
    _print_runs("Runs that did not finish, or have not yet", others)
    if store.archives:
        rows = [
            (row.name, size(row.bytes), when(row.made_at), row.path or "-", row.original,
             row.problem or "-")
            for row in store.archives
        ]  # fmt: skip
        print_table("Archives", ("name", "size", "made", "holds", "original", "problem"), rows)
    rows = [(f"{row.name}/", str(row.entries), size(row.bytes), row.keep) for row in store.folders]
    print_table(f"Folders of {store.root}", ("folder", "entries", "size", "is"), rows)
    for run in store.runs:
        for problem in run.problems:
            _line(f"problem: {run.path}/{problem}; see: python -m rl.state verify {run.path}")
    for path in store.left_over:
        _line(
            f"left over: {path}; if no rl.state is at work, one was cut off (and a removal only "
            "begins when its archive is proven): delete it by hand"
        )


def _print_runs(title: str, runs: Sequence[RunRow]) -> None:
    if not runs:
        return
    rows = [
        (
            run.kind,
            run.run_id,
            when(run.begun),
            _status(run),
            " ".join(f"{name} {count}" for name, count in run.graded.items() if count) or "-",
            str(run.failed),
            str(run.checkpoints),
            "-" if run.findings is None else str(run.findings),
            size(run.bytes),
            run.archived,
        )
        for run in runs
    ]
    columns = (
        "kind", "run", "begun", "status", "graded", "failed", "checkpoints", "findings", "size",
        "archived",
    )  # fmt: skip
    print_table(title, columns, rows)


def _status(run: RunRow) -> str:
    """How far it came; a stage only where it says more."""
    if run.status in ("running", "unfinished") and run.stage:
        return f"{run.status}: {run.stage}"
    return run.status


def print_billing(billing: Billing, path: Path) -> None:
    """Show what a run cost, the estimate and the newest report side by side."""
    made = billing.estimate
    unit = made.currency
    _line(f"{billing.run_id} ({billing.kind}), {when(made.begun)} to {when(made.ended)}")
    rows = [
        (line.item, f"{line.quantity:,.1f} {line.unit}", f"{line.unit_price:.10g}",
         amount(line.amount), line.detail)
        for line in made.lines
    ]  # fmt: skip
    if rows:
        columns = ("item", "quantity", f"{unit} each", f"{unit}", "made of")
        print_table("Estimate from receipts", columns, rows)
    label = f"estimate, list prices of {made.prices_as_of}"
    totals = [(label, amount(made.total))]
    if billing.reports:
        newest = billing.reports[-1]
        told = "by the run's tag" if newest.tagged else "all of our apps in these hours"
        totals.append((f"{newest.provider}'s report, {told}", amount(newest.total)))
        totals += [(f"  of it {name}", amount(each)) for name, each in newest.by_resource.items()]
        totals.append((f"difference ({newest.provider} - estimate)", _signed(billing)))
        totals.append((f"workspace {newest.workspace}, fetched", when(newest.fetched_at)))
    else:
        totals.append(("provider's report", "not fetched (--fetch)"))
    print_table(f"Side by side, {unit}", ("what", unit), totals)
    for note in made.notes:
        _line(f"note: {note}")
    _line(f"written: {path}")


def amount(value: float) -> str:
    """An amount of money; a small one with the digits that it has."""
    return f"{value:.2f}" if value >= _SMALL_AMOUNT or value == 0 else f"{value:.2g}"


def _signed(billing: Billing) -> str:
    difference, total = billing.difference or 0.0, billing.estimate.total
    share = f" ({difference / total:+.1%})" if total else ""
    return f"{difference:+.2f}{share}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, aligned plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_plain(cell)) for cell in row))
        Console().print(table, "")
        return
    _line(f"{title}:")
    cells = [columns, *([_plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        _line(f"  {'  '.join(padded).rstrip()}")


def _line(text: str) -> None:
    sys.stdout.write(f"{_plain(text)}\n")


def _plain(text: str) -> str:
    """Text without control characters, which a name may hold."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@contextmanager
def progress() -> Generator[Meter]:
    """Progress on standard error: a bar on a terminal, a line now and then in a log."""
    if not sys.stderr.isatty():
        yield _LogMeter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _BarMeter(bar)


class _LogMeter(Meter):
    """Says how far it is where the last word was long ago."""

    def __init__(self) -> None:
        self._what, self._total, self._done = "", 0, 0
        self._said = time.monotonic()

    @override
    def begin(self, what: str, total: int) -> None:
        self._what, self._total, self._done = _plain(what), total, 0

    @override
    def advance(self, amount: int) -> None:
        self._done += amount
        if time.monotonic() - self._said >= LOG_INTERVAL_S:
            self._said = time.monotonic()
            done = f"{size(self._done)} of {size(self._total)}"
            sys.stderr.write(f"{self._what}: {done}\n")


class _BarMeter(Meter):
    """One bar, of the work at hand."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    @override
    def begin(self, what: str, total: int) -> None:
        self._bar.reset(self._task, description=_plain(what), total=total)

    @override
    def advance(self, amount: int) -> None:
        self._bar.advance(self._task, amount)
