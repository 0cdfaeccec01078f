"""A real engine on the CPU under a `Replica`, held against transformers and PEFT.

One engine serves the whole module, in the order of the tests: what one loads,
a later one unloads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from actors.engine_command import REPOSITORY, engine_python
from actors.engine_guard import descendants, process_start
from actors.replica import Replica
from rl.agent.client import Completion, EngineClient, SamplingParams
from rl.errors import EngineError
from rl.learner.stand_in import make_tiny_model
from rl.records import AdapterBytes
from tests.support.engine_config import engine_campaign
from tests.support.tiny_adapter import load_adapted, load_base, logprobs, make_adapter

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        engine_python(os.environ) == sys.executable, reason="no engine environment is installed"
    ),
]

CORPUS = ["Create a directory named alpha.", "```bash\nmkdir alpha\n```", "mv beta gamma"] * 5
PROMPT = [5 + (7 * position) % 250 for position in range(70)]  # two whole KV blocks of 32
PROBE = [5 + (11 * position) % 250 for position in range(24)]
TOLERANCE = 1e-3  # nats, float32 against float32


@dataclass
class Bench:
    """The module's engine and its references."""

    runner: asyncio.Runner
    replica: Replica
    client: EngineClient
    base_url: str
    adapters: dict[int, AdapterBytes]
    models: dict[str, Any]

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def sample(self, model: str, seed: int, temperature: float = 0.7) -> Completion:
        sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=seed)
        return self.run(self.client.generate(self.base_url, model, PROMPT, sampling, 60))

    def reference(self, model: str, completion: Completion, temperature: float) -> list[float]:
        whole = PROMPT + completion.token_ids
        return logprobs(self.models[model], whole, temperature)[len(PROMPT) - 1 :]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    scratch = tmp_path_factory.mktemp("replica")
    model_dir = make_tiny_model(scratch / "model", CORPUS)
    adapters = {v: make_adapter(model_dir, scratch, v, PROBE) for v in (1, 2, 3, 4)}
    models = {f"policy-v{v}": load_adapted(model_dir, adapters[v], scratch) for v in (1, 2, 4)}
    models["base"] = load_base(model_dir)
    config = engine_campaign("vllm")
    with asyncio.Runner() as runner:
        replica = Replica(0, config, model_dir, scratch / "run")
        began = time.monotonic()
        base_url = runner.run(replica.start())
        print(f"\nready after {time.monotonic() - began:.1f} s")
        client = EngineClient(replica.api_key)
        yield Bench(runner, replica, client, base_url, adapters, models)
        runner.run(client.close())
        tree = replica.processes()
        runner.run(replica.stop())
        assert not [pid for pid in tree if process_start(pid) is not None]


def test_base_logprobs_are_after_temperature(bench: Bench) -> None:
    completion = bench.sample("base", seed=1)
    expected = bench.reference("base", completion, 0.7)
    assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    untempered = bench.reference("base", completion, 1.0)
    assert completion.logprobs != pytest.approx(untempered, abs=TOLERANCE)


def test_stop_string_and_token_are_returned_as_sampled(bench: Bench) -> None:
    whole = bench.sample("base", seed=2)
    stop_token = SamplingParams(12, 0.7, seed=2, stop_token_ids=(whole.token_ids[3],))
    cut = bench.run(bench.client.generate(bench.base_url, "base", PROMPT, stop_token, 60))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.logprobs)], abs=TOLERANCE)


def test_two_versions_load_and_match_their_own_references(bench: Bench) -> None:
    for version in (1, 2):
        print(f"\nversion {version}:", bench.run(bench.replica.load(bench.adapters[version])))
    assert bench.run(bench.replica.served()) == ["policy-v1", "policy-v2"]
    for name in ("policy-v1", "policy-v2", "base"):
        completion = bench.sample(name, seed=3)
        expected = bench.reference(name, completion, 0.7)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    first, second = (bench.adapters[v].probe.logprobs for v in (1, 2))
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.1


def test_prefix_cache_is_hit_and_exact_per_version(bench: Bench) -> None:
    for name in ("policy-v1", "policy-v2", "base"):
        bench.sample(name, seed=3)
    before = bench.run(bench.replica.metrics())["prefix_cache_hits_total"]
    for _ in range(2):
        for name in ("policy-v1", "policy-v2", "base"):
            completion = bench.sample(name, seed=4)
            expected = bench.reference(name, completion, 0.7)
            assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    after = bench.run(bench.replica.metrics())["prefix_cache_hits_total"]
    assert after - before == 6 * 64


