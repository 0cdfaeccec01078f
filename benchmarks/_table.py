"""What benchmarks print and keep: one table, one JSON file, the machine they ran on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl.files import write_json

RESULTS = Path("state/benchmarks")


def machine() -> dict[str, Any]:
    """Where and when, so that a number can be read later."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "harbor": metadata.version("harbor"),
        "ray": metadata.version("ray"),
    }


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows`, all with the same keys, as a table."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)


def keep(name: str, rows: Sequence[Mapping[str, Any]], **extra: Any) -> Path:
    """Write the result of benchmark `name`; returns the file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_json(path, {"machine": machine(), **extra, "rows": [dict(row) for row in rows]})
    return path


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
