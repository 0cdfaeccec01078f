"""Adapters of a tiny model, and what transformers and PEFT make of them.

The reference against which an engine's logprobs are held.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rl.records import AdapterBytes, Probe

WEIGHT_STD = 0.1  # wide enough that each version's logprobs differ by more than a tolerance


def make_adapter(model_dir: Path, scratch: Path, version: int, probe: list[int]) -> AdapterBytes:
    """Return a random rank-8 adapter with the probe that a trainer would send."""
    generator = torch.Generator().manual_seed(version)
    model: Any = get_peft_model(
        load_base(model_dir),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=WEIGHT_STD, generator=generator)
    directory = scratch / f"adapter-{version}"
    model.save_pretrained(directory)
    files = {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name.startswith("adapter_")
    }
    return AdapterBytes(
        version=version,
        files=files,
        sha256=files_digest(files),
        probe=Probe(
            token_ids=probe,
            logprobs=logprobs(model, probe),
            base_logprobs=logprobs(load_base(model_dir), probe),
        ),
    )


def load_base(model_dir: Path) -> Any:
    """Return the base model in float32, ready for inference."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()


def load_adapted(model_dir: Path, adapter: AdapterBytes, scratch: Path) -> Any:
    """Return the base model under `adapter`, read from its files."""
    directory = scratch / f"reread-{adapter.version}"
    directory.mkdir(exist_ok=True)
    for name, content in adapter.files.items():
        (directory / name).write_bytes(content)
    model: Any = PeftModel.from_pretrained(load_base(model_dir), str(directory))
    return model.eval()


def logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the logprobs of `token_ids[1:]` under `model` at `temperature`."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    rows = torch.log_softmax(logits.double(), dim=-1)
    return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def files_digest(files: dict[str, bytes]) -> str:
    """Return sha256 over the sorted names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode())
        digest.update(content)
    return digest.hexdigest()
