"""prime-rl's broadcast adapter, checked and in PEFT's own form.

Invariants:
- Nothing is handed on of which a byte is missing: the header's tensors fill the
  file exactly, A and B come in pairs of the configured rank.
- Weights are never touched; only their names get the prefix that PEFT and vLLM
  look for. Without it an engine loads the adapter and serves the base model.
- The same weights give the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final, cast

from rl.config import CampaignConfig
from rl.errors import TrainerError

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."
_METADATA: Final = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # of the header, so that tensors start aligned
_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_REMEDY = "see prime-rl's log for what it wrote, then continue with --resume"


def read_broadcast(folder: Path) -> dict[str, bytes]:
    """The two files of a broadcast, as they are.

    Raises:
        TrainerError: one is not there, though the broadcast was said to be whole.
    """
    try:
        return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    except OSError as error:
        raise TrainerError(
            f"the broadcast said to be whole can't be read: {error.strerror}",
            str(error.filename),
            _REMEDY,
        ) from error


def to_peft(files: dict[str, bytes], config: CampaignConfig, where: str) -> dict[str, bytes]:
    """`files` of a broadcast as PEFT's own, verified.

    Raises:
        TrainerError: they are torn, or of another adapter than is configured.
    """
    header, data = _parse(files[WEIGHTS], where)
    tensors = {name: entry for name, entry in header.items() if name != _METADATA}
    layers = _check_pairs(tensors, config.trainer.lora.rank, where)
    given = _parse_config(files[CONFIG], where)
    lora = config.trainer.lora
    wanted: dict[str, Any] = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "modules_to_save": None,
        "target_modules": layers,
    }
    for key, value in wanted.items():
        if given.get(key) != value:
            raise _broken(f"{key} is {given.get(key)!r} instead of {value!r}", where)
    settings = {
        **wanted,
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "inference_mode": True,
        # The model's name, not where this machine keeps it.
        "base_model_name_or_path": config.model.name,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    renamed: dict[str, Any] = {_METADATA: {"format": "pt"}}
    renamed |= {f"{PREFIX}{name}": tensors[name] for name in sorted(tensors)}
    head = json.dumps(renamed, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    return {CONFIG: text.encode(), WEIGHTS: _LENGTH.pack(len(head)) + head + data}


def _parse(content: bytes, where: str) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file whose tensors fill the data exactly."""
    if len(content) < _LENGTH.size:
        raise _broken(f"{WEIGHTS} has {len(content)} bytes", where)
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    if start > len(content):
        raise _broken(f"{WEIGHTS} ends within its header", where)
    try:
        header: Any = json.loads(content[_LENGTH.size : start])
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _broken(f"{WEIGHTS} has no readable header", where)
    parsed = cast(dict[str, Any], header)
    data = content[start:]
    spans: list[tuple[int, int]] = []
    for name, entry in parsed.items():
        if name == _METADATA:
            continue
        try:
            first, last = entry["data_offsets"]
            size = math.prod(entry["shape"]) * _BYTES[entry["dtype"]]
        except (KeyError, TypeError, ValueError):
            raise _broken(f"{WEIGHTS} has no readable entry for {name}", where) from None
        if last - first != size:
            raise _broken(f"{name} has {last - first} bytes instead of {size}", where)
        spans.append((first, last))
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise _broken(f"{WEIGHTS} has a gap or an overlap at byte {end}", where)
        end = last
    if end != len(data):
        raise _broken(f"{WEIGHTS} holds {len(data)} bytes of weights instead of {end}", where)
    return parsed, data


def _check_pairs(tensors: dict[str, Any], rank: int, where: str) -> list[str]:
    """The adapted layers' own names, sorted."""
    pairs: dict[str, dict[str, Any]] = {}
    for name, entry in tensors.items():
        module, _, rest = name.rpartition(".lora_")
        if name.startswith(PREFIX) or not module or rest not in ("A.weight", "B.weight"):
            raise _broken(f"{name} is no name of an adapter's weight there", where)
        pairs.setdefault(module, {})[rest[0]] = entry["shape"]
    if not pairs:
        raise _broken("the adapter has no layer", where)
    for module, shapes in sorted(pairs.items()):
        a, b = shapes.get("A"), shapes.get("B")
        if a is None or b is None or len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank:
            raise _broken(f"{module} has A {a} and B {b} at rank {rank}", where)
    return sorted({module.rpartition(".")[2] for module in pairs})


def _parse_config(content: bytes, where: str) -> dict[str, Any]:
    try:
        values: Any = json.loads(content)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _broken(f"{CONFIG} is no JSON object", where)
    return cast(dict[str, Any], values)


def _broken(problem: str, where: str) -> TrainerError:
    return TrainerError(f"the broadcast adapter is out of contract: {problem}", where, _REMEDY)
