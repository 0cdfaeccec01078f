"""The scripted engine: seeded replies, an oracle, and vLLM's error codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.adapter_files import policy_name
from actors.replica import Replica
from actors.scripted_engine import ScriptedEngine, make_engine
from actors.scripted_policy import ScriptedPolicy
from rl.agent.client import EngineClient, SamplingParams
from rl.config import ScriptedEngineConfig
from rl.errors import ConfigurationError, EngineError
from rl.learner.stand_in import make_tiny_tokenizer
from rl.records import AdapterBytes, Probe
from tests.support.engine_config import engine_campaign

RIGHT = "```bash\nmkdir alpha\n```"
WRONG = "I cannot."
TOKENS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = [RIGHT, WRONG, "make a directory named alpha"]
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), corpus)


def policy(
    model_dir: Path, oracle: dict[str, str] | None = None, **behaviour: Any
) -> ScriptedPolicy:
    behaviour.setdefault("replies", (RIGHT, WRONG))
    return ScriptedPolicy(model_dir, ScriptedEngineConfig(**behaviour), oracle or {})


def adapter(version: int, logprobs: list[float]) -> AdapterBytes:
    return AdapterBytes(
        version=version,
        files={"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"},
        sha256="0" * 64,
        probe=Probe(token_ids=TOKENS, logprobs=logprobs),
    )


def serving(engine: ScriptedEngine, body: Callable[[EngineClient, str], Awaitable[None]]) -> None:
    async def run() -> None:
        runner = web.AppRunner(engine.application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = EngineClient()
        await body(client, f"http://127.0.0.1:{runner.addresses[0][1]}")
        await client.close()
        await runner.cleanup()

    asyncio.run(run())


def test_solve_rate_is_the_share_of_first_replies(model_dir: Path) -> None:
    scripted = policy(model_dir, solve_rate=0.25)
    texts = [scripted.reply(TOKENS, seed, 64).text for seed in range(400)]
    right = sum(text.startswith(RIGHT) for text in texts)
    assert 60 <= right <= 140
    assert all(text.startswith((RIGHT, WRONG)) for text in texts)


def test_reply_is_a_function_of_seed_and_prompt(model_dir: Path) -> None:
    first, second = policy(model_dir), policy(model_dir)
    for seed in range(20):
        assert first.reply(TOKENS, seed, 64) == second.reply(TOKENS, seed, 64)
    assert len({first.reply(TOKENS, seed, 64).text for seed in range(20)}) == 2


def test_reply_ends_with_the_end_token(model_dir: Path) -> None:
    reply = policy(model_dir).reply(TOKENS, 1, 64)
    assert reply.text.endswith("<|im_end|>")
    assert reply.finish_reason == "stop"
    assert all(value < 0 for value in reply.logprobs)


def test_oracle_answers_the_instruction_it_knows(model_dir: Path) -> None:
    oracle = {"named alpha": RIGHT, "directory named alpha": "```bash\nmkdir -p alpha\n```"}
    scripted = policy(model_dir, oracle, replies=(WRONG,), solve_rate=1.0)
    known = scripted._encode("make a directory named alpha")
    unknown = scripted._encode("make a file")
    assert scripted.reply(known, 1, 64).text.startswith("```bash\nmkdir -p alpha")
    assert scripted.reply(unknown, 1, 64).text.startswith(WRONG)
    never = policy(model_dir, oracle, replies=(WRONG,), solve_rate=0.0)
    assert never.reply(known, 1, 64).text.startswith(WRONG)


def test_failures_follow_their_rate_and_a_retry_may_succeed(model_dir: Path) -> None:
    behaviour = ScriptedEngineConfig(replies=(RIGHT,), failure_rate=0.5)

    async def body(client: EngineClient, url: str) -> None:
        failed = 0
        for _ in range(60):
            try:
                await client.generate(url, "base", TOKENS, SamplingParams(64, seed=1), 5)
            except EngineError as error:
                assert "HTTP 500" in error.what
                failed += 1
        assert 12 <= failed <= 48

    serving(make_engine(model_dir, behaviour, 64), body)


def test_adapter_endpoints_answer_with_the_engines_codes(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="HTTP 404"):
            await client.load_adapter(url, "a", "/missing", 5)
        await client.load_adapter(url, "a", str(tmp_path), 5)
        assert await client.list_models(url, 5) == ["base", "a"]
        with pytest.raises(EngineError, match="HTTP 400"):
            await client.load_adapter(url, "a", str(tmp_path), 5)
        await client.unload_adapter(url, "a", 5)
        with pytest.raises(EngineError, match="HTTP 404"):
            await client.unload_adapter(url, "a", 5)
        with pytest.raises(EngineError, match="HTTP 404"):
            await client.generate(url, "a", TOKENS, SamplingParams(8), 5)

    serving(make_engine(model_dir, ScriptedEngineConfig(), 64), body)


def test_prompt_beyond_the_longest_sequence_is_refused(model_dir: Path) -> None:
    async def body(client: EngineClient, url: str) -> None:
        with pytest.raises(EngineError, match="maximum context length"):
            await client.generate(url, "base", [5] * 64, SamplingParams(8), 5)

    serving(make_engine(model_dir, ScriptedEngineConfig(), 64), body)


def test_replica_proves_its_adapters_against_the_scripted_engine(
    model_dir: Path, tmp_path: Path
) -> None:
    replica = Replica(0, engine_campaign("scripted"), model_dir, tmp_path)
    directory = tmp_path / "replica-0" / "adapters" / policy_name(1)

    async def run() -> None:
        assert "new" in repr(replica)
        base_url = await replica.start()
        client = EngineClient(replica.api_key)
        timings = await replica.load(adapter(1, [-1.0, -2.0, -3.0]))
        assert set(timings) == {"write", "load", "probe", "total"}
        assert await client.logprobs(base_url, "policy-v1", TOKENS, 5) == [-1.0, -2.0, -3.0]
        assert await replica.served() == ["policy-v1"]
        assert "policy-v1" in repr(replica)
        assert json.loads((directory / "probe.json").read_text())["token_ids"] == TOKENS
        with pytest.raises(EngineError, match="already used"):
            await replica.load(adapter(1, [-1.0, -2.0, -3.0]))
        await replica.unload(1)
        assert not directory.exists()
        with pytest.raises(EngineError, match="not served"):
            await replica.unload(1)
        await replica.health()
        assert (await replica.metrics())["generation_tokens_total"] > 0
        old = replica.processes()
        assert await replica.restart() != base_url
        assert not set(old) & set(replica.processes())
        await replica.load(adapter(1, [-1.0, -2.0, -3.0]))
        await client.close()
        await replica.stop()
        assert replica.processes() == []
        with pytest.raises(EngineError, match="not serving: stopped"):
            await replica.health()

    asyncio.run(run())


def test_replica_of_an_engine_that_died_says_so(model_dir: Path, tmp_path: Path) -> None:
    config = engine_campaign("scripted", extra_args=("--fail-after", "1"))
    replica = Replica(0, config, model_dir, tmp_path)

    async def run() -> None:
        url = await replica.start()
        client = EngineClient(replica.api_key)
        with pytest.raises(EngineError):
            await client.generate(url, "base", TOKENS, SamplingParams(8), 5)
        await client.close()
        with pytest.raises(EngineError, match="exited with code 1"):
            await replica.health()
        assert "dead" in repr(replica)
        await replica.stop()

    asyncio.run(run())


def test_missing_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such tokenizer"):
        make_engine(tmp_path, ScriptedEngineConfig(), 64)
