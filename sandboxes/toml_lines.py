"""The lines that the keys of a TOML document stand on, which tomllib does not tell.

Invariants:
- For a text that tomllib accepts, `key_lines` knows exactly the keys that tomllib
  finds: dotted, quoted, of inline tables, and of arrays of tables by their index.
- A key's line is that of its first mention, which for a table is its header.
- Nesting costs memory, never the interpreter's stack.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from collections.abc import Sequence

type KeyPath = tuple[str | int, ...]
"""A key by its tables; an integer is an index in an array of tables."""

_BLANK = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_LINE_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
# A date may be followed by a space and its time; nothing else holds one.
_BARE_VALUE = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+[^,\]}\s#]*|[^,\]}\s#]+")
_CLOSE = {
    '"""': re.compile(r'(?:[^\\"]++|\\.|"(?!""))*+"""("{0,2})', re.DOTALL),
    "'''": re.compile(r"(?:[^']++|'(?!''))*+'''('{0,2})"),
}
_BRACKETS = {"[": "]", "{": "}"}


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, of every key of `text`.

    Args:
        text: a document that tomllib accepts, with "\\n" for line ends.
    """
    return _Scanner(text).scan()


class _Scanner:
    """One pass over a document."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._sizes: dict[KeyPath, int] = {}  # of the arrays of tables that headers make
        self._lines: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        """The document's keys."""
        table: KeyPath = ()
        self._pass(_BLANK)
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._value(self._note(table, self._keys()))
            self._pass(_BLANK)
        return self._lines

    def _header(self) -> KeyPath:
        """The table that `[a.b]` or `[[a.b]]` opens."""
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        keys = self._keys()
        self._at = self._text.index("]", self._at) + (2 if array else 1)
        table = self._note((), keys)
        if not array:
            return table
        index = self._sizes.get(table, 0)
        self._sizes[table] = index + 1
        return self._note(table, [index])

    def _note(self, table: KeyPath, keys: Sequence[str | int]) -> KeyPath:
        """Note the line of `keys` below `table`; in an array of tables its last is meant."""
        line = bisect.bisect_left(self._ends, self._at) + 1
        for position, key in enumerate(keys):
            table = (*table, key)
            self._lines.setdefault(table, line)
            if position < len(keys) - 1 and table in self._sizes:
                table = (*table, self._sizes[table] - 1)
        return table

    def _keys(self) -> list[str]:
        """A possibly dotted key."""
        self._pass(_BLANK)
        keys: list[str] = []
        while True:
            found = _KEY.match(self._text, self._at)
            if found is None:
                raise ValueError(f"no key at character {self._at}")
            self._at = found.end()
            keys.append(_unquoted(found.group()))
            if not self._pass(_DOT):
                return keys

    def _value(self, path: KeyPath) -> None:
        """Pass over `= value`, whose key is `path`, and note the keys in it."""
        self._at = self._text.index("=", self._at) + 1
        wanted: KeyPath | None = path  # whose value comes next; None: it is not known yet
        containers: list[tuple[str, KeyPath]] = []  # closing bracket and path of those open
        sizes: list[int] = []
        while True:
            self._pass(_BLANK)
            char = self._text[self._at]
            if wanted is None and char in ("]", "}"):
                self._at += 1
                containers.pop()
                sizes.pop()
            elif wanted is None and char == ",":
                self._at += 1
                continue
            elif wanted is None:
                closing, inside = containers[-1]
                if closing == "}":
                    wanted = self._note(inside, self._keys())
                    self._at = self._text.index("=", self._at) + 1
                else:
                    wanted = (*inside, sizes[-1])
                    sizes[-1] += 1
                continue
            elif char in _BRACKETS:
                if char == "{":
                    self._note(wanted[:-1], wanted[-1:])
                self._at += 1
                containers.append((_BRACKETS[char], wanted))
                sizes.append(0)
                wanted = None
                continue
            else:
                self._scalar()
                wanted = None
            if not containers:
                return

    def _scalar(self) -> None:
        opening = self._text[self._at : self._at + 3]
        if opening in _CLOSE:
            self._at += 3
            self._pass(_CLOSE[opening])
        elif not self._pass(_LINE_STRING):
            self._pass(_BARE_VALUE)

    def _pass(self, pattern: re.Pattern[str]) -> bool:
        """Go behind `pattern` if it is here; says whether it was."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return False
        self._at = found.end()
        return True


def _unquoted(key: str) -> str:
    if key.startswith('"'):
        return next(iter(tomllib.loads(f"{key} = 0")))
    return key[1:-1] if key.startswith("'") else key
