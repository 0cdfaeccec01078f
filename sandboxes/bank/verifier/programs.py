"""What a program of the agent's does with inputs that the agent has not seen."""

from __future__ import annotations

import os

from . import confined
from .files import WRONG, compare_lines, read
from .scratch import give_away, scratch, write

__all__ = ["WRONG", "program"]


def program(
    argv: list[str],
    uses: list[str],
    given: dict[str, str],
    prints: str | None,
    exits: int,
    leaves: dict[str, str | None],
    signals: list[list[str]],
    within_s: float,
) -> str | None:
    """See `expect.program`."""
    with scratch() as folder:
        for name in uses:
            write(folder, name, read(name), os.stat(name).st_mode & 0o111)
        for name, content in given.items():
            write(folder, name, content.encode(), 0)
        give_away(folder)
        ended = confined.run(argv, folder, within_s, signals)
        if ended.code is None:
            return f"{' '.join(argv)} ran longer than {within_s} s"
        if ended.code != exits:
            return f"{' '.join(argv)} ended with {ended.code}, not {exits}"
        problem = None if prints is None else compare_lines(ended.output, prints)
        if problem:
            return f"{' '.join(argv)} printed something else: {problem}"
        for name, content in leaves.items():
            path = os.path.join(folder, name)
            if content is None:
                if os.path.lexists(path):
                    return f"{name} was left"
            elif problem := compare_lines(read(path).decode("utf-8"), content):
                return f"{name}: {problem}"
    return None
