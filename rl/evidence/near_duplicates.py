"""Held-out tasks whose instruction is a training task's with light edits.

The rule, for a held-out and a training task:

1. Their texts are alike: `similarity` is at least `THRESHOLD`.  It is the Jaccard
   similarity of the two multisets of word pairs, the ends of the text included; case,
   Unicode's compatibility forms, white space and punctuation don't matter.
2. And they are not two tasks of one family that are told apart by name.  What a bank
   makes from one template is alike by design: "Create a directory named harbor." is
   held out, not copied, when "Create a directory named amber." is trained on.  So a
   pair of the same declared family is left out if each text names something more often
   than the other mentions it.  Names are whatever has a digit or a mark inside or
   before it (`4`, `a.txt`, `src/lib`, `-v`), stands in quotes, backticks or square
   brackets, is in capitals, follows "named" or "called" or ends a clause behind
   "directory" or "folder", and the words of the package's own name.

Invariants:
- Exact: every pair of tasks is compared, by an index of the word pairs they share.
- Pure and symmetric.  Equal texts have similarity 1, name the same things, and are
  always reported.

Not found: a copy whose names were changed within its family, a text of fewer than about
20 words with a word replaced, and a task that was put into entirely other words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Final

import numpy as np

from rl.records import TaskRef

# Between what must not be reached and what must be, as measured in docs/statistics.md: tasks
# of different families are 0.25 alike at most and those of short templates 0.6, while a copied
# text of 40 words or more stays 0.75 alike through three replaced words, a sentence more, or
# its sentences in another order.
THRESHOLD: Final = 0.7

_INVISIBLE: Final = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u2060\ufeff"))
_UNSPACED: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # scripts without spaces: kana, han
_WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_QUOTED: Final = re.compile(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”|\[([^\]]+)\]|(?<!\w)'([^']+)'(?!\w)")
_INTRODUCED: Final = re.compile(
    r"\b(?:named|called)\s+(\w+)|\b(?:directory|folder)\s+(\w+)(?=\s*(?:[.,;:]|$))", re.IGNORECASE
)
_MARKED: Final = re.compile(r"\d|\w[^\w\s'’]+\w|_|^[./~$@-]+\w|\w/$")
_AROUND: Final = "()[]{}<>\"'`“”‘’*,;:!?"


@dataclass(frozen=True, slots=True)
class NearDuplicate:
    """A held-out task and a training task that it repeats."""

    heldout: TaskRef
    train: TaskRef
    similarity: float


def similarity(a: str, b: str) -> float:
    """How alike two instructions are: from 0, no pair of words in common, to 1, the same words."""
    first, second = _pairs(a), _pairs(b)
    return len(first & second) / len(first | second)


def near_duplicates(
    train: Sequence[TaskRef], heldout: Sequence[TaskRef], threshold: float = THRESHOLD
) -> list[NearDuplicate]:
    """The pairs that the rule holds for, most similar first, then by name."""
    if not 0 < threshold <= 1:
        raise ValueError(f"a threshold of {threshold}")

    @cache
    def held(index: int) -> _Named:
        return _Named.of(heldout[index])

    @cache
    def trained(index: int) -> _Named:
        return _Named.of(train[index])

    found = [
        NearDuplicate(heldout[h], train[t], alike)
        for h, t, alike in _alike(train, heldout, threshold)
        if not (heldout[h].family == train[t].family != "" and held(h).told_apart(trained(t)))
    ]
    return sorted(found, key=lambda pair: (-pair.similarity, pair.heldout.name, pair.train.name))


# --- texts that are alike ----------------------------------------------------


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_INVISIBLE)


def _words(text: str) -> list[str]:
    return _WORD.findall(_plain(text).casefold())


def _pairs(text: str) -> frozenset[str]:
    """The multiset of its word pairs: each with how often it came before."""
    seen: Counter[str] = Counter()
    pairs: list[str] = []
    for a, b in pairwise(["", *_words(text), ""]):
        pair = f"{a} {b}"
        pairs.append(f"{pair} {seen[pair]}")
        seen[pair] += 1
    return frozenset(pairs)


def _alike(
    train: Sequence[TaskRef], heldout: Sequence[TaskRef], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """Indices of every held-out and training task whose similarity reaches the threshold."""
    sizes = np.zeros(len(train))
    holders: dict[str, list[int]] = defaultdict(list)
    for t, task in enumerate(train):
        pairs = _pairs(task.instruction)
        sizes[t] = len(pairs)
        for pair in pairs:
            holders[pair].append(t)
    rows = {pair: np.array(tasks) for pair, tasks in holders.items()}
    for h, task in enumerate(heldout):
        pairs = _pairs(task.instruction)
        held = [rows[pair] for pair in pairs if pair in rows]
        if held:
            common = np.bincount(np.concatenate(held), minlength=len(train))
            alike = common / (len(pairs) + sizes - common)
            for t in np.flatnonzero(alike >= threshold):
                yield h, int(t), float(alike[t])


# --- tasks of one family that are told apart by name -------------------------


@dataclass(frozen=True, slots=True)
class _Named:
    """A task's text and the names in it, all as phrases: each word between two spaces."""

    text: str
    names: frozenset[str]

    @classmethod
    def of(cls, task: TaskRef) -> _Named:
        text = _plain(task.instruction)
        runs = [run.strip(_AROUND).rstrip("." + _AROUND) for run in text.split()]
        found = [run for run in runs if _MARKED.search(run) or (run.isupper() and len(run) > 1)]
        for match in chain(_QUOTED.finditer(text), _INTRODUCED.finditer(text)):
            found += [group for group in match.groups() if group]
        names = {_phrase(_words(name)) for name in found}
        names.update(_phrase([word]) for word in _words(task.name))
        return cls(_phrase(_words(text)), frozenset(names - {""}))

    def told_apart(self, other: _Named) -> bool:
        return self._names_more(other) and other._names_more(self)

    def _names_more(self, other: _Named) -> bool:
        """Whether this text mentions some name of its own more often than the other does."""
        return any(self.text.count(name) > other.text.count(name) for name in self.names)


def _phrase(words: Sequence[str]) -> str:
    return "".join(f" {word} " for word in words)
