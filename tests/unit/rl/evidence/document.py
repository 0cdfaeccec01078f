"""docs/statistics.md, as the tests that produce its numbers read it."""

from __future__ import annotations

from pathlib import Path

TEXT = Path("docs/statistics.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table of the section with that heading, without its header."""
    section = TEXT.split(f"# {heading}\n", maxsplit=1)[1].split("\n#", maxsplit=1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
