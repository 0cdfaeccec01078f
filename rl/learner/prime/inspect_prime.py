"""Runs in prime-rl's own interpreter and says what is installed there, as JSON.

It reads a question (`installation.question`) on standard input and prints one line.
It imports nothing of this project, and of prime-rl only what needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Answer; the exit code is 0 whenever there is an answer."""
    asked = json.loads(sys.stdin.read())
    answer: dict[str, Any] = {}
    try:
        import prime_rl  # pyright: ignore[reportMissingImports]
        from prime_rl.configs.trainer import (  # pyright: ignore[reportMissingImports]
            TrainerConfig,
        )
        from prime_rl.transports.rollouts.types import (  # pyright: ignore[reportMissingImports]
            MicroBatch,
        )
    except ImportError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    else:
        places = [Path(place) for place in prime_rl.__path__]
        answer["fields"] = list(MicroBatch.__struct_fields__)
        answer["array_like"] = MicroBatch.__struct_config__.array_like
        answer["sources"] = {name: _digest(places, name) for name in asked["sources"]}
        values = json.loads(Path(asked["config"]).read_text(encoding="utf-8"))
        try:
            answer["config"] = TrainerConfig.model_validate(values).model_dump(mode="json")
        except ValueError as error:  # pydantic's ValidationError is one
            answer["config_error"] = " ".join(str(error).split())
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


def _digest(places: list[Path], name: str) -> str | None:
    """sha256 of the first file of that name within the package; None if there is none."""
    for place in places:
        if (place / name).is_file():
            return hashlib.sha256((place / name).read_bytes()).hexdigest()
    return None


if __name__ == "__main__":
    sys.exit(main())
