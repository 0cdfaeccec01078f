"""Draws that a task is made from.

Invariant: only integer draws of a generator seeded with text, so they are the same
on every machine, version of Python and hash seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sandboxes.bank.words import FILES, TEXT_SUFFIXES, THINGS


class Draw:
    """The random choices of one task.

    Args:
        seed: all that the choices depend on.
        index: which of its family's tasks this is, from 0; families go through
            their variants by it.
    """

    def __init__(self, seed: str, index: int = 0) -> None:
        self.index = index
        self._random = random.Random(seed)
        self._used: set[str] = set()

    def number(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + self._random.randrange(high - low + 1)

    def choice[T](self, items: Sequence[T]) -> T:
        """One item."""
        return items[self._random.randrange(len(items))]

    def variant[T](self, items: Sequence[T]) -> T:
        """The item whose turn it is among the family's tasks."""
        return items[self.index % len(items)]

    def shuffled[T](self, items: Sequence[T]) -> list[T]:
        """All items in another order."""
        left = list(items)
        return [left.pop(self._random.randrange(len(left))) for _ in range(len(left))]

    def pick(self, words: tuple[str, ...]) -> str:
        """One word that this task has not used."""
        while True:
            word = words[self._random.randrange(len(words))]
            if word not in self._used:
                self._used.add(word)
                return word

    def picks(self, words: tuple[str, ...], count: int) -> list[str]:
        """That many words, none of which this task has used."""
        return [self.pick(words) for _ in range(count)]

    def file(self, suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> str:
        """A file name."""
        return f"{self.pick(FILES)}.{suffixes[self._random.randrange(len(suffixes))]}"

    def content(self) -> str:
        """A file's text: a few words."""
        words = [THINGS[self._random.randrange(len(THINGS))] for _ in range(3)]
        return " ".join(words) + "\n"

    def bystanders(self) -> dict[str, str]:
        """One or two files that the task does not speak of."""
        return {self.file(): self.content() for _ in range(1 + self._random.randrange(2))}
