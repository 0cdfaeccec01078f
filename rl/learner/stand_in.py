"""A tiny real model, made on the spot: rehearsals and tests train and serve it.

Invariants:
- The same arguments give the same files, byte for byte, on one machine.
- head_dim is 32: vLLM's CPU attention takes 16 at start-up and dies of it at the
  first request.
- Weights are drawn wide enough (std 0.1) that the logits are far from uniform,
  so that a wrong adapter or a stale cache shows in the logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:  # torch takes seconds to import; a test of the tokenizer alone needs none
    from transformers import LlamaForCausalLM

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 500  # tokens at most; a small corpus gives fewer
INIT_STD = 0.1
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, corpus: Sequence[str], seed: int = 0) -> Path:
    """Write a two-layer Llama and its byte-level BPE tokenizer to `directory`.

    Args:
        directory: created if missing; files of the same names are replaced.
        corpus: texts that the tokenizer is trained on.
        seed: of the weights.

    Returns:
        `directory`, a Hugging Face model directory in float32.
    """
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    bpe = train_tokenizer(corpus)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    tokenizer.save_pretrained(directory)
    _random_llama(bpe, seed).save_pretrained(directory)
    return directory


def make_tiny_tokenizer(directory: Path, corpus: Sequence[str]) -> Path:
    """Write only what a scripted engine reads of a model; `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    bpe = train_tokenizer(corpus)
    bpe.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "eos_token_id": bpe.token_to_id(IM_END)}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def train_tokenizer(corpus: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE over `corpus` with ChatML's special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT, IM_START, IM_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def _random_llama(bpe: Tokenizer, seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=bpe.token_to_id(IM_END),
        pad_token_id=bpe.token_to_id(END_OF_TEXT),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
