"""The image that a package is built from on Modal, pinned.

Invariants:
- A package's own Dockerfile is followed to the letter, but for a floating base that
  the pinned image stands for: tags move, and a campaign's sandboxes must not.
- A base that is pinned by the package, or that nothing here stands for, is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

PINNED = Path(__file__).parent / "images" / "terminal.Dockerfile"
# The bank's base, and the plain one that it is like: a terminal with git and Python.
STANDS_FOR = frozenset({"python:3.12-bookworm", "debian:bookworm-slim", "debian:bookworm"})
_FLAGS = re.IGNORECASE | re.MULTILINE
_FROM = re.compile(r"^[ \t]*FROM[ \t]+(?:docker\.io/)?(?:library/)?(\S+)[ \t]*$", _FLAGS)
_ANY_FROM = re.compile(r"^[ \t]*FROM\b", _FLAGS)


def pinned_dockerfile(text: str, image: Path = PINNED) -> str | None:
    """The Dockerfile `text` on the pinned base; None where it is to stay as it is.

    A build of several stages stays as it is: which base its result has is its own affair.
    """
    found = _FROM.search(text)
    if found is None or found[1] not in STANDS_FOR or len(_ANY_FROM.findall(text)) != 1:
        return None
    return text[: found.start()] + image.read_text(encoding="utf-8").rstrip() + text[found.end() :]
