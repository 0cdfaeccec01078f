"""The packages benchmark measures the same work on both sides."""

from __future__ import annotations

from pathlib import Path

from benchmarks.packages import harbor, measure, ours, write_packages
from sandboxes.tasks import load_folder


def test_both_loaders_list_every_generated_package(tmp_path: Path) -> None:
    write_packages(tmp_path, 4)
    assert ours(tmp_path) == harbor(tmp_path) == 4
    assert all(not package.warnings for package in load_folder(tmp_path))


def test_rates_are_compared_to_harbors() -> None:
    rows = measure(2, 1)
    assert [row["loader"] for row in rows] == ["rl.prepare tasks", "harbor"]
    assert rows[1]["ratio to harbor"] == 1.0
