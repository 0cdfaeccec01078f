"""Secrets, found in text and replaced.

Invariants:
- What is found is replaced by `[REDACTED:kind]`, which itself is no finding: scrubbing
  twice changes nothing more.
- A secret is found by its shape, or because it is known: the value of an environment
  variable whose name says so, or a line of a file that was given.
- No secret is ever part of a message, a count or a name here.
- Text without any shape's anchor costs one search per anchor and nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rl.errors import ConfigurationError
from rl.files import read_errors

# A shorter value is likely to be an ordinary word, which would be replaced everywhere.
MIN_ENVIRONMENT_CHARS: Final = 8
MIN_LISTED_CHARS: Final = 4  # whoever lists a value means it; below this it is in every text
SECRET_NAME: Final = re.compile(r"(?:KEY|TOKEN|SECRET)S?$|PASSWORD|PASSWD", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one kind of secret looks like.

    Attributes:
        kind: stands in its place.
        anchors: one of them is in every text that `pattern` matches.
        pattern: of the secret; where it has a group, only the group is replaced.
        any_case: whether the anchors, in lower case, stand for every spelling.
    """

    kind: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    any_case: bool = False


def _shape(kind: str, anchors: tuple[str, ...], pattern: str, *, any_case: bool = False) -> Shape:
    return Shape(kind, anchors, re.compile(pattern, re.ASCII), any_case)


# What may not stand before a secret is looked at behind its first letters: a pattern that
# begins with letters is searched for many times as fast.
SHAPES: Final = (
    _shape(
        "private-key",  # up to its end, or as far as it goes if it was cut
        ("PRIVATE KEY-----",),
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"
        r"(?:(?:(?!-----BEGIN)[\s\S])*?-----END [A-Z0-9 ]*PRIVATE KEY-----|[A-Za-z0-9+/=\s\\:,-]*)",
    ),
    _shape(
        "aws-key-id",
        ("AKIA", "ASIA"),
        r"A(?<![A-Za-z0-9]A)[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])",
    ),
    _shape(
        "aws-secret-key",
        ("secret_access_key", "secretaccesskey"),
        r"(?i:secret_?access_?key)[\"'\s:=\\]+([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
        any_case=True,
    ),
    _shape("github-token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9]{20,}"),
    _shape("github-token", ("github_pat_",), r"github_pat_[A-Za-z0-9_]{20,}"),
    _shape("gitlab-token", ("glpat-",), r"glpat-[A-Za-z0-9_-]{20,}"),
    _shape(
        "api-key",  # OpenAI's and Anthropic's; a digit tells them from hyphenated words
        ("sk-",),
        r"sk-(?<![A-Za-z0-9]sk-)(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}",
    ),
    _shape("stripe-key", ("k_live_",), r"[rs](?<![A-Za-z0-9][rs])k_live_[A-Za-z0-9]{16,}"),
    _shape("hf-token", ("hf_",), r"hf_(?<![A-Za-z0-9]hf_)[A-Za-z0-9]{30,}"),
    _shape("slack-token", ("xox", "xapp-"), r"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{10,}"),
    _shape("google-key", ("AIza",), r"AIza(?<![A-Za-z0-9]AIza)[A-Za-z0-9_-]{35}"),
    _shape("npm-token", ("npm_",), r"npm_(?<![A-Za-z0-9]npm_)[A-Za-z0-9]{36}"),
    _shape("pypi-token", ("pypi-AgEI",), r"pypi-AgEI[A-Za-z0-9_-]{40,}"),
    _shape(
        "jwt",
        ("eyJ",),
        r"eyJ(?<![A-Za-z0-9]eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,3}",
    ),
    _shape(
        "modal-token",
        ("ak-", "as-"),
        r"a(?<![A-Za-z0-9]a)[ks]-(?=[A-Za-z]*[0-9])[A-Za-z0-9]{22}(?![A-Za-z0-9])",
    ),
    _shape(
        "url-credentials",  # not a placeholder, such as ${PASSWORD} or <password>
        ("://",),
        r"://([^\s/@:\[\]\"'<>]*:[^\s/@$<{\"'][^\s/@\"'<>]*)@",
    ),
    _shape(
        "authorization",
        ("bearer", "authorization"),
        r"(?i:\bbearer\s+|\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|token)\s+)"
        r"((?=[A-Za-z._~+/=-]*[0-9=])[A-Za-z0-9._~+/=-]{16,})",
        any_case=True,
    ),
)


