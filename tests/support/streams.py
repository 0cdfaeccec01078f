"""Completions as streams, so that a test sees when each token came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass
class Stream:
    """One completion as it arrives.

    Attributes:
        token_ids: the sampled tokens.
        logprobs: of each.
        times: monotonic arrival time of each chunk, s.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest wait for a token that overlaps begin..end, s."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b >= begin and a <= end), default=0.0)


async def stream(
    session: aiohttp.ClientSession,
    base_url: str,
    api_key: str,
    model: str,
    prompt: list[int],
    tokens: int,
    seed: int,
    into: Stream,
) -> None:
    """Sample exactly `tokens` tokens of `prompt` under `model`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "return_token_ids": True,
        "logprobs": 0,
        "ignore_eos": True,
        "cache_salt": model,
    }
    headers = {"Authorization": f"Bearer {api_key}"}
    async with session.post(f"{base_url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            into.times.append(time.monotonic())
            into.token_ids += choice["token_ids"] or []
            if choice["logprobs"]:
                into.logprobs += choice["logprobs"]["token_logprobs"]
