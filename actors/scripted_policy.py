"""The scripted engine's replies: which one, as which tokens, with which logprobs.

Invariants:
- Pure: the same seed and prompt give the same reply in every process.
- A reply ends as a sampled one would: at a stop token, at a stop string (both
  kept), at the token limit, or with the end-of-sequence token after its text.
- Every invented logprob is finite and negative.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tokenizers import Tokenizer

from rl.config import ScriptedEngineConfig
from rl.errors import ConfigurationError

INVENTED_SPREAD = 3.0  # nats between the likeliest and the unlikeliest invented logprob
INVENTED_TOP = -0.01  # nats; the likeliest
DEFAULT_REPLIES = ("```bash\ntrue\n```",)


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class ScriptedPolicy:
    """Chooses and tokenises replies.

    Args:
        model_dir: a model directory; its tokenizer and end-of-sequence token are used.
        behaviour: replies and solve rate.
        oracle: replies by a part of the decoded prompt; the longest part that occurs
            wins, and the solve rate says how often it is used.

    Raises:
        ConfigurationError: the tokenizer cannot be read.
    """

    def __init__(
        self, model_dir: Path, behaviour: ScriptedEngineConfig, oracle: Mapping[str, str]
    ) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError("no such tokenizer", str(path), "see `rl.prepare model`")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._ends = _end_tokens(model_dir)
        self._replies = behaviour.replies or DEFAULT_REPLIES
        self._solve_rate = behaviour.solve_rate
        self._oracle = sorted(oracle.items(), key=lambda item: (-len(item[0]), item[0]))

    def knows(self, token: Any) -> bool:
        """Whether `token` is an id of the vocabulary."""
        return isinstance(token, int) and 0 <= token < self._vocabulary

    def reply(
        self,
        prompt: Sequence[int],
        seed: int,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        """The completion of `prompt`."""
        key = f"{seed}:{','.join(map(str, prompt))}"
        tokens = self._encode(self._choose(prompt, key))
        ends = {*stop_token_ids, *self._ends}
        if not tokens or not (self._ends or stop_token_ids):
            raise ConfigurationError("a reply is empty or has no token to end on", "replies")
        if tokens[-1] not in ends:
            tokens = [*tokens, (self._ends or list(stop_token_ids))[0]]
        length = self._stop_at(tokens, ends, stop)
        kept = tokens[: min(length, max_tokens)]
        return Reply(
            text=self._decode(kept),
            token_ids=kept,
            logprobs=[self._invented(key, position) for position in range(len(kept))],
            finish_reason="stop" if length <= max_tokens else "length",
        )

    def invented_logprobs(self, model: str, prompt: Sequence[int]) -> list[float]:
        """One for each token of `prompt` but the first, by model and what came before."""
        return [
            self._invented(f"{model}:{','.join(map(str, prompt[: end + 1]))}", end)
            for end in range(1, len(prompt))
        ]

    @staticmethod
    def uniform(*parts: object) -> float:
        """A number in [0, 1), a function of `parts`."""
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def _choose(self, prompt: Sequence[int], key: str) -> str:
        solved = self.uniform("solved", key) < self._solve_rate
        if self._oracle:
            text = self._decode(prompt)
            known = [reply for part, reply in self._oracle if part in text]
            if solved and known:
                return known[0]
            return self._draw(self._replies, key)
        return self._replies[0] if solved else self._draw(self._replies[1:] or self._replies, key)

    def _draw(self, replies: Sequence[str], key: str) -> str:
        return replies[int(self.uniform("reply", key) * len(replies))]

    def _invented(self, key: str, position: int) -> float:
        return INVENTED_TOP - INVENTED_SPREAD * self.uniform("logprob", key, position)

    def _stop_at(self, tokens: Sequence[int], ends: set[int], stop: Sequence[str]) -> int:
        """Number of tokens until the first stop, its own included."""
        for count in range(1, len(tokens) + 1):
            if tokens[count - 1] in ends:
                return count
            if stop and any(text in self._decode(tokens[:count]) for text in stop):
                return count
        return len(tokens)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _end_tokens(model_dir: Path) -> list[int]:
    """The model's end-of-sequence tokens, by its configuration."""
    path = model_dir / "config.json"
    if not path.is_file():
        return []
    found: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        return []
    return cast(list[int], found) if isinstance(found, list) else [int(found)]
