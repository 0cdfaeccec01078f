"""A process that speaks the files of prime-rl's trainer, and can be told to fail.

It learns nothing: its adapter is a function of the batches that it was given, so a
resumed run goes on as one that never stopped, and other batches give other weights.
Standard library and msgpack only, as its start is on every test's way.

    prime_trainer_process.py inspect [FAULT]           answers as `inspect_prime` does
    prime_trainer_process.py train [FAULT@STEP] @ CONFIG
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgpack

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl.learner.prime.pinned import MICRO_BATCH_FIELDS, SOURCES  # noqa: E402

POLL_S = 0.02
SHARDS = 2
MICRO_LOSS = 0.125  # of each micro-batch


def main(argv: list[str]) -> int:
    mode, *rest = argv
    if mode == "inspect":
        return inspect(rest[0] if rest else "")
    fault, _, at = (rest[0] if rest[0] != "@" else "").partition("@")
    return train(Path(rest[-1]), fault, int(at or -1))


def inspect(fault: str) -> int:
    asked = json.loads(sys.stdin.read())
    if fault == "crash":
        print("no CUDA here", file=sys.stderr)
        return 3
    if fault == "silent":
        return 0
    if fault == "missing":
        print(json.dumps({"error": "ModuleNotFoundError: No module named 'prime_rl'"}))
        return 0
    fields: list[str] = list(MICRO_BATCH_FIELDS)
    if fault == "reordered":
        fields[2], fields[3] = fields[3], fields[2]
    if fault == "extended":
        fields.append("new_weights")
    values = json.loads(Path(asked["config"]).read_text())
    answer: dict[str, Any] = {
        "fields": fields,
        "array_like": True,
        "sources": {name: SOURCES[name] for name in asked["sources"]},
        "config": {**values, "matmul_precision": "high"},
    }
    if fault == "other_commit":
        answer["sources"]["trainer/rl/train.py"] = "0" * 64
    if fault == "refused":
        answer |= {"config": None, "config_error": "1 validation error: optim.lr"}
    if fault == "bent":
        answer["config"]["optim"] = {**values["optim"], "max_norm": None}
    print("a library's greeting\n" + json.dumps(answer))
    return 0


def train(config_file: Path, fault: str, at: int) -> int:
    config = json.loads(config_file.read_text())
    trainer = Trainer(config, fault, at)
    step = (config["resume"] or {}).get("step", 0)
    trainer.load(step)
    trainer.broadcast(step)
    while True:
        step += 1
        trainer.step(step)


class Trainer:
    def __init__(self, config: dict[str, Any], fault: str, at: int) -> None:
        self.root = Path(config["output_dir"])
        self.config = config
        self.fault = fault
        self.at = at
        self.state: list[str] = []

    def failing(self, fault: str, step: int) -> bool:
        return self.fault == fault and self.at == step

    def checkpoint_dir(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step_{step}" / "trainer"

    def load(self, step: int) -> None:
        if step:
            shard = self.checkpoint_dir(step) / "__0_0.distcp"
            self.state = json.loads(shard.read_text())
        if self.fault == "other_weights":
            self.state.append("other")

    def step(self, step: int) -> None:
        batches = self.wait_for_batch(step)
        began = time.perf_counter()
        if self.failing("dies", step):
            print("CUDA out of memory", flush=True)
            os._exit(0)
        self.state.append(hashlib.sha256(repr(batches).encode()).hexdigest())
        self.broadcast(step)
        shutil.rmtree(self.root / "broadcasts" / f"step_{max(step - 2, 0)}", ignore_errors=True)
        if not self.failing("no_checkpoint", step):
            self.save(step)
        self.report(step, batches, time.perf_counter() - began)

    def wait_for_batch(self, step: int) -> list[list[list[Any]]]:
        ranks = int(os.environ.get("FAKE_RANKS", "1"))
        folder = self.root / "rollouts" / f"step_{step}"
        shares: list[list[list[Any]]] = []
        for rank in range(ranks):
            path = folder / f"rank_{rank}.bin"
            while not path.exists():
                time.sleep(POLL_S)
            shares.append(msgpack.unpackb(path.read_bytes()))
        assert len({len(share) for share in shares}) == 1, "ranks differ in micro-batches"
        for share in shares:
            for batch in share:
                tokens = len(batch[0])
                assert all(len(batch[i]) == tokens for i in (1, 2, 3, 4, 6, 7))
                assert sum(batch[5]) == sum(batch[8]) == tokens
        return shares

    def broadcast(self, step: int) -> None:
        if self.failing("no_weights", step):
            return
        folder = self.root / "broadcasts" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        lora = self.config["model"]["lora"]
        weights = safetensors(self.tensors(step))
        if self.failing("partial", step):
            weights = weights[: len(weights) // 2]
        (folder / "adapter_model.safetensors").write_bytes(weights)
        values = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.config["model"]["name"],
            "r": lora["rank"],
            "lora_alpha": lora["alpha"],
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(lora["target_modules"]),
            "modules_to_save": None,
        }
        (folder / "adapter_config.json").write_text(json.dumps(values, indent=2))
        if self.failing("no_stable", step):
            return
        if self.failing("vanishes", step):
            (folder / "adapter_model.safetensors").unlink()
        (folder / "STABLE").touch()

    def tensors(self, step: int) -> dict[str, tuple[list[int], bytes]]:
        rank = self.config["model"]["lora"]["rank"]
        draw = random.Random(",".join(self.state))
        found: dict[str, tuple[list[int], bytes]] = {}
        for name, (inputs, outputs) in layers(Path(self.config["model"]["name"])).items():
            if self.failing("missing_layer", step) and name.endswith("layers.0.mlp.up_proj"):
                continue
            found[f"{name}.lora_A.weight"] = filled([rank, inputs], draw, 0.05)
            found[f"{name}.lora_B.weight"] = filled([outputs, rank], draw, 0.05 * (step > 0))
        return found

    def save(self, step: int) -> None:
        folder = self.checkpoint_dir(step)
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(SHARDS):
            (folder / f"__{shard}_0.distcp").write_text(json.dumps(self.state))
        (folder / ".metadata").write_text(json.dumps({"step": step}))

    def report(self, step: int, batches: list[list[list[Any]]], seconds: float) -> None:
        if self.failing("no_row", step):
            return
        rows: list[dict[str, Any]] = [
            {"perf/throughput": 1.0},
            {"optim/lr": 1.0, "optim/grad_norm": 0.5},
            {
                "loss/mean": MICRO_LOSS,
                "entropy/all/mean": 1.25,
                "mismatch_kl/all/mean": 0.01,
                "mismatch_kl/all/max": 0.1,
                "is_masked/mean": 0.02,
            },
            {"time/step": seconds, "time/forward_backward": seconds},
        ]
        if self.failing("not_finite", step):
            del rows[2]["loss/mean"]
        with (self.root / self.config["monitors"]["file"]["path"]).open("a") as file:
            for row in rows:
                file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")
                file.flush()


def layers(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the adapted layers of a Llama-like model."""
    shape = json.loads((model_dir / "config.json").read_text())
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim") or width // shape["num_attention_heads"]
    heads, groups = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    found: dict[str, tuple[int, int]] = {}
    for index in range(shape["num_hidden_layers"]):
        where = f"model.layers.{index}"
        found[f"{where}.self_attn.q_proj"] = (width, heads)
        found[f"{where}.self_attn.k_proj"] = (width, groups)
        found[f"{where}.self_attn.v_proj"] = (width, groups)
        found[f"{where}.self_attn.o_proj"] = (heads, width)
        found[f"{where}.mlp.gate_proj"] = (width, inner)
        found[f"{where}.mlp.up_proj"] = (width, inner)
        found[f"{where}.mlp.down_proj"] = (inner, width)
    return found


def filled(shape: list[int], draw: random.Random, width: float) -> tuple[list[int], bytes]:
    count = shape[0] * shape[1]
    values = [draw.uniform(-1, 1) * width for _ in range(count)]
    return shape, struct.pack(f"<{count}f", *values)


def safetensors(tensors: dict[str, tuple[list[int], bytes]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (shape, data) in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(data for _, data in tensors.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
