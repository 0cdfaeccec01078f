"""What stands in at a rehearsal for what costs: the model, the GPUs, the rented sandboxes.

Invariants:
- Everything else is the campaign's own: its tasks, counts, schedule, slots, limits, agent,
  placement, checkpoints and evaluation; a test compares the two configurations key by key.
- Whatever stands in is named, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rl.config import CampaignConfig, EngineConfig, ModelConfig, ScriptedEngineConfig
from rl.files import disk_errors, write_bytes
from rl.records import TaskRef

SOLUTION = Path("solution/solve.sh")
DONE = "It is done."
# Of a turn: enough right answers that groups differ, and enough ends that episodes are short.
SOLVE_RATE = 0.6
# Enough failed requests that a few attempts are masked and tried again.
FAILURE_RATE = 0.002
CORPUS_TEXTS = 40  # that the stand-in's tokenizer is made from
STOOD_IN = (
    "model: a two-layer one with random weights; it shows no learning",
    "engine: scripted, over the engine's own protocol; it answers at once, right or wrong by seed",
    "trainer: the PEFT learner on a CPU, on the very episodes, in float32",
    "sandboxes: bubblewrap on this machine, of the same sizes",
    "GPUs: logical ones of a Ray cluster that is started for this",
)


def stand_in(config: CampaignConfig, folder: Path) -> CampaignConfig:
    """The configuration of the rehearsal.

    Args:
        config: what is rehearsed.
        folder: where `prepare_stand_ins` has put model and replies.
    """
    engine = config.engine.model_copy(
        update={
            "kind": "scripted",
            "device": "cpu",
            "extra_args": ("--oracle", str(folder / "replies.json")),
            "scripted": ScriptedEngineConfig(
                replies=(DONE,), solve_rate=SOLVE_RATE, failure_rate=FAILURE_RATE
            ),
        }
    )
    trainer = config.trainer.model_copy(
        update={
            "backend": "peft",
            "prime": None,
            "device": "cpu",
            "ranks": 1,
            "shard_base": False,
            "gradient_checkpointing": False,
        }
    )
    model = ModelConfig(
        source="path",
        name="stand-in",
        path=str(folder / "model"),
        renderer="chatml",
        dtype="float32",
    )
    changed = config.model_copy(
        update={
            "name": f"rehearse-{config.name}"[:40],
            "model": model,
            "engine": EngineConfig.model_validate(engine.model_dump()),
            "trainer": trainer,
            "sandbox": config.sandbox.model_copy(update={"provider": "bubblewrap"}),
            "modal": None,
        }
    )
    return CampaignConfig.model_validate(changed.model_dump())


def prepare_stand_ins(
    config: CampaignConfig, tasks: Iterable[TaskRef], root: Path, folder: Path
) -> None:
    """Make the model and write the replies: each package's own solution, as the agent calls it.

    Args:
        config: what is rehearsed.
        tasks: all of its tasks.
        root: folder of their packages.
        folder: where to put both.
    """
    from rl.learner.stand_in import make_tiny_model

    fenced = config.agent.call_format == "fenced"
    replies: dict[str, str] = {}
    for task in tasks:
        script = (root / task.path / SOLUTION).read_text(encoding="utf-8").rstrip()
        replies[task.instruction] = _fenced(script) if fenced else _tool_call(script)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "replies.json", json.dumps(replies).encode())
    texts = [*list(replies)[:CORPUS_TEXTS], *list(replies.values())[:CORPUS_TEXTS]]
    make_tiny_model(folder / "model", [config.agent.system_prompt, DONE, *texts], config.seed)


def _fenced(script: str) -> str:
    return f"```bash\n{script}\n```"


def _tool_call(script: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": script}})
    return f"<tool_call>\n{call}\n</tool_call>"
