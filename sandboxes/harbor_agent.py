"""The bash-tool harness as a Harbor agent: `harbor run -a sandboxes.harbor_agent:BashAgent`.

Two ways to sample, chosen by whether a tokenizer is given (`--ak model_dir=...`):

- token in, token out, over a server that returns token ids and logprobs (vLLM's
  /v1/completions): the very harness that training runs, with every sampled token and its
  logprob in Harbor's `rollout_details`;
- chat completions, over any other OpenAI-compatible server: no tokens are known.

Invariants:
- The agent returns by itself within `time_limit_s`, so that what it did is recorded; a
  limit of Harbor's that is shorter cancels it.
- An engine or a sandbox that fails raises, and so fails the trial; it is never a score.
- The trajectory (ATIF) is on disk before `run` returns.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, override

from harbor.agents.agent_auth_resolution import ModelConnectionSpec, ProviderAccess
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.model_api_format import ModelApiFormat
from pydantic import Field, ValidationError

from rl.agent.chat import BASH_TOOL, Chat
from rl.agent.chat_completions import ChatCompletionsAgent, Server
from rl.agent.client import EngineClient, SamplingParams
from rl.agent.harness import AgentResult, Generated
from rl.agent.harness import BashAgent as TokenAgent
from rl.agent.shell import Shell
from rl.agent_config import AgentConfig
from rl.config import ModelConfig
from rl.errors import ConfigurationError, first_problem
from rl.evidence.atif import About, trajectory, turn_tokens
from rl.files import write_json
from rl.records import Sample, TurnRecord
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.shells import BubblewrapShell, HarborShell

NAME = "terminal-rl-bash"
VERSION = "1"  # of the prompts and rules that a model meets; results compare within one
TRAJECTORY_NAME = "trajectory.json"  # where Harbor looks for ATIF, in the agent's logs
API_SUFFIX = "/v1"  # what OpenAI's clients want at an address, and the engine client adds
CLIENT_GRACE_S = 5.0  # a request's limit lies this far behind the agent's
PROMPTS = {
    "tool": "You are an expert at the terminal. Solve the task with the bash tool, one command "
    "at a time. Check your work, then reply without a tool call when it is done.",
    "fenced": "You are an expert at the terminal. Solve the task one command at a time, each in "
    "a block marked as bash. Check your work, then reply without a block when it is done.",
}


class BashAgentOptions(AgentOptions):
    """Options, given as `--ak key=value`."""

    model_dir: Path | None = Field(
        default=None, description="the model's directory, for its tokenizer: token in, token out"
    )
    renderer: str = Field(default="auto", description="how messages become tokens, by name")
    max_model_len: int = Field(default=32_768, gt=0, description="longest sequence, tokens")
    call_format: Literal["tool", "fenced"] = Field(
        default="tool", description="native tool calls, or one bash block per reply"
    )
    system_prompt: str | None = Field(
        default=None, description="the system message; absent: one for the call format"
    )
    max_turns: int = Field(default=32, description="replies per task")
    max_new_tokens: int = Field(default=2048, description="tokens per reply")
    temperature: float = Field(default=1.0, description="of sampling, above 0")
    seed: int | None = Field(default=None, ge=0, description="of sampling; absent: drawn")
    command_timeout_s: float = Field(default=120.0, description="limit of one command, s")
    output_limit_bytes: int = Field(default=16_384, description="kept of a command's output")
    max_recoveries: int = Field(
        default=3, description="consecutive replies without a usable command that are answered"
    )
    compaction_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of max_model_len at which the context is rebuilt with a summary; "
        "absent: never; token in, token out only",
    )
    summary_tokens: int = Field(default=1024, description="longest summary, tokens")
    time_limit_s: float = Field(default=600.0, gt=0, description="limit of the whole run, s")


class BashAgent(BaseAgent):
    """One bash tool, one command at a time."""

    capabilities = AgentCapabilities(base_url=True, atif=True)
    options_model = BashAgentOptions
    MODEL_CONNECTION = ModelConnectionSpec(
        default_provider="openai",
        base_url_destination_names={"default": None},
        agent_provider_access=ProviderAccess(
            api_key_candidate_names=["OPENAI_API_KEY"],
            base_url_candidate_names=["OPENAI_BASE_URL"],
        ),
        supported_api_formats=[ModelApiFormat.OPENAI_CHAT_COMPLETIONS],
    )

    @staticmethod
    @override
    def name() -> str:
        return NAME

    @override
    def version(self) -> str:
        return VERSION

    @staticmethod
    @override
    def _parse_model_name_for_connection(
        model_name: str, *, skip_model_parsing: bool = False
    ) -> tuple[str | None, str]:
        """The server's own name for the model, whatever other providers call theirs."""
        return (None if skip_model_parsing else "openai"), model_name

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Check the options before time is spent on a run.

        Raises:
            ConfigurationError: one is wrong, or the address or the model's name is missing.
        """
        self._server()
        self._config()

    @override
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Run the agent, fill `context` and write the trajectory.

        Raises:
            InfrastructureError: server or sandbox failed.
            ConfigurationError: the tokenizer or its renderer is not usable.
        """
        local = isinstance(environment, BubblewrapEnvironment)
        shell = BubblewrapShell(environment) if local else HarborShell(environment)
        deadline = asyncio.get_running_loop().time() + self._given.time_limit_s
        if self._given.model_dir is None:
            agent = ChatCompletionsAgent(self._server(), self._config(), self._given.seed)
            result = await agent.run(instruction, shell, deadline)
        else:
            result = await self._run_on_tokens(self._given.model_dir, instruction, shell, deadline)
        self._fill(context, result)
        self._write_trajectory(instruction, result)

    @property
    def _given(self) -> BashAgentOptions:
        if not isinstance(self.options, BashAgentOptions):
            raise ConfigurationError("has no options of its own", NAME)
        return self.options

    def _server(self) -> Server:
        """Where the model is served.

        Raises:
            ConfigurationError: the address or the model's name is missing.
        """
        connection = self.model_connection
        base_url = connection.execution_base_url or connection.candidate_base_url
        if not base_url or not self.model_name:
            raise ConfigurationError(
                "needs the model's name and the server's address",
                NAME,
                "give -m NAME and --base-url http://HOST:PORT/v1, or set OPENAI_BASE_URL",
            )
        return Server(base_url, self.model_name, connection.api_key)

    def _config(self) -> AgentConfig:
        """The harness's configuration.

        Raises:
            ConfigurationError: an option is out of its range.
        """
        given = self._given
        shared = AgentConfig.model_fields.keys() & BashAgentOptions.model_fields.keys()
        values = {name: getattr(given, name) for name in shared}
        compaction = {
            "threshold_share": given.compaction_share,
            "summary_tokens": given.summary_tokens,
        }
        try:
            return AgentConfig.model_validate(
                {
                    **values,
                    "system_prompt": given.system_prompt or PROMPTS[given.call_format],
                    "compaction": None if given.compaction_share is None else compaction,
                }
            )
        except ValidationError as error:
            raise ConfigurationError(first_problem(error), "--ak", "correct the option") from None

    async def _run_on_tokens(
        self, model_dir: Path, instruction: str, shell: Shell, deadline: float
    ) -> AgentResult:
        """The harness of training, over a server that takes and returns token ids."""
        server, config, given = self._server(), self._config(), self._given
        model = ModelConfig(
            name=server.model, source="path", path=str(model_dir), renderer=given.renderer
        )
        chat = Chat(model_dir, model, config)
        client = EngineClient(server.api_key)
        base_url = server.base_url.rstrip("/").removesuffix(API_SUFFIX)

        async def generate(prompt: list[int], turn: int, most: int, left: float) -> Generated:
            sampling = SamplingParams(
                max_tokens=most,
                temperature=config.temperature,
                seed=None if given.seed is None else given.seed + turn,
                stop_token_ids=tuple(chat.stop_token_ids),
                stop=tuple(chat.stop_strings),
            )
            limit_s = left + CLIENT_GRACE_S
            done = await client.generate(base_url, server.model, prompt, sampling, limit_s)
            return Generated(done.token_ids, done.logprobs, done.finish_reason)

        try:
            agent = TokenAgent(chat, config, generate, given.max_model_len)
            return await agent.run(instruction, shell, deadline)
        finally:
            await client.close()

    def _fill(self, context: AgentContext, result: AgentResult) -> None:
        context.n_input_tokens = sum(turn.prompt_tokens for turn in result.turns)
        context.n_output_tokens = sum(turn.completion_tokens for turn in result.turns)
        context.rollout_details = rollout_details(result.turns, result.samples) or None
        context.metadata = {"stop_reason": result.stop_reason, "turns": len(result.turns)}

    def _write_trajectory(self, instruction: str, result: AgentResult) -> None:
        config = self._config()
        about = About(
            session_id=self.session_id or NAME,
            agent_name=NAME,
            agent_version=VERSION,
            model_name=self.model_name or "",
            system_prompt=config.system_prompt,
            instruction=instruction,
            stop_reason=result.stop_reason,
            tools=(BASH_TOOL,) if config.call_format == "tool" else (),
        )
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        made = trajectory(result.turns, result.samples, about)
        write_json(self.logs_dir / TRAJECTORY_NAME, made)


def rollout_details(turns: list[TurnRecord], samples: list[Sample]) -> list[RolloutDetail]:
    """Harbor's record of the tokens, one for each branch of the context.

    A rejected summary is left out: its tokens are in the prompts of what follows, and
    are not trained on.
    """
    details: list[RolloutDetail] = []
    for sample in samples:
        found = [turn_tokens(turn, samples) for turn in turns if turn.branch == sample.branch]
        kept = [one for one in found if one is not None and one.logprobs is not None]
        details.append(
            RolloutDetail(
                prompt_token_ids=[one.prompt for one in kept],
                completion_token_ids=[one.completion for one in kept],
                logprobs=[one.logprobs or [] for one in kept],
            )
        )
    return details
