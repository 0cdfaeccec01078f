"""The bash-tool harness: turns of one episode, token in and token out.

Invariants:
- The conversation is only extended.  Of the final token sequence, exactly the
  tokens that the model sampled are marked as such, with the sampler's logprobs;
  everything the harness or the renderer added is masked.
- A command is run only if the model finished writing it: a call that was cut
  by the length limit, or is malformed, is never executed.
- `run` returns before its deadline whatever the model does; running out of
  time, turns or context is the model's doing and still gets graded.
- Failures of engine and sandbox are not caught here: they mask the attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rl.agent.chat import Chat, Command, Malformed, NoCall
from rl.agent.shell import Shell
from rl.config import AgentConfig
from rl.records import Sample, StopReason, TurnRecord

# Below this many seconds a generation or a command is not worth starting.
MIN_USEFUL_S = 0.5


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: ids and logprobs as sampled (after temperature, nats)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


# (prompt ids, turn index, time limit in s) -> completion
Generate = Callable[[list[int], int, float], Awaitable[Generated]]


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What one agent run leaves behind."""

    stop_reason: StopReason
    samples: list[Sample]
    turns: list[TurnRecord]


@dataclass(slots=True)
class _Tokens:
    """The growing sequence, with what was sampled."""

    ids: list[int]
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])

    def add_given(self, ids: list[int]) -> None:
        """Adopt `ids`, which extend the sequence by tokens nobody sampled."""
        new = len(ids) - len(self.sampled)
        self.ids = ids
        self.sampled.extend([False] * new)
        self.logprobs.extend([0.0] * new)

    def add_sampled(self, generated: Generated) -> None:
        """Append a completion."""
        self.ids = [*self.ids, *generated.token_ids]
        self.sampled.extend([True] * len(generated.token_ids))
        self.logprobs.extend(generated.logprobs)


class BashAgent:
    """Runs one model on one task through a bash tool.

    Args:
        chat: renders and parses the model's conversations.
        config: turns, limits and recovery.
        generate: asks the engine for one completion.
        max_model_len: longest sequence the engine takes, tokens.
    """

    def __init__(
        self, chat: Chat, config: AgentConfig, generate: Generate, max_model_len: int
    ) -> None:
        self._chat = chat
        self._config = config
        self._generate = generate
        self._max_model_len = max_model_len

    async def run(self, instruction: str, shell: Shell, deadline: float) -> AgentResult:
        """Run the episode's turns.

        Args:
            instruction: the task's text.
            shell: the sandbox.
            deadline: on the running loop's clock, s.

        Raises:
            InfrastructureError: engine or sandbox failed.
        """
        prompt = self._chat.opening(instruction)
        tokens = _Tokens([])
        tokens.add_given(prompt)
        turns: list[TurnRecord] = []
        stop = await self._turns(tokens, turns, shell, deadline)
        sample = Sample(token_ids=tokens.ids, sampled=tokens.sampled, logprobs=tokens.logprobs)
        samples = [sample] if sample.sampled_tokens else []
        return AgentResult(stop, samples, turns)

    async def _turns(
        self, tokens: _Tokens, turns: list[TurnRecord], shell: Shell, deadline: float
    ) -> StopReason:
        """Turn after turn until something ends the episode; says what did."""
        config = self._config
        failures = 0
        for turn in range(config.max_turns):
            if len(tokens.ids) + config.max_new_tokens > self._max_model_len:
                return "context_limit"
            prompt = tokens.ids
            generated, generate_s = await self._sample(prompt, turn, deadline)
            if generated is None:
                return "time_limit"
            tokens.add_sampled(generated)
            completion = generated.token_ids
            call = self._chat.call(prompt, completion, cut=generated.finish_reason == "length")
            record = TurnRecord(
                prompt_tokens=len(prompt),
                completion_tokens=len(completion),
                text=self._chat.decode(completion),
                finish_reason=generated.finish_reason,
                generate_s=generate_s,
            )
            ran = any(earlier.command is not None for earlier in turns)
            if isinstance(call, NoCall) and ran:
                turns.append(record)
                return "completed"
            record, answer, out_of_time = await self._answer(call, record, shell, deadline)
            turns.append(record)
            if out_of_time:
                return "time_limit"
            failures = 0 if isinstance(call, Command) else failures + 1
            if failures > config.max_recoveries:
                return "no_command"
            if turn + 1 < config.max_turns:
                role = "tool" if isinstance(call, Command) else "user"
                extended = self._chat.extend(prompt, completion, answer, role)
                if extended is None:
                    return "no_command"
                tokens.add_given(extended)
        if all(turn.command is None for turn in turns):
            return "no_command"
        return "completed" if config.max_turns == 1 else "turn_limit"

    async def _sample(
        self, prompt: list[int], turn: int, deadline: float
    ) -> tuple[Generated | None, float]:
        """One completion and its seconds, or None when the time ran out first."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        left = deadline - start
        if left < MIN_USEFUL_S:
            return None, 0.0
        try:
            async with asyncio.timeout_at(deadline):
                generated = await self._generate(prompt, turn, left)
        except TimeoutError:
            return None, loop.time() - start
        return generated, loop.time() - start

    async def _answer(
        self, call: Command | Malformed | NoCall, record: TurnRecord, shell: Shell, deadline: float
    ) -> tuple[TurnRecord, str, bool]:
        """Run the command, or make the note: (record, text for the model, out of time)."""
        if not isinstance(call, Command):
            note = call.note if isinstance(call, Malformed) else _NO_CALL_NOTE
            return record.model_copy(update={"note": note}), note, False
        loop = asyncio.get_running_loop()
        start = loop.time()
        left = deadline - start
        if left < MIN_USEFUL_S:
            return record, "", True
        limit = min(self._config.command_timeout_s, left)
        result = await shell.run(call.text, limit, self._config.output_limit_bytes)
        record = record.model_copy(
            update={
                "command": call.text,
                "exit_code": result.exit_code,
                "output": result.output,
                "execute_s": loop.time() - start,
            }
        )
        answer = f"{result.output}\n[exit status {result.exit_code}]"
        return record, answer, loop.time() >= deadline


_NO_CALL_NOTE = "Your reply held no command. Call the bash tool, or finish the task."
