"""What a reply asks for: a command, nothing, or something that can't be run.

Invariants:
- Nothing here raises on what a model wrote: a call that can't be used is a
  `Malformed` with a note that tells the model why.
- A call that the model did not finish is never a `Command`, whatever ended it.
- A `Command` can be an argument of a process: it has no NUL character and no
  lone surrogate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall

TOOL_NAME = "bash"
FENCE = "```"
FENCE_STOP = f"\n{FENCE}"
FENCE_LANGUAGES = ("", "bash", "sh", "shell")
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run, and how many further calls of the same reply are left out."""

    text: str
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """The model tried to call and failed, or was cut; `note` is what it is told."""

    problem: Literal["cut", "malformed"]
    note: str


@dataclass(frozen=True, slots=True)
class NoCall:
    """The model wrote no call at all, and ended its turn."""


Call = Command | Malformed | NoCall

_CUT = Malformed("cut", "Your reply was cut off at the length limit. Write less in one reply.")
CUT_IN_CALL = Malformed(
    "cut",
    "Your reply was cut off at the length limit inside a command; it was not run. "
    "Write it again, shorter, or do it in several steps.",
)
UNREADABLE = Malformed("malformed", "Your tool call can't be read; it was not run.")


def tool_call(calls: Sequence[ParsedToolCall], cut: bool) -> Call:
    """The call among those a renderer parsed; `cut` says that the length limit ended the reply."""
    if not calls:
        return _CUT if cut else NoCall()
    first = calls[0]
    if first.status != "ok":
        if cut and first.status == "unclosed_block":
            return CUT_IN_CALL
        return _malformed(f"Your tool call is malformed ({first.status}); it was not run.")
    if first.name != TOOL_NAME:
        return _malformed(f"There is no such tool; the only one is '{TOOL_NAME}'.")
    arguments = first.arguments
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str):
        return _malformed("The bash tool needs a string argument 'command'.")
    return _command(command, len(calls) - 1)


def fenced_call(text: str, cut: bool) -> Call:
    """The first fenced bash block of `text`."""
    blocks = [match.groups() for match in _BLOCK.finditer(text)]
    shell = [body for language, body in blocks if language.strip() in FENCE_LANGUAGES]
    if shell:
        return _command(shell[0].strip("\n"), len(shell) - 1)
    if fence_is_open(text):
        if cut:
            return CUT_IN_CALL
        return _malformed("Your code block was not closed; it was not run.")
    if blocks:
        return _malformed("Your code block is not marked as bash; it was not run.")
    return _CUT if cut else NoCall()


def fence_is_open(text: str) -> bool:
    """Whether a fence is left in `text` that no later one closes."""
    return FENCE in _BLOCK.sub("", text)


def _command(text: str, left_out: int) -> Call:
    if not text.strip():
        return _malformed("Your command is empty.")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        return _malformed("Your command holds a character that no command can hold.")
    return Command(text, left_out)


def _malformed(note: str) -> Malformed:
    return Malformed("malformed", note)