class Scrubber:
    """Finds and replaces secrets.

    Args:
        known: secrets themselves, each with its kind.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        spelled: dict[str, str] = {}
        for value, kind in (known or {}).items():
            for spelling in (value, json.dumps(value)[1:-1], quote(value, safe="")):
                spelled.setdefault(spelling, kind)
        # The longest first: one may contain another.
        self._known = sorted(spelled.items(), key=lambda item: (-len(item[0]), item[0]))

    def clean(self, text: str) -> bool:
        """Whether `text` holds no secret; cheap where no anchor is in it."""
        if any(value in text for value, _ in self._known):
            return False
        return not any(shape.pattern.search(text) for shape in _suspects(text))

    def scrub(self, text: str) -> tuple[str, Counter[str]]:
        """`text` without secrets, and how many of each kind were replaced."""
        counts: Counter[str] = Counter()
        while True:  # a secret may begin where another one ended
            text, found = self._replaced(text)
            if not found:
                return text, counts
            counts += found

    def _replaced(self, text: str) -> tuple[str, Counter[str]]:
        counts: Counter[str] = Counter()
        for value, kind in self._known:
            if found := text.count(value):
                counts[kind] += found
                text = text.replace(value, redacted(kind))
        for shape in _suspects(text):
            text, found = shape.pattern.subn(_replacement(shape), text)
            if found:
                counts[shape.kind] += found
        return text, counts


def _suspects(text: str) -> list[Shape]:
    """The shapes that have an anchor in `text`."""
    folded = text.lower()
    return [
        shape
        for shape in SHAPES
        if any(anchor in (folded if shape.any_case else text) for anchor in shape.anchors)
    ]


def redacted(kind: str) -> str:
    """What stands in the place of a secret."""
    return f"[REDACTED:{kind}]"


def known_secrets(environment: Mapping[str, str], listed: Path | None = None) -> dict[str, str]:
    """The secrets that this machine and a file tell of, each with its kind.

    Args:
        environment: variables by name.
        listed: a file with one secret a line.

    Raises:
        EvidenceError: the file can't be read.
        ConfigurationError: it is no text, or a line is too short to be looked for.
    """
    known = {
        value: "environment"
        for name, value in environment.items()
        if SECRET_NAME.search(name) and len(value) >= MIN_ENVIRONMENT_CHARS
    }
    return known | dict.fromkeys(_listed(listed), "listed") if listed else known


def _listed(path: Path) -> Iterable[str]:
    try:
        with read_errors(path):
            lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigurationError(
            "not UTF-8 text", str(path), "give a file with one secret a line"
        ) from None
    for number, line in enumerate(lines, 1):
        value = line.strip()
        if 0 < len(value) < MIN_LISTED_CHARS:
            raise ConfigurationError(
                f"a secret of fewer than {MIN_LISTED_CHARS} characters would be found everywhere",
                f"{path}:{number}",
                "give one whole secret a line",
            )
        if value:
            yield value


def _replacement(shape: Shape) -> Callable[[re.Match[str]], str]:
    mark = redacted(shape.kind)

    def replace(match: re.Match[str]) -> str:
        if not match.re.groups:
            return mark
        whole, start = match.group(), match.start()
        return whole[: match.start(1) - start] + mark + whole[match.end(1) - start :]

    return replace
