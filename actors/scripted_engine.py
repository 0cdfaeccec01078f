"""An engine without a model: the engine's protocol, seeded deterministic replies.

Only tests and simulations use it.

Invariants:
- A completion is a function of the request's seed and prompt alone, whatever
  else is in flight; so is its delay.
- Tokens, stops, limits, names and error codes follow vLLM's: a client can't
  tell the two apart by the protocol.
- An adapter's probe is answered with the logprobs that came beside its files,
  under its own name only; every other logprob is invented from a hash.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from pydantic import ValidationError

from actors.adapter_files import read_probe
from actors.engine_command import API_KEY_VARIABLE, BASE_MODEL_NAME, HOST
from actors.scripted_policy import ScriptedPolicy
from rl.config import ScriptedEngineConfig
from rl.errors import ConfigurationError, run_command
from rl.records import Probe

GUARDED_PREFIX = "/v1"  # as in vLLM, health and metrics need no key
MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """When the engine stops behaving; None is never.

    Attributes:
        fail_after: it exits with code 1 at the completion after so many.
        hang_after: it leaves every completion after so many without an answer.
    """

    fail_after: int | None = None
    hang_after: int | None = None


@dataclass
class ScriptedEngine:
    """The server's state and its request handlers."""

    policy: ScriptedPolicy
    behaviour: ScriptedEngineConfig
    max_model_len: int
    api_key: str | None = None
    chaos: ChaosOptions = ChaosOptions()
    served: dict[str, Path] = field(default_factory=dict[str, Path])
    probes: dict[str, Probe] = field(default_factory=dict[str, Probe])
    seen: Counter[str] = field(default_factory=Counter[str])
    completions: int = 0
    running: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def application(self) -> web.Application:
        """The server, ready to be run."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        guarded = self.api_key is not None and request.path.startswith(GUARDED_PREFIX)
        if guarded and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        del request
        names = [BASE_MODEL_NAME, *self.served]
        cards = [{"id": name, "object": "model"} for name in names]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated_tokens,
        }
        label = f'{{engine="0",model_name="{BASE_MODEL_NAME}"}}'
        lines = [f"vllm:{name}{label} {value}" for name, value in values.items()]
        return web.Response(text="\n".join(lines) + "\n")

    async def _load(self, request: web.Request) -> web.Response:
        body = await _body(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str):
            return _error(400, "lora_name and lora_path are required")
        if name in self.served:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        directory = Path(path)
        if not (directory / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        try:
            probe = read_probe(directory)
        except ValidationError as error:
            return _error(500, f"Loading lora {name} failed: {error}")
        self.served[name] = directory
        if probe is not None:
            self.probes[name] = probe
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = str((await _body(request)).get("lora_name"))
        if name not in self.served:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        del self.served[name]
        self.probes.pop(name, None)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: web.Request) -> web.Response:
        body = await _body(request)
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        await self._chaos()
        self.running += 1
        try:
            if self.behaviour.latency_s:
                await asyncio.sleep(self.behaviour.latency_s)
        finally:
            self.running -= 1
        if self._fails(body):
            return _error(500, "a scripted failure")
        return web.json_response(self._answer(body))

    def _refusal(self, body: dict[str, Any]) -> web.Response | None:
        model, prompt, limit = body.get("model"), body.get("prompt"), body.get("max_tokens")
        if model != BASE_MODEL_NAME and model not in self.served:
            return _error(404, f"The model `{model}` does not exist.")
        if not isinstance(prompt, list) or not prompt or not isinstance(limit, int) or limit < 1:
            return _error(400, "prompt must be token ids and max_tokens positive")
        tokens = cast(list[Any], prompt)
        if not all(self.policy.knows(token) for token in tokens):
            return _error(400, "Token id is out of vocabulary")
        if len(tokens) >= self.max_model_len:
            return _error(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. "
                f"However, your prompt contains {len(tokens)} input tokens.",
            )
        return None

    async def _chaos(self) -> None:
        self.completions += 1
        if self.chaos.fail_after is not None and self.completions > self.chaos.fail_after:
            os._exit(1)  # a death, not an exit: connections break as in a crash
        if self.chaos.hang_after is not None and self.completions > self.chaos.hang_after:
            await asyncio.Event().wait()  # until the client lets go: that is the point

    def _fails(self, body: dict[str, Any]) -> bool:
        """Decided by the request and how often it came, so that a retry may succeed."""
        key = f"{body.get('seed')}:{body['prompt']}"
        self.seen[key] += 1
        draw = self.policy.uniform("failure", key, self.seen[key])
        return draw < self.behaviour.failure_rate

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        model, prompt = str(body["model"]), cast(list[int], body["prompt"])
        reply = self.policy.reply(
            prompt,
            seed=int(body.get("seed") or 0),
            max_tokens=min(body["max_tokens"], self.max_model_len - len(prompt)),
            stop_token_ids=body.get("stop_token_ids") or [],
            stop=body.get("stop") or [],
        )
        self.prompt_tokens += len(prompt)
        self.generated_tokens += len(reply.token_ids)
        choice: dict[str, Any] = {
            "index": 0,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "token_ids": reply.token_ids,
            "prompt_token_ids": prompt,
            "logprobs": None,
            "prompt_logprobs": None,
        }
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": reply.logprobs}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(model, prompt)
        return {"object": "text_completion", "model": model, "choices": [choice]}

    def _prompt_logprobs(self, model: str, prompt: list[int]) -> list[dict[str, Any] | None]:
        probe = self.probes.get(model)
        if probe is not None and probe.token_ids == prompt:
            values = probe.logprobs
        else:
            values = self.policy.invented_logprobs(model, prompt)
        rows: list[dict[str, Any] | None] = [None]
        for token, value in zip(prompt[1:], values, strict=True):
            rows.append({str(token): {"logprob": value}})
        return rows


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise web.HTTPBadRequest(text="the body is no JSON") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is no object")
    return cast(dict[str, Any], body)


def _error(code: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=code)


def make_engine(
    model_dir: Path,
    behaviour: ScriptedEngineConfig,
    max_model_len: int,
    api_key: str | None = None,
    oracle: Path | None = None,
    chaos: ChaosOptions | None = None,
) -> ScriptedEngine:
    """An engine over the tokenizer of `model_dir`.

    Raises:
        ConfigurationError: the tokenizer or the oracle cannot be read.
    """
    policy = ScriptedPolicy(model_dir, behaviour, _read_oracle(oracle))
    return ScriptedEngine(policy, behaviour, max_model_len, api_key, chaos or ChaosOptions())


def _read_oracle(path: Path | None) -> dict[str, str]:
    """Replies by a part of the prompt."""
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot be read: {error}", str(path)) from None
    if not isinstance(data, dict):
        raise ConfigurationError("is no mapping from instructions to replies", str(path))
    return {str(key): str(value) for key, value in cast(dict[Any, Any], data).items()}


def main(argv: list[str]) -> int:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m actors.scripted_engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--served-model-name", choices=[BASE_MODEL_NAME], default=BASE_MODEL_NAME)
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--behaviour", default="{}", help="a ScriptedEngineConfig as JSON")
    parser.add_argument("--oracle", type=Path, help="JSON file: part of a prompt to its reply")
    parser.add_argument("--fail-after", type=int, help="exit 1 after so many completions")
    parser.add_argument("--hang-after", type=int, help="answer none after so many completions")
    options = parser.parse_args(argv)
    try:
        behaviour = ScriptedEngineConfig.model_validate_json(options.behaviour)
    except ValidationError as error:
        raise ConfigurationError(str(error), "--behaviour") from None
    engine = make_engine(
        options.model,
        behaviour,
        options.max_model_len,
        os.environ.get(API_KEY_VARIABLE),
        options.oracle,
        ChaosOptions(options.fail_after, options.hang_after),
    )
    web.run_app(
        engine.application(), host=options.host, port=options.port, print=None, access_log=None
    )
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
