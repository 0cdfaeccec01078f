"""The harness as a Harbor agent: `harbor run` against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.trajectories import Trajectory

from actors.scripted_engine import ScriptedEngine
from actors.scripted_policy import ScriptedPolicy
from rl.config import ScriptedEngineConfig
from rl.errors import ConfigurationError
from rl.learner.stand_in import make_tiny_tokenizer
from sandboxes.bank import write_bank
from sandboxes.grading import grade
from sandboxes.harbor_agent import BashAgent
from sandboxes.tasks import TaskPackage, load_package
from tests.support.sandbox import started

ROOT = Path(__file__).resolve().parents[2]
KEY = "secret-of-the-server"
MODEL = "policy-v0"
REPLY = "```bash\n{command}\n```"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> TaskPackage:
    return load_package(write_bank(tmp_path_factory.mktemp("bank"), ["mkdir"], 1, seed=0)[0])


@pytest.fixture(scope="module")
def command(package: TaskPackage) -> str:
    assert package.solution_script is not None
    return package.solution_script.read_text().splitlines()[-1]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, package: TaskPackage) -> Path:
    corpus = [package.instruction, REPLY, "system user assistant"]
    return make_tiny_tokenizer(tmp_path_factory.mktemp("model"), corpus)


@pytest.fixture(scope="module")
def server(package: TaskPackage, command: str, model_dir: Path) -> Generator[str]:
    """An OpenAI-compatible server: scripted chat completions beside the scripted engine."""
    behaviour = ScriptedEngineConfig(replies=("no",), solve_rate=1.0)
    policy = ScriptedPolicy(
        model_dir, behaviour, {package.instruction: REPLY.format(command=command)}
    )
    engine = ScriptedEngine(policy, behaviour, max_model_len=4096, api_key=KEY)
    engine.served[MODEL] = model_dir

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["tools"][0]["function"]["name"] == "bash"
        answered = [one for one in body["messages"] if one["role"] == "tool"]
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        message: dict[str, Any] = {"role": "assistant", "content": "Done."}
        if not answered:
            calls = [{"id": "c1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 11, "completion_tokens": 7}
        return web.json_response({"model": MODEL, "choices": [choice], "usage": usage})

    application = engine.application()
    application.router.add_post("/v1/chat/completions", chat)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    port = runner.addresses[0][1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.run_until_complete(runner.cleanup())
    loop.close()


def _harbor_run(package: TaskPackage, jobs: Path, server: str, *options: str) -> tuple[Any, Any]:
    """The one trial's result, and its trajectory as Harbor's model reads it."""
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "harbor"), "run", "-p", str(package.path)),
            *("-a", "sandboxes.harbor_agent:BashAgent", "-m", MODEL, "--base-url", server),
            *("-e", "sandboxes.bubblewrap:BubblewrapEnvironment", "-o", str(jobs)),
            *(part for option in options for part in ("--ak", option)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "HARBOR_TELEMETRY": "0",
            "PYTHONPATH": str(ROOT),
            "OPENAI_API_KEY": KEY,
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path: json.loads(path.read_text()) for path in jobs.rglob("result.json")}
    ((path, result),) = [item for item in found.items() if "verifier_result" in item[1]]
    assert result["exception_info"] is None, result["exception_info"]
    text = (path.parent / "agent" / "trajectory.json").read_text()
    return result, Trajectory.model_validate_json(text)


def test_harbor_runs_the_agent_over_chat_completions(
    package: TaskPackage, command: str, server: str, tmp_path: Path
) -> None:
    result, trajectory = _harbor_run(package, tmp_path, server, "max_turns=3")
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    context = result["agent_result"]
    assert (context["n_input_tokens"], context["n_output_tokens"]) == (22, 14)
    assert context["rollout_details"] is None
    assert context["metadata"] == {"stop_reason": "completed", "turns": 2}
    assert context["model_usage"][MODEL]["n_output_tokens"] == 14
    asked, ended = trajectory.steps[2:]
    assert asked.tool_calls is not None and asked.observation is not None
    assert asked.tool_calls[0].arguments == {"command": command}
    assert asked.observation.results[0].content == "\n[exit status 0]"
    assert (ended.message, ended.tool_calls) == ("Done.", None)


def _agent(server: str, logs: Path, **options: Any) -> BashAgent:
    return BashAgent(
        logs_dir=logs,
        model_name=MODEL,
        base_url=server,
        extra_env={"OPENAI_API_KEY": KEY},
        **options,
    )


def test_tokens_are_kept_where_the_server_takes_and_returns_them(
    package: TaskPackage, command: str, server: str, model_dir: Path, tmp_path: Path
) -> None:
    agent = _agent(
        server,
        tmp_path / "agent",
        model_dir=str(model_dir),
        renderer="chatml",
        call_format="fenced",
        max_turns=1,
        max_new_tokens=200,
        max_model_len=4096,
        seed=3,
    )
    context = AgentContext()

    async def attempt() -> float:
        async with started(package, tmp_path / "scratch") as env:
            await agent.setup(env)
            await agent.run(package.instruction, env, context)
            return (await grade(env, package, 60)).reward

    assert asyncio.run(attempt()) == 1.0
    assert context.rollout_details is not None
    (detail,) = context.rollout_details
    (prompt,) = detail.get("prompt_token_ids", [])
    (completion,) = detail.get("completion_token_ids", [])
    (logprobs,) = detail.get("logprobs", [])
    assert len(prompt) == context.n_input_tokens
    assert len(completion) == len(logprobs) == context.n_output_tokens
    assert all(value < 0 for value in logprobs)
    text = (tmp_path / "agent" / "trajectory.json").read_text()
    step = Trajectory.model_validate_json(text).steps[-1]
    assert command in str(step.message) and step.metrics is not None
    assert step.metrics.prompt_token_ids == prompt
    assert step.metrics.completion_token_ids == completion
    assert step.metrics.logprobs == logprobs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_turns": 0}, "max_turns"),
        ({"compaction_share": 0.5, "summary_tokens": 4096}, "summary_tokens"),
    ],
)
def test_option_out_of_range_is_refused_before_the_run(
    server: str, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        asyncio.run(_agent(server, tmp_path, **options).setup(cast(BaseEnvironment, None)))


def test_unknown_option_and_missing_address_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="Unknown option 'max_turn'"):
        BashAgent(logs_dir=tmp_path, model_name=MODEL, max_turn=3)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    agent = BashAgent(logs_dir=tmp_path, model_name=MODEL)
    with pytest.raises(ConfigurationError, match="--base-url"):
        asyncio.run(agent.setup(cast(BaseEnvironment, None)))
