"""The probe of a checkpoint: PEFT and an engine must make the same of its adapter.

Invariants:
- Nothing is compared before the manifest and every file have been verified, and none of
  it over another base model than the one that the campaign froze.
- PEFT and the engine get the same token ids: the trainer's own probe, and fixed texts.
- The engine is ended, and what it wrote removed, on every way out but a failure of its
  own, whose log stays.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from rl.config import CampaignConfig
from rl.config_file import parse_config
from rl.errors import ConfigurationError, EvidenceError, InfrastructureError, Interrupted
from rl.evidence.frozen import Frozen, load_frozen
from rl.evidence.layout import CampaignDir
from rl.learner.checkpoint import ADAPTER, Checkpoint, load
from rl.prepare import prepare_model, require_model
from rl.records import AdapterBytes, Record

# Of one token's logprob, nats.  Rounding alone differs by 1e-5 in float32; in bfloat16
# engine and PEFT round differently in every layer.
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.5}
TEXTS: Final = (
    "List the files of the current directory, newest first.",
    "Create the directory alpha and an empty file named beta inside it.\n```bash\nmkdir alpha",
    "The quick brown fox jumps over the lazy dog. 0123456789",
)
RECORDED: Final = "the trainer's probe"
MEASURE_ONLY: Final = 1e9  # nats: the replica refuses nothing; the comparison is made here
CPU_KV_CACHE_MB: Final = 512  # for prompts of some dozen tokens, whatever the model
_QUIET: Final = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class ProbedPrompt(Record):
    """One prompt; differences are the largest over its tokens, nats."""

    name: str
    tokens: int
    recorded: float | None = Field(description="PEFT against what the trainer recorded")
    engine: float | None = Field(description="PEFT against the engine")
    change: float = Field(description="PEFT with the adapter against PEFT without: what it does")
    engine_change: float | None = Field(description="the same, by the engine")


class ProbeReport(Record):
    """What a probe found."""

    checkpoint: str
    update: int
    model: str
    engine: str
    prompts: list[ProbedPrompt]
    largest: float = Field(description="the largest difference of all, nats")
    tolerance: float
    agrees: bool = Field(description="whether it is within the tolerance")


def probe(
    path: Path,
    campaign: CampaignDir | None,
    state: Path,
    *,
    engine: str,
    model_dir: Path | None,
    device: str | None,
    tolerance: float | None,
    deadline_s: float,
    note: Callable[[str], None],
) -> ProbeReport:
    """Probe the checkpoint at `path`.

    Args:
        path: its directory.
        campaign: the one that it lies in; None needs `model_dir`.
        state: where converted models are kept, for a campaign that lies elsewhere.
        engine: vllm, or none for PEFT alone.
        model_dir: the base model; None takes the campaign's.
        device: cpu or cuda; None takes the campaign's, or cpu.
        tolerance: nats; None takes the dtype's.
        deadline_s: of the engine's part, s.
        note: told of each step.

    Raises:
        CampaignError: the checkpoint, the model or the engine can't be used.
    """
    frozen = None if campaign is None else load_frozen(campaign)
    note("verifying manifest and hashes ...")
    found = load(path, None if frozen is None else frozen.config_digest)
    config, model_dir = _base(found, campaign, frozen, state, model_dir, device)
    prompts = _prompts(found, model_dir)
    os.environ.update(_QUIET)
    warnings.simplefilter("ignore", FutureWarning)  # the libraries' own housekeeping
    note(f"loading the adapter into PEFT over {model_dir} ...")
    from rl.learner.fresh import fresh_logprobs, largest_difference

    tokens = [ids for _, ids in prompts]
    ours = fresh_logprobs(path, model_dir, config, tokens)
    theirs = base = None
    if engine != "none":
        adapter = found.learner.adapter
        theirs, base = _ask_engine(config, model_dir, adapter, tokens, deadline_s, note)
    rows = [
        ProbedPrompt(
            name=name,
            tokens=len(ids),
            recorded=largest_difference(ours.adapted[i], found.manifest.probe.logprobs)
            if name == RECORDED
            else None,
            engine=None if theirs is None else largest_difference(ours.adapted[i], theirs[i]),
            change=largest_difference(ours.adapted[i], ours.base[i]),
            engine_change=None
            if theirs is None or base is None
            else largest_difference(theirs[i], base[i]),
        )
        for i, (name, ids) in enumerate(prompts)
    ]
    limit = TOLERANCE[config.model.dtype] if tolerance is None else tolerance
    measured = [value for row in rows for value in (row.recorded, row.engine) if value is not None]
    return ProbeReport(
        checkpoint=str(path),
        update=found.manifest.update,
        model=str(model_dir),
        engine=engine,
        prompts=rows,
        largest=max(measured),
        tolerance=limit,
        agrees=all(value <= limit for value in measured),
    )


def _base(
    found: Checkpoint,
    campaign: CampaignDir | None,
    frozen: Frozen | None,
    state: Path,
    model_dir: Path | None,
    device: str | None,
) -> tuple[CampaignConfig, Path]:
    """Configuration and base model to probe with."""
    if model_dir is not None:
        require_model(model_dir, "give the directory of a Hugging Face model")
    if frozen is None or campaign is None:
        if model_dir is None:
            raise ConfigurationError(
                "lies in no campaign that says what its base model is",
                str(found.path),
                "name the model's directory by --model DIR",
            )
        return _bare_config(found, model_dir, device or "cpu"), model_dir
    config = frozen.campaign_config()
    if model_dir is not None:
        config = config.model_copy(update={"model": _at(config, model_dir)})
    home = campaign.root.resolve().parent
    prepared = prepare_model(config.model, home.parent if home.name == "campaigns" else state)
    for name, digest in frozen.model.files.items():
        if prepared.files.get(name) != digest:
            raise EvidenceError(
                "is not the base model that the campaign was frozen with",
                str(prepared.path / name),
                "give the right one by --model DIR",
            )
    return _engine_for(config, device), prepared.path


def _at(config: CampaignConfig, model_dir: Path) -> Any:
    changes = {"source": "path", "path": str(model_dir), "revision": None, "sha256": None}
    return config.model.model_copy(update=changes)


def _engine_for(config: CampaignConfig, device: str | None) -> CampaignConfig:
    """The campaign's configuration with one replica, on `device` if it is given."""
    engine: dict[str, Any] = {"kind": "vllm", "replicas": 1, "probe_tolerance": MEASURE_ONLY}
    trainer: dict[str, Any] = {}
    if device is not None and device != config.engine.device:
        cache = CPU_KV_CACHE_MB if device == "cpu" else None
        # What was said for the other device's engine does not hold here.
        engine |= {"extra_args": (), "tensor_parallel": 1, "kv_cache_mb": cache}
    if device is not None:
        engine["device"] = device
        trainer = {"backend": "peft", "prime": None, "device": device}
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update=engine),
            "trainer": config.trainer.model_copy(update=trainer),
        }
    )


