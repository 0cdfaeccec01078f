"""The client against the scripted engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.scripted_engine import ScriptedEngine, make_engine
from rl.agent.client import EngineClient, SamplingParams
from rl.config import ScriptedEngineConfig
from rl.errors import DeadlineExceeded, EngineError
from rl.learner.stand_in import make_tiny_tokenizer

PROMPT = [3, 4, 5, 6]
SAMPLING = SamplingParams(max_tokens=32, temperature=0.7, seed=1)
GOOD: dict[str, Any] = {
    "model": "base",
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": [-0.5, -1.5]},
            "prompt_logprobs": [None, *({str(t): {"logprob": -1.0}} for t in PROMPT[1:])],
        }
    ],
}

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def with_server(
    app: web.Application,
    body: Callable[[EngineClient, str], Awaitable[None]],
    key: str | None = None,
) -> None:
    async def run() -> None:
        runner, url = await serve(app)
        client = EngineClient(key)
        try:
            await body(client, url)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(run())


def answering(answer: Handler) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    return app


def altered(**changes: Any) -> dict[str, Any]:
    choice = {**GOOD["choices"][0], **changes}
    return {**GOOD, "choices": [choice]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = ["```bash\nmkdir alpha\n```", "make a directory named alpha"]
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), corpus)


def engine(model_dir: Path, key: str | None = None, **behaviour: Any) -> ScriptedEngine:
    behaviour.setdefault("replies", ("```bash\nmkdir alpha\n```",))
    return make_engine(model_dir, ScriptedEngineConfig(**behaviour), 64, key)


def test_completion_is_deterministic_and_aligned(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        first = await client.generate(url, "base", PROMPT, SAMPLING, 5)
        again = await client.generate(url, "base", PROMPT, SAMPLING, 5)
        assert first == again
        assert len(first.token_ids) == len(first.logprobs)
        assert first.finish_reason == "stop"

    with_server(engine(model_dir).application(), body)


def test_stop_string_keeps_its_tokens(model_dir: Path) -> None:
    server = engine(model_dir)

    async def body(client: EngineClient, url: str) -> None:
        sampling = SamplingParams(max_tokens=32, seed=1, stop=("\n```",))
        done = await client.generate(url, "base", PROMPT, sampling, 5)
        assert server.policy._decode(done.token_ids) == "```bash\nmkdir alpha\n```"
        assert done.finish_reason == "stop"

    with_server(server.application(), body)


def test_token_limit_is_told(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        done = await client.generate(url, "base", PROMPT, SamplingParams(max_tokens=2), 5)
        assert len(done.token_ids) == 2
        assert done.finish_reason == "length"

    with_server(engine(model_dir).application(), body)


def test_prompt_logprobs_leave_out_the_first_token(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        values = await client.logprobs(url, "base", PROMPT, 5)
        assert len(values) == len(PROMPT) - 1
        assert all(value < 0 for value in values)

    with_server(engine(model_dir).application(), body)


def test_wrong_key_is_refused_and_the_right_one_is_not(model_dir: Path) -> None:
    async def refused(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="HTTP 401"):
            await client.list_models(url, 5)

    async def accepted(client: EngineClient, url: str) -> None:
        assert await client.list_models(url, 5) == ["base"]

    with_server(engine(model_dir, key="right").application(), refused, key="wrong")
    with_server(engine(model_dir, key="right").application(), accepted, key="right")


def test_unknown_model_names_model_and_url(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="HTTP 404") as caught:
            await client.generate(url, "policy-v9", PROMPT, SAMPLING, 5)
        assert "policy-v9" in caught.value.where and url in caught.value.where

    with_server(engine(model_dir).application(), body)


def test_server_failure_is_an_engine_error_at_once(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="HTTP 500"):
            await client.generate(url, "base", PROMPT, SAMPLING, 5)

    with_server(engine(model_dir, failure_rate=1.0).application(), body)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (altered(logprobs={"token_logprobs": [-0.5]}), "2 tokens with 1 logprobs"),
        (altered(logprobs={"token_logprobs": [-0.5, None]}), "not finite"),
        (altered(logprobs={"token_logprobs": [-0.5, float("nan")]}), "not finite"),
        (altered(logprobs={"token_logprobs": [-0.5, -9999.0]}), "no logprob"),
        (altered(logprobs={"token_logprobs": [-0.5, 2.0]}), "no logprob"),
        (altered(logprobs=None), "no object"),
        (altered(token_ids=[], logprobs={"token_logprobs": []}), "0 tokens of at most"),
        (altered(token_ids=[1, "x"]), "no token id"),
        (altered(token_ids=None), "no list"),
        (altered(finish_reason="abort"), "finish reason 'abort'"),
        (altered(prompt_token_ids=[1, *PROMPT]), "another prompt"),
        ({**GOOD, "model": "policy-v1"}, "answered for model 'policy-v1'"),
        ({**GOOD, "choices": []}, "0 choices"),
        ([], "no object"),
    ],
)
def test_answer_out_of_contract_is_an_engine_error(answer: Any, message: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match=message):
            await client.generate(url, "base", PROMPT, SAMPLING, 5)

    with_server(answering(handler), body)


def test_malformed_json_is_an_engine_error() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text='{"model": "ba', content_type="application/json")

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="no JSON"):
            await client.generate(url, "base", PROMPT, SAMPLING, 5)

    with_server(answering(handler), body)


def test_short_prompt_logprobs_are_an_engine_error() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(altered(prompt_logprobs=[None]))

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="1 prompt logprobs for 4"):
            await client.logprobs(url, "base", PROMPT, 5)

    with_server(answering(handler), body)


def test_request_is_complete_and_shaped_by_nothing_else() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(GOOD)

    async def body(client: EngineClient, url: str) -> None:
        sampling = SamplingParams(8, 0.7, 11, stop_token_ids=(2,), stop=("\n```",))
        await client.generate(url, "base", PROMPT, sampling, 5)

    with_server(answering(handler), body)
    assert seen == [
        {
            "model": "base",
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 11,
            "stop_token_ids": [2],
            "stop": ["\n```"],
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": "base",
        }
    ]


def test_silent_server_ends_at_the_deadline() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    async def body(client: EngineClient, url: str) -> None:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.3 s"):
            await client.generate(url, "base", PROMPT, SAMPLING, 0.3)
        assert time.monotonic() - began < 0.9

    with_server(answering(handler), body)


def test_connection_dropped_before_an_answer_is_tried_again() -> None:
    calls: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        if len(calls) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(GOOD)

    async def body(client: EngineClient, url: str) -> None:
        done = await client.generate(url, "base", PROMPT, SAMPLING, 5)
        assert done.token_ids == [7, 8]

    with_server(answering(handler), body)
    assert len(calls) == 2


def test_answer_cut_short_is_not_tried_again() -> None:
    calls: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"model"')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="connection failed"):
            await client.generate(url, "base", PROMPT, SAMPLING, 5)

    with_server(answering(handler), body)
    assert len(calls) == 1


def test_change_of_the_replica_is_sent_once() -> None:
    calls: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="connection failed"):
            await client.load_adapter(url, "policy-v1", "/adapter", 5)

    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", handler)
    with_server(app, body)
    assert len(calls) == 1


def test_dead_address_fails_after_a_bounded_number_of_tries() -> None:
    async def run() -> None:
        runner, url = await serve(web.Application())
        await runner.cleanup()
        client = EngineClient()
        began = time.monotonic()
        with pytest.raises(EngineError, match="replica is gone"):
            await client.generate(url, "base", PROMPT, SAMPLING, 60)
        assert time.monotonic() - began < 5
        await client.close()

    asyncio.run(run())


def test_each_event_loop_has_a_session_of_its_own(model_dir: Path) -> None:
    client = EngineClient()

    async def once() -> None:
        runner, url = await serve(engine(model_dir).application())
        assert await client.list_models(url, 5) == ["base"]
        await client.close()
        await runner.cleanup()

    asyncio.run(once())
    asyncio.run(once())


def test_hundreds_at_once_share_one_session(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        flights = [
            client.generate(url, "base", PROMPT, SamplingParams(8, seed=seed), 30)
            for seed in range(300)
        ]
        done = await asyncio.gather(*flights)
        assert len(done) == 300

    with_server(engine(model_dir, latency_s=0.2).application(), body)
