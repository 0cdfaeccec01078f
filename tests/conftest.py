"""What every test gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before Ray, Harbor or transformers are imported by anything.
os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, so that no file has to say it."""
    for item in items:
        relative = item.path.relative_to(ROOT / "tests").parts if item.path else ()
        if relative and relative[0] in ("integration", "chaos"):
            item.add_marker(getattr(pytest.mark, relative[0]))
