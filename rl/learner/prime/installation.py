"""What prime-rl's interpreter says about itself, held against what is pinned.

Invariant: nothing is trained by an installation whose wire type, contract sources
or understanding of our configuration differ from the pinned commit's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from rl.errors import ConfigurationError
from rl.learner.prime import inspect_prime
from rl.learner.prime.pinned import COMMIT, INSTALL, MICRO_BATCH_FIELDS, SOURCES
from rl.learner.prime.settings import first_difference

SCRIPT: Final = Path(inspect_prime.__file__)
_SHOWN_SOURCES = 3


def question(config_file: Path) -> str:
    """What the script is asked on its standard input: a config to parse, sources to hash."""
    return json.dumps({"config": str(config_file), "sources": sorted(SOURCES)})


def check_answer(answer: str, where: str, sent: Mapping[str, Any]) -> None:
    """Raise unless the script's answer agrees with the pinned commit.

    Args:
        answer: the script's standard output.
        where: the interpreter.
        sent: the configuration that it was given.

    Raises:
        ConfigurationError: naming the first thing that differs.
    """
    lines = answer.strip().splitlines()
    try:
        parsed: Any = json.loads(lines[-1]) if lines else None
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigurationError("prime-rl's interpreter gave no answer", where, INSTALL)
    found = cast(dict[str, Any], parsed)
    if found.get("error"):
        raise ConfigurationError(f"prime-rl can't be used: {found['error']}", where, INSTALL)
    _check_wire(found, where)
    _check_sources(found, where)
    if found.get("config_error"):
        raise ConfigurationError(
            f"prime-rl refuses the configuration: {found['config_error']}",
            where,
            "change the trainer's section, or install the pinned commit",
        )
    difference = first_difference(sent, cast(dict[str, Any], found.get("config") or {}))
    if difference is not None:
        raise ConfigurationError(
            f"prime-rl understands the configuration otherwise: {difference}", where, INSTALL
        )


def _check_wire(found: Mapping[str, Any], where: str) -> None:
    fields = tuple(cast(list[str], found.get("fields") or []))
    if fields[: len(MICRO_BATCH_FIELDS)] != MICRO_BATCH_FIELDS:
        pairs = zip(fields, MICRO_BATCH_FIELDS, strict=False)
        at = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), len(fields))
        theirs = fields[at] if at < len(fields) else "nothing"
        raise ConfigurationError(
            f"MicroBatch has {theirs} where {MICRO_BATCH_FIELDS[at]} is expected (field {at}): "
            "batches would be read wrongly",
            where,
            INSTALL,
        )
    if not found.get("array_like"):
        raise ConfigurationError("MicroBatch no longer travels by position", where, INSTALL)


def _check_sources(found: Mapping[str, Any], where: str) -> None:
    hashes = cast(dict[str, str | None], found.get("sources") or {})
    other = [name for name, digest in SOURCES.items() if hashes.get(name) != digest]
    if other:
        shown = ", ".join(other[:_SHOWN_SOURCES])
        more = f" and {len(other) - _SHOWN_SOURCES} more" if len(other) > _SHOWN_SOURCES else ""
        raise ConfigurationError(f"not commit {COMMIT[:9]}: {shown}{more} differ", where, INSTALL)
