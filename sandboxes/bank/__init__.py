"""The embedded bank: Harbor packages made by code, offline, the same everywhere.

Invariants:
- `write_bank(root, families, count, seed)` gives the same bytes, and so the same
  content digests, on every machine.
- A package appears whole or not at all; one that is there with the same content
  is kept, one with other content is replaced.
- All instructions of a bank are distinct.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rl.errors import ConfigurationError
from sandboxes.bank.families import BUILDERS, Draft, Draw

FAMILIES: tuple[str, ...] = tuple(BUILDERS)
MAX_REDRAWS = 1000  # for a task that differs from all before it; beyond it the words are used up

_TASK_TOML = """\
schema_version = "1.4"

[metadata]
family = "{family}"
tier = 1

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 0.125
memory_mb = 128
network_mode = "no-network"
"""

_TEST_SH = """\
#!/bin/sh
# Checks the outcome only; everything else in the working directory must be as it was.
PATH=/usr/bin:/bin
export PATH
cd /app || exit 1
ok=1
check() {{
  if ! eval "$1"; then
    echo "failed: $1"
    ok=0
  fi
}}
{checks}
echo "$ok" > /logs/verifier/reward.txt
"""


def write_bank(root: Path, families: Sequence[str], count: int, seed: int) -> list[Path]:
    """Write `count` packages below `root`, balanced over `families` in turn.

    Args:
        root: folder of the packages; made if need be.
        families: names out of `FAMILIES`; empty means all.
        count: number of packages.
        seed: which tasks.

    Returns:
        The package folders, in the bank's order.

    Raises:
        ConfigurationError: a family is unknown, or has fewer distinct tasks.
    """
    chosen = tuple(families) or FAMILIES
    for name in chosen:
        if name not in BUILDERS:
            raise ConfigurationError(
                f"unknown task family '{name}'", "families", f"known: {', '.join(FAMILIES)}"
            )
    root.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    seen: set[str] = set()
    for index in range(count):
        family = chosen[index % len(chosen)]
        draft = _draw(family, index, seed, seen)
        label = draft.label.replace(".", "-").replace(" ", "-")
        paths.append(_place(root / f"{family}-{index:03d}-{label}", _files(family, draft)))
    return paths


def _draw(family: str, index: int, seed: int, seen: set[str]) -> Draft:
    """The first draft that differs from those before it."""
    for again in range(MAX_REDRAWS):
        draft = BUILDERS[family](Draw(f"{family}/{seed}/{index}/{again}"))
        if draft.instruction not in seen:
            seen.add(draft.instruction)
            return draft
    raise ConfigurationError(
        f"family '{family}' has no further distinct task", "tasks", "ask for fewer tasks"
    )


def _files(family: str, draft: Draft) -> dict[str, tuple[str, int]]:
    """Every file of a package with its mode."""
    files = {
        "task.toml": (_TASK_TOML.format(family=family), 0o644),
        "instruction.md": (draft.instruction + "\n", 0o644),
        "environment/Dockerfile": (_dockerfile(draft), 0o644),
        "solution/solve.sh": (f"#!/bin/sh\nset -e\ncd /app\n{draft.solution}\n", 0o755),
        "tests/test.sh": (_test_script(draft), 0o755),
    }
    for name, content in draft.files.items():
        files[f"environment/files/{name}"] = (content, 0o644)
    return files


def _dockerfile(draft: Draft) -> str:
    lines = ["FROM debian:bookworm-slim", "WORKDIR /app"]
    if draft.files:
        lines.append("COPY files/ /app/")
    lines += [f"RUN mkdir /app/{folder}" for folder in draft.folders]
    return "\n".join(lines) + "\n"


def _test_script(draft: Draft) -> str:
    conditions = list(draft.checks)
    for name, content in draft.files.items():
        if name not in draft.touched:
            text = content.replace("\n", "\\n")
            conditions.append(f"printf '{text}' | cmp -s - {name}")
    entries = len(draft.files) + len(draft.folders) + draft.extra_entries
    conditions.append(f"[ $(ls -A | wc -l) -eq {entries} ]")
    lines = [f"check {_quoted(condition)}" for condition in conditions]
    return _TEST_SH.format(checks="\n".join(lines))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _place(path: Path, files: dict[str, tuple[str, int]]) -> Path:
    """Write a package aside and rename it into place, unless it is there already."""
    if _is_there(path, files):
        return path
    aside = path.parent / f".{path.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    for name, (content, mode) in files.items():
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode())
        target.chmod(mode)
    if path.exists():
        shutil.rmtree(path)
    os.replace(aside, path)
    return path


def _is_there(path: Path, files: dict[str, tuple[str, int]]) -> bool:
    found = {item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file()}
    return found == set(files) and all(
        (path / name).read_bytes() == content.encode() for name, (content, _) in files.items()
    )
