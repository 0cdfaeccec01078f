"""A task before it is written, and the files of its package.

Invariants:
- Every set-up file that a task does not name in `changes` must hold the same bytes
  when the task is graded.
- What is expected stands in the package's tests alone, which reach a sandbox when
  the agent is gone; the set-up script is removed from it before the agent comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, unchanged

# Has python3, git, tar and the usual compressors; a local sandbox shows this
# machine's /usr in its place.
IMAGE = "python:3.12-bookworm"
VERIFIER = Path(__file__).parent / "verifier"

type Files = dict[str, tuple[bytes, int]]
"""Every file of a package with its mode, by its path in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; all names are relative to the working directory, /app.

    Attributes:
        label: words for the package's name.
        instruction: what the agent is told.
        files: set-up files and their content.
        setup: shell commands that complete the environment when it is built.
        solution: shell commands that solve the task.
        expect: what holds when it is solved.
        changes: set-up files that the set-up or a solution changes.
    """

    label: str
    instruction: str
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, str | bytes])
    setup: str = ""
    solution: str
    expect: tuple[Expectation, ...]
    changes: tuple[str, ...] = ()


type Builder = Callable[[Draw], Task]

_TASK_TOML = """\
schema_version = "1.4"

[metadata]
family = "{family}"
tier = {tier}

[agent]
timeout_sec = 900.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 0.125
memory_mb = 128
network_mode = "no-network"
"""

# env -i and -I -S: neither variables, nor a home, nor a site directory, nor a module
# in the working directory takes part.
_TEST_SH = """\
#!/bin/sh
for python in /usr/bin/python3 /usr/local/bin/python3; do
  if [ -x "$python" ]; then
    exec /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin LC_ALL=C.UTF-8 \\
      "$python" -I -S -B -c \\
      "import sys; sys.path.insert(0, '/tests'); from verifier.check import main; main()"
  fi
done
echo "there is no python3 in /usr"
exit 1
"""


def task_files(family: str, tier: int, task: Task) -> Files:
    """The package of a task."""
    kept = [
        unchanged(name, content) for name, content in task.files.items() if name not in task.changes
    ]
    expected = "".join(f"    {item!a},\n" for item in (*task.expect, *kept))
    solution = f"#!/bin/bash\nset -euo pipefail\ncd /app\n{task.solution.strip()}\n"
    text = {
        "task.toml": _TASK_TOML.format(family=family, tier=tier),
        "instruction.md": task.instruction.strip() + "\n",
        "environment/Dockerfile": _dockerfile(task),
        "tests/expected.py": f"EXPECTED = [\n{expected}]\n",
    }
    files: Files = {name: (content.encode(), 0o644) for name, content in text.items()}
    files["solution/solve.sh"] = (solution.encode(), 0o755)
    files["tests/test.sh"] = (_TEST_SH.encode(), 0o755)
    for name, content in _verifier().items():
        files[f"tests/verifier/{name}"] = (content, 0o644)
    if task.setup:
        files["environment/setup.sh"] = (f"set -eu\n{task.setup.strip()}\n".encode(), 0o644)
    for name, content in task.files.items():
        files[f"environment/files/{name}"] = (_bytes(content), 0o644)
    return files


@functools.cache
def _verifier() -> dict[str, bytes]:
    """The verifier's modules."""
    return {path.name: path.read_bytes() for path in sorted(VERIFIER.glob("*.py"))}


def _dockerfile(task: Task) -> str:
    lines = [f"FROM {IMAGE}", "WORKDIR /app"]
    if task.files:
        lines.append("COPY files/ /app/")
    if task.setup:
        lines.append("COPY setup.sh /tmp/setup.sh")
        lines.append("RUN sh /tmp/setup.sh && rm /tmp/setup.sh")
    return "\n".join(lines) + "\n"


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
