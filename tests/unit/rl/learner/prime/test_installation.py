"""An installation that is not the pinned one is refused, with what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigurationError
from rl.learner.prime.installation import SCRIPT, check_answer, question
from rl.learner.prime.pinned import MICRO_BATCH_FIELDS, SOURCES

SENT: dict[str, Any] = {"optim": {"lr": 1e-3, "max_norm": 1.0}}


def answer(**changes: Any) -> str:
    values: dict[str, Any] = {
        "fields": list(MICRO_BATCH_FIELDS),
        "array_like": True,
        "sources": dict(SOURCES),
        "config": {**SENT, "gc": None},
        **changes,
    }
    return "some library's line\n" + json.dumps(values) + "\n"


def test_the_pinned_installation_is_accepted() -> None:
    check_answer(answer(), "python", SENT)
    check_answer(answer(fields=[*MICRO_BATCH_FIELDS, "newer"]), "python", SENT)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("", "no answer"),
        ("a traceback", "no answer"),
        ("[]", "no answer"),
        (answer(error="ImportError: msgspec"), "can't be used: ImportError: msgspec"),
        (answer(fields=["input_ids", "advantages"]), r"advantages where loss_mask .*field 1"),
        (answer(fields=list(MICRO_BATCH_FIELDS[:5])), "nothing where sequence_lengths"),
        (answer(array_like=False), "no longer travels by position"),
        (answer(sources={}), "not commit 559b44772: .* and 14 more differ"),
        (answer(sources={**SOURCES, "utils/pathing.py": None}), "utils/pathing.py differ"),
        (answer(config_error="lr: too small"), "refuses the configuration: lr: too small"),
        (answer(config={"optim": {"lr": 1e-3, "max_norm": None}}), "optim.max_norm is None"),
    ],
)
def test_whatever_differs_is_named(given: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what) as caught:
        check_answer(given, "python", SENT)
    assert caught.value.where == "python"
    assert caught.value.remedy


def test_an_interpreter_without_prime_rl_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT)],
        input=question(tmp_path / "trainer.json"),
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(ConfigurationError, match="can't be used: ModuleNotFoundError"):
        check_answer(done.stdout, "python", SENT)
