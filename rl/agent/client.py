"""Client of a replica: token ids in, token ids and logprobs out.

Invariants:
- A completion holds the tokens exactly as sampled, those of a stop string or a
  stop token included, each with its logprob after temperature.  Nothing is
  re-tokenised, truncated or filled in: an answer that is short, misaligned, for
  another model, for another prompt or not finite is an `EngineError`.
- Every call ends by its deadline; running out of it is `DeadlineExceeded`.
- A request is sent again only if its connection failed before any byte of an
  answer came, a bounded number of times within the same deadline; a call that
  changes the replica only if it never connected.
- Sampling is never shaped by defaults of the model's own files: top-p and top-k
  are always sent, switched off.
- Prefixes are shared within one served model only (`cache_salt`).
- One HTTP session per event loop; `close` ends that of the running loop.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import aiohttp

from rl.errors import DeadlineExceeded, EngineError

FinishReason = Literal["stop", "length"]

CONNECTION_LIMIT = 4096  # above any number of slots in one process: slots bound concurrency
KEEPALIVE_S = 30.0  # below a campaign's idle gaps, above an agent's time between turns
MAX_TRIES = 4  # of one request; a local engine that refuses so often is gone
FIRST_BACKOFF_S = 0.1  # doubled at each further try
ENGINE_MINUS_INFINITY = -9999.0  # what the engine writes for a logprob of minus infinity
LOGPROB_SLACK = 1e-3  # rounding may put the logprob of a certain token above 0
ERROR_EXCERPT = 500  # characters of an error answer that are kept
UNAUTHORIZED = 401
TOP_P_OFF = 1.0
TOP_K_OFF = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    Attributes:
        max_tokens: most tokens sampled; fewer, with the finish reason 'length', where
            the engine's longest sequence is reached before.
        temperature: of the sampling distribution; 0 is greedy.
        seed: makes the completion reproducible on one replica; None draws one.
        stop_token_ids: tokens that end the completion and belong to it.
        stop: strings that end the completion; their tokens belong to it.
        priority: the engine serves lower numbers first; other than 0 only where it
            schedules by priority.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, their logprobs after temperature (nats), and why they ended."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class EngineClient:
    """Speaks to any number of replicas that share one API key."""

    def __init__(self, api_key: str | None = None) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            WeakKeyDictionary()
        )

    async def generate(
        self,
        base_url: str,
        model: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        timeout_s: float,
    ) -> Completion:
        """Sample one completion of `token_ids` under the served name `model`.

        Raises:
            DeadlineExceeded: no whole answer within `timeout_s`.
            EngineError: the replica is gone, refused, or answered out of contract.
        """
        prompt = list(token_ids)
        body = _completion_request(model, prompt, sampling.max_tokens, sampling.temperature)
        body |= {
            "logprobs": 0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.priority:
            body["priority"] = sampling.priority
        url = f"{base_url}/v1/completions"
        answer = await self._call("POST", url, body, timeout_s, model=model, repeatable=True)
        where = _where(model, url)
        choice = _only_choice(answer, model, prompt, where)
        return _completion(choice, sampling.max_tokens, where)

    async def logprobs(
        self,
        base_url: str,
        model: str,
        token_ids: Sequence[int],
        timeout_s: float,
        priority: int = 0,
    ) -> list[float]:
        """Logprobs of `token_ids[1:]`, each given all before it, at temperature 1.

        Raises:
            DeadlineExceeded: no whole answer within `timeout_s`.
            EngineError: the replica is gone, refused, or answered out of contract.
        """
        prompt = list(token_ids)
        body = _completion_request(model, prompt, max_tokens=1, temperature=1.0)
        body["prompt_logprobs"] = 0
        if priority:
            body["priority"] = priority
        url = f"{base_url}/v1/completions"
        answer = await self._call("POST", url, body, timeout_s, model=model, repeatable=True)
        where = _where(model, url)
        choice = _only_choice(answer, model, prompt, where)
        return _prompt_logprobs(choice, prompt, where)

    async def load_adapter(self, base_url: str, name: str, path: str, timeout_s: float) -> None:
        """Serve the PEFT directory `path` under `name`.

        Raises:
            DeadlineExceeded, EngineError: as for `generate`.
        """
        body = {"lora_name": name, "lora_path": path}
        url = f"{base_url}/v1/load_lora_adapter"
        await self._call("POST", url, body, timeout_s, model=name, repeatable=False)

    async def unload_adapter(self, base_url: str, name: str, timeout_s: float) -> None:
        """Stop serving `name`.

        Raises:
            DeadlineExceeded, EngineError: as for `generate`.
        """
        url = f"{base_url}/v1/unload_lora_adapter"
        await self._call("POST", url, {"lora_name": name}, timeout_s, model=name, repeatable=False)

    async def list_models(self, base_url: str, timeout_s: float) -> list[str]:
        """Names served now, the base model's first.

        Raises:
            DeadlineExceeded, EngineError: as for `generate`.
        """
        url = f"{base_url}/v1/models"
        answer = await self._call("GET", url, None, timeout_s, model="", repeatable=True)
        cards = _list(_object(answer, url).get("data"), "data", url)
        return [str(_object(card, url).get("id")) for card in cards]

    async def require_guarded(self, base_url: str, timeout_s: float) -> None:
        """Return if the replica refuses a request without a key.

        Raises:
            EngineError: it does not; or as for `generate`.
            DeadlineExceeded: no whole answer within `timeout_s`.
        """
        stranger = EngineClient()
        try:
            await stranger.list_models(base_url, timeout_s)
        except EngineError as error:
            if f"HTTP {UNAUTHORIZED}" in error.what:
                return
            raise
        finally:
            await stranger.close()
        raise EngineError(
            "answers without a key", base_url, "start it with an API key: anyone could use it"
        )

    async def check_health(self, base_url: str, timeout_s: float) -> None:
        """Return if the replica says that it is healthy.

        Raises:
            DeadlineExceeded, EngineError: as for `generate`.
        """
        url = f"{base_url}/health"
        await self._call("GET", url, None, timeout_s, model="", repeatable=False, tries=1)

    async def metrics_text(self, base_url: str, timeout_s: float) -> str:
        """The replica's metrics in Prometheus' text format.

        Raises:
            DeadlineExceeded, EngineError: as for `generate`.
        """
        url = f"{base_url}/metrics"
        return str(await self._call("GET", url, None, timeout_s, model="", repeatable=True))

    async def close(self) -> None:
        """Close the running loop's session."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONNECTION_LIMIT, keepalive_timeout=KEEPALIVE_S
                ),
                timeout=aiohttp.ClientTimeout(total=None),  # `_call` bounds every request
                headers=self._headers,
            )
            self._sessions[loop] = session
        return session

    async def _call(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        *,
        model: str,
        repeatable: bool,
        tries: int = MAX_TRIES,
    ) -> Any:
        """One request with its retries; the JSON of the answer, or its text."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._try(method, url, body, model, repeatable, tries)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer within {timeout_s:g} s", where=_where(model, url)
            ) from None

    async def _try(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        model: str,
        repeatable: bool,
        tries: int,
    ) -> Any:
        backoff = FIRST_BACKOFF_S
        for left in range(tries - 1, -1, -1):
            try:
                async with self._session().request(method, url, json=body) as response:
                    return await _read(response, model, url)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if not left or not _unanswered(error, repeatable):
                    raise EngineError(
                        f"connection failed: {type(error).__name__}: {error}",
                        where=_where(model, url),
                        remedy="the replica is gone or overloaded; see its log",
                    ) from error
            await asyncio.sleep(backoff)
            backoff *= 2
        raise AssertionError("the last try returns or raises")


def _unanswered(error: Exception, repeatable: bool) -> bool:
    """Whether the request may be sent again after `error`."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return True  # never connected
    return repeatable and isinstance(error, aiohttp.ServerDisconnectedError)