def _bare_config(found: Checkpoint, model_dir: Path, device: str) -> CampaignConfig:
    """What a probe needs of a configuration, for a checkpoint without a campaign."""
    import json

    where = str(found.path / ADAPTER / "adapter_config.json")
    try:
        rank = int(json.loads(found.learner.adapter.files["adapter_config.json"])["r"])
        shape = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        dtype = str(shape.get("dtype") or shape.get("torch_dtype") or "float32")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise EvidenceError(f"no rank or no dtype can be read: {error!r}", where) from None
    bare = {
        "name": "probe",
        "model": {
            "source": "path",
            "name": model_dir.name,
            "path": str(model_dir),
            "dtype": "bfloat16" if dtype == "bfloat16" else "float32",
        },
        "tasks": {"train": 2, "heldout": 2},
        "agent": {"system_prompt": "-", "max_turns": 1, "max_new_tokens": 16},
        "episodes": {"concurrency": 1, "workers": 1, "deadline_s": 600.0},
        "schedule": {"updates": 1, "batch_size": 2, "group_size": 2},
        "engine": {
            "replicas": 1,
            "device": device,
            "max_num_seqs": 8,
            "max_model_len": 512,
            "probe_tolerance": MEASURE_ONLY,
        }
        | ({"kv_cache_mb": CPU_KV_CACHE_MB} if device == "cpu" else {}),
        "trainer": {"device": device, "lora": {"rank": rank}, "optimizer": {"lr": 1e-4}},
        "heldout": {"attempts": 1, "shards": 1},
        "limits": {"watchdog_s": 3600.0},
    }
    return parse_config(bare, where)


def _prompts(found: Checkpoint, model_dir: Path) -> list[tuple[str, list[int]]]:
    """Names and token ids: the trainer's probe first, then the fixed texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    named = [(f"text {index}", ids) for index, ids in enumerate(texts, start=1)]
    return [(RECORDED, found.manifest.probe.token_ids), *named]


def _ask_engine(
    config: CampaignConfig,
    model_dir: Path,
    adapter: AdapterBytes,
    prompts: Sequence[Sequence[int]],
    deadline_s: float,
    note: Callable[[str], None],
) -> tuple[list[list[float]], list[list[float]]]:
    """As `engine_logprobs`, in an event loop that a signal ends in order."""
    from actors.checkpoint_probe import engine_logprobs

    run_dir = Path(tempfile.mkdtemp(prefix="rl-probe-"))

    async def ask() -> tuple[list[list[float]], list[list[float]]]:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await engine_logprobs(config, model_dir, adapter, prompts, run_dir, deadline_s, note)

    failed = False
    try:
        return asyncio.run(ask())
    except asyncio.CancelledError:
        raise Interrupted("stopped by SIGTERM", "probe") from None
    except InfrastructureError:
        failed = True
        note(f"the engine's log: {run_dir}/replica-0")
        raise
    finally:
        if not failed:
            shutil.rmtree(run_dir)