def test_requests_in_flight_survive_a_load(bench: Bench) -> None:
    async def publish() -> list[Completion]:
        sampling = SamplingParams(max_tokens=100, temperature=0.7, seed=6)
        flights = [
            asyncio.create_task(bench.client.generate(bench.base_url, name, PROMPT, sampling, 120))
            for name in ("policy-v1", "policy-v2") * 4
        ]
        await asyncio.sleep(0.1)
        print("\nversion 4, under load:", await bench.replica.load(bench.adapters[4]))
        assert not all(flight.done() for flight in flights)
        return await asyncio.gather(*flights)

    done = bench.run(publish())
    for completion, name in zip(done, ("policy-v1", "policy-v2") * 4, strict=True):
        expected = bench.reference(name, completion, 0.7)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("base_model.model.", "base_model.model.language_model."),
        ("model.layers", "encoder.blocks"),
    ],
)
def test_adapter_with_wrong_keys_is_refused(bench: Bench, right: str, wrong: str) -> None:
    adapter = bench.adapters[3]
    weights = load(adapter.files["adapter_model.safetensors"])
    renamed = {key.replace(right, wrong, 1): weight for key, weight in weights.items()}
    files = adapter.files | {"adapter_model.safetensors": save(renamed)}
    name = f"wrong-{len(wrong)}"
    with pytest.raises(EngineError, match="from the trainer's"):
        bench.run(bench.replica.load_named(name, adapter.model_copy(update={"files": files})))
    assert name not in bench.run(bench.replica.served())


def test_adapter_of_another_version_is_refused_by_its_probe(bench: Bench) -> None:
    swapped = bench.adapters[1].model_copy(update={"files": bench.adapters[2].files})
    with pytest.raises(EngineError, match="from the trainer's"):
        bench.run(bench.replica.load_named("swapped", swapped))
    assert "swapped" not in bench.run(bench.replica.served())
    assert not (bench.replica.home / "adapters" / "swapped").exists()


def test_adapter_without_effect_is_refused_as_the_base_model(bench: Bench) -> None:
    adapter = bench.adapters[1]
    weights = load(adapter.files["adapter_model.safetensors"])
    inert = {key: weight * 0.0 for key, weight in weights.items()}
    base = logprobs(bench.models["base"], PROBE)
    near = [value - 0.01 for value in base]
    void = AdapterBytes(
        version=7,
        files=adapter.files | {"adapter_model.safetensors": save(inert)},
        sha256=adapter.sha256,
        probe=adapter.probe.model_copy(update={"logprobs": near, "base_logprobs": base}),
    )
    with pytest.raises(EngineError, match="equals the base model's"):
        bench.run(bench.replica.load(void))


def test_name_is_never_loaded_twice(bench: Bench) -> None:
    with pytest.raises(EngineError, match="already used"):
        bench.run(bench.replica.load(bench.adapters[1]))


def test_unloaded_version_is_gone_and_the_other_stays(bench: Bench) -> None:
    directory = bench.replica.home / "adapters" / "policy-v1"
    assert directory.exists()
    bench.run(bench.replica.unload(1))
    assert not directory.exists()
    with pytest.raises(EngineError, match="HTTP 404"):
        bench.sample("policy-v1", seed=1)
    completion = bench.sample("policy-v2", seed=8)
    expected = bench.reference("policy-v2", completion, 0.7)
    assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_owner_killed_while_its_engine_starts_leaves_nothing(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", CORPUS)
    script = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from actors.replica import Replica\n"
        "from tests.support.engine_config import engine_campaign\n"
        f"root = Path({str(tmp_path)!r})\n"
        "asyncio.run(Replica(0, engine_campaign('vllm'), root / 'model', root).start())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    limit = time.monotonic() + 200
    # two guards, server, resource tracker, engine core, worker
    while len(tree := descendants(owner.pid)) < 6:
        assert time.monotonic() < limit and owner.poll() is None
        time.sleep(0.1)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    limit = time.monotonic() + 20
    while [pid for pid in tree if process_start(pid) is not None]:
        assert time.monotonic() < limit, "the engine outlived its owner"
        time.sleep(0.05)


def test_server_killed_is_a_failure_and_leaves_nothing(bench: Bench) -> None:
    outer, inner, server, *rest = bench.replica.processes()
    assert len(rest) >= 2
    os.kill(server, signal.SIGKILL)
    limit = time.monotonic() + 20
    while [pid for pid in (outer, inner, server, *rest) if process_start(pid) is not None]:
        assert time.monotonic() < limit, "the engine core outlived its server"
        time.sleep(0.05)
    with pytest.raises(EngineError, match="exited with code 137"):
        bench.run(bench.replica.health())
    assert "dead" in repr(bench.replica)
