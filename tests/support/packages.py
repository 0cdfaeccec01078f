"""Small Harbor task packages, written by hand for the tests that only read them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

TASK_TOML = """\
schema_version = "1.4"

[metadata]
family = "{family}"
tier = {tier}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 0.125
memory_mb = 128
network_mode = "no-network"
"""


def write_package(root: Path, name: str = "rm-old", family: str = "rm", tier: int = 1) -> Path:
    """The folder of a complete package `name` below `root`; its content depends on its name."""
    path = root / name
    files = {
        "task.toml": TASK_TOML.format(family=family, tier=tier),
        "instruction.md": f"Delete the file {name}.txt\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n",
        f"environment/files/{name}.txt": "old\n",
        "solution/solve.sh": f"#!/bin/sh\nrm /app/{name}.txt\n",
        "tests/test.sh": "#!/bin/sh\nls -A /app | wc -l > /logs/verifier/reward.txt\n",
    }
    for relative, content in files.items():
        target = path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        target.chmod(0o755 if relative.endswith(".sh") else 0o644)
    return path


def expectations(package: Path) -> list[dict[str, Any]]:
    """What the verifier of one of the bank's packages expects; nothing for tier 1."""
    file = package / "tests" / "expected.py"
    if not file.exists():
        return []
    return ast.literal_eval(file.read_text(encoding="ascii").removeprefix("EXPECTED = "))