async def _read(response: aiohttp.ClientResponse, model: str, url: str) -> Any:
    text = await response.text()
    if not 200 <= response.status < 300:
        raise EngineError(
            f"HTTP {response.status}: {text[:ERROR_EXCERPT].strip()}", where=_where(model, url)
        )
    if response.content_type != "application/json":
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(f"the answer is no JSON: {error}", where=_where(model, url)) from None


def _completion_request(
    model: str, prompt: list[int], max_tokens: int, temperature: float
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": TOP_P_OFF,
        "top_k": TOP_K_OFF,
        "return_token_ids": True,
        "cache_salt": model,
    }


def _only_choice(answer: Any, model: str, prompt: list[int], where: str) -> dict[str, Any]:
    """The answer's one choice, after checking that it answers this very request."""
    whole = _object(answer, where)
    if whole.get("model") != model:
        raise EngineError(f"answered for model {whole.get('model')!r}", where=where)
    choices = _list(whole.get("choices"), "choices", where)
    if len(choices) != 1:
        raise EngineError(f"{len(choices)} choices instead of one", where=where)
    choice = _object(choices[0], where)
    if choice.get("prompt_token_ids") != prompt:
        raise EngineError("answered another prompt than the one that was sent", where=where)
    return choice


def _completion(choice: dict[str, Any], max_tokens: int, where: str) -> Completion:
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise EngineError(f"finish reason {reason!r}", where=where)
    tokens = _list(choice.get("token_ids"), "token_ids", where)
    details = _object(choice.get("logprobs"), where)
    logprobs = _list(details.get("token_logprobs"), "token_logprobs", where)
    if len(tokens) != len(logprobs):
        raise EngineError(f"{len(tokens)} tokens with {len(logprobs)} logprobs", where=where)
    if not 0 < len(tokens) <= max_tokens:
        raise EngineError(f"{len(tokens)} tokens of at most {max_tokens}", where=where)
    return Completion(
        token_ids=[_token(token, where) for token in tokens],
        logprobs=[_logprob(value, where) for value in logprobs],
        finish_reason=reason,
    )


def _prompt_logprobs(choice: dict[str, Any], prompt: list[int], where: str) -> list[float]:
    rows = _list(choice.get("prompt_logprobs"), "prompt_logprobs", where)
    if len(rows) != len(prompt):
        raise EngineError(
            f"{len(rows)} prompt logprobs for {len(prompt)} prompt tokens", where=where
        )
    values: list[float] = []
    for token, row in zip(prompt[1:], rows[1:], strict=True):
        entry = _object(_object(row, where).get(str(token)), where)
        values.append(_logprob(entry.get("logprob"), where))
    return values


def _token(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise EngineError(f"{value!r} is no token id", where=where)
    return value


def _logprob(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"logprob {value!r} is not finite", where=where)
    if not ENGINE_MINUS_INFINITY < value <= LOGPROB_SLACK:
        raise EngineError(f"{value!r} is no logprob", where=where)
    return min(float(value), 0.0)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"malformed answer: {str(value)[:80]!r} is no object", where=where)
    return cast(dict[str, Any], value)


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise EngineError(f"malformed answer: '{name}' is no list", where=where)
    return cast(list[Any], value)


def _where(model: str, url: str) -> str:
    return f"{model} at {url}" if model else url
