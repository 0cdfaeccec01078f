"""A light tokenizer for episode workers: the `tokenizers` library, no transformers.

It offers just what the `renderers` package asks of a tokenizer, so that a
worker process starts in a fraction of a second and stays small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.errors import ConfigurationError

WORD_JOINER = "\u2060"  # has no width and no meaning


class FastTokenizer:
    """A Hugging Face `tokenizer.json`, as a `renderers` tokenizer.

    Args:
        model_dir: directory that holds tokenizer.json.
        name: the model's name, by which a renderer is chosen.

    Raises:
        ConfigurationError: the directory has no usable tokenizer.json.
    """

    def __init__(self, model_dir: Path, name: str) -> None:
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(
                "the model has no tokenizer.json", str(model_dir), "choose a model with one"
            )
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id = self._eos(model_dir)
        added = self._tokenizer.get_added_tokens_decoder().values()
        # One character can't be cut, and runs of spaces control nothing.
        self._controls = [t.content for t in added if len(t.content.strip()) > 1]

    def _eos(self, model_dir: Path) -> int | None:
        config = model_dir / "tokenizer_config.json"
        if not config.is_file():
            return None
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def encode(self, text: str, *_: Any, add_special_tokens: bool = False, **__: Any) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of untrusted `text`: special tokens in it stay ordinary text.

        Tool output and instructions pass through here, so that a command that
        prints `<|im_end|>` can't close its own turn.
        """
        ids: list[int] = []
        for piece in self._split_specials(text):
            ids.extend(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        return ids

    def defused(self, text: str) -> str:
        """Untrusted `text` that `encode` finds no special token in.

        An invisible character is put into their spelling; other text stays as it is.
        For renderers, which can't be told to use `encode_plain`.
        """
        return WORD_JOINER.join(self._split_specials(text))

    def decode(self, token_ids: Sequence[int] | int, *_: Any, **options: Any) -> str:
        """Text of the ids; special tokens are kept unless told otherwise."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        skip = bool(options.get("skip_special_tokens", False))
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Id, or ids, of exact vocabulary entries; None where unknown."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        """Ids, with character offsets when `return_offsets_mapping` is set."""
        encoding = self._tokenizer.encode(
            text, add_special_tokens=bool(options.get("add_special_tokens", False))
        )
        result: dict[str, Any] = {"input_ids": encoding.ids}
        if options.get("return_offsets_mapping"):
            result["offset_mapping"] = encoding.offsets
        return result

    def _split_specials(self, text: str) -> list[str]:
        """Cut `text` inside every special token's spelling, so that none matches."""
        cuts = [0]
        for control in self._controls:
            start = text.find(control)
            while start != -1:
                cuts.append(start + 1)
                start = text.find(control, start + 1)
        cuts = sorted(set(cuts))
        return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
