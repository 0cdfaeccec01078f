"""The scanner finds exactly tomllib's keys, each on the line it was written on."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.toml_lines import KeyPath, key_lines

SCALARS = (
    "1",
    "0x1f",
    "inf",
    "1979-05-27 07:32:00",
    "1979-05-27T07:32:00Z",
    '"a # = [ ] { } \\" b"',
    "'c:\\no # comment'",
    '"""two\n[not.a.table]\n# no comment "" \\""""',
    "'''\nkey = 1\n'''''",
    '""""quoted"""""',
    '""',
    "[]",
)
KEYS = ("a", "b-1", "_c", "1", "é", "d e", 'q"', "x.y", "tab\t", "#", "]", "=", "")


@dataclass
class Writer:
    """A document in the making, and the lines that its keys stand on."""

    draw: st.DrawFn
    text: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def put(self, *choices: str) -> None:
        self.text += self.draw(st.sampled_from(choices))

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def key(self, *path: str | int) -> None:
        """The last part of `path`, in one of TOML's forms."""
        key = str(path[-1])
        self.note(path)
        escaped = key.replace('"', '\\"').replace("\t", "\\t")
        bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
        self.put(f'"{escaped}"', f"'{key}'", key if bare else f'"{escaped}"')

    def assignment(self, path: KeyPath, depth: int = 0) -> None:
        """`path` and its value; now and then by a dotted key."""
        self.key(*path)
        if self.draw(st.booleans()):
            self.put(".", " . ")
            path = (*path, self.draw(st.sampled_from(KEYS)))
            self.key(*path)
        self.put("=", " = ", "\t=")
        self.value(path, depth)

    def value(self, path: KeyPath, depth: int) -> None:
        kinds = ("scalar", "array", "table") if depth < 3 else ("scalar",)
        kind = self.draw(st.sampled_from(kinds))
        if kind == "scalar":
            self.put(*SCALARS)
        elif kind == "array":
            self.put("[")
            for index in range(self.draw(st.integers(0, 3))):
                self.put("", "\n", " # ] comment\n\t")
                self.value((*path, index), depth + 1)
                self.put(",", " ,\n")
            self.put("]", "\n]")
        else:
            if isinstance(path[-1], int):
                self.note(path)
            self.put("{", "{ ")
            for position, key in enumerate(self.keys()):
                self.text += "," if position else ""
                self.assignment((*path, key), depth + 1)
            self.put("}", " }")

    def keys(self) -> list[str]:
        return self.draw(st.lists(st.sampled_from(KEYS), max_size=3, unique=True))

    def body(self, table: KeyPath) -> None:
        """The lines below a header."""
        for key in self.keys():
            self.put("", "\n", "  # [comment]\n")
            self.assignment((*table, f"k{key}"))
            self.put("\n", " # a = 1\n")


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[KeyPath, int]]:
    """A document and the line of each of its keys."""
    out = Writer(draw)
    out.body(())
    for number in range(draw(st.integers(0, 2))):
        out.put("[", " [ ")
        out.key(f"t{number}")
        out.put(".", " . ")
        inner = draw(st.sampled_from(KEYS))
        out.key(f"t{number}", inner)
        out.put("]\n", " ] # [x]\n")
        out.body((f"t{number}", inner))
    for index in range(draw(st.integers(0, 2))):
        out.put("[[", "[[ ")
        out.key("steps")
        out.note(("steps", index))
        out.put("]]\n", " ]]\n\n")
        out.body(("steps", index))
        for deep in range(draw(st.integers(0, 2))):
            out.put("[[")
            out.text += "steps."
            out.key("steps", index, "deep")
            out.note(("steps", index, "deep", deep))
            out.put("]]\n")
            out.body(("steps", index, "deep", deep))
    return out.text, out.lines


def keys_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """Every key of a parsed document, and every table in an array."""
    found: set[KeyPath] = set()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if isinstance(value, dict) or isinstance(child, dict):
            found.add((*path, key))
        if isinstance(child, dict | list):
            found |= keys_of(child, (*path, key))
    return found


@settings(max_examples=80, deadline=None)
@given(documents())
def test_every_key_is_found_on_its_line(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, lines = document
    assert set(lines) == keys_of(tomllib.loads(text))
    assert key_lines(text) == lines


def test_deep_nesting_needs_no_deep_stack() -> None:
    text = "a = " + "[" * 2_000 + "]" * 2_000
    assert key_lines(text) == {("a",): 1}
