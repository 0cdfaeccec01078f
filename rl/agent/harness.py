"""The bash-tool harness: turns of one episode, token in and token out.

Invariants:
- The context is only extended, or begun anew with a summary (`rl.agent.compaction`).
  Of its tokens, exactly those that the model sampled are marked as such, with the
  sampler's logprobs; everything the harness or the renderer added is masked.
- A command is run only if the model finished writing it: a call that was cut
  by the length limit, or is malformed, is never executed.
- The task's instruction stands in every prompt.
- `run` returns before its deadline whatever the model does; running out of
  time, turns or context is the model's doing and still gets graded.
- Failures of engine and sandbox are not caught here: they mask the attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rl.agent.calls import CUT_IN_CALL, Call, Command, Malformed, NoCall
from rl.agent.chat import Chat, Told
from rl.agent.compaction import (
    SUMMARY_NOTES,
    Branch,
    handover,
    next_branch,
    rejection,
    samples,
)
from rl.agent.shell import Shell
from rl.agent_config import AgentConfig, CompactionConfig
from rl.records import Sample, StopReason, TurnRecord

# Below this many seconds a generation or a command is not worth starting.
MIN_USEFUL_S = 0.5
NO_CALL_NOTE = "Your reply held no command. Call the bash tool, or finish the task."
LEFT_OUT_OUTPUT = "[the output is left out: there was no room for it]"


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: ids and logprobs as sampled (after temperature, nats)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str

    @property
    def cut(self) -> bool:
        """Whether the length limit ended it."""
        return self.finish_reason == "length"


# (prompt ids, how many completions came before, most tokens, time limit in s) -> completion
Generate = Callable[[list[int], int, int, float], Awaitable[Generated]]


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What one agent run leaves behind: a sample for each branch of its context."""

    stop_reason: StopReason
    samples: list[Sample]
    turns: list[TurnRecord]


class BashAgent:
    """Runs one model on one task through a bash tool.

    Args:
        chat: renders and parses the model's conversations.
        config: turns, limits, recovery and compaction.
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
        opening = self._chat.opening(instruction)
        episode = _Episode(
            chat=self._chat,
            config=self._config,
            generate=self._generate,
            max_model_len=self._max_model_len,
            threshold=self._threshold(opening),
            instruction=instruction,
            shell=shell,
            deadline=deadline,
            branches=[Branch.opened(opening)],
        )
        stop = await episode.play()
        return AgentResult(stop, samples(episode.branches), episode.turns)

    def _threshold(self, opening: list[int]) -> int | None:
        """The length from which on a context is rebuilt, tokens; None: it never is.

        Below it there is room for a turn of full length, what it is answered without an
        output, the request, and a summary of full length.
        """
        compaction = self._config.compaction
        if compaction is None:
            return None
        told = (LEFT_OUT_OUTPUT, CUT_IN_CALL.note, compaction.request)
        asked = self._chat.extend(opening, [], [Told("user", text) for text in told]) or opening
        reserved = len(asked) - len(opening) + 2 * self._config.max_new_tokens
        return min(compaction.threshold(self._max_model_len), self._max_model_len - reserved)


@dataclass(slots=True)
class _Episode:
    """One run and where it stands."""

    chat: Chat
    config: AgentConfig
    generate: Generate
    max_model_len: int
    threshold: int | None
    instruction: str
    shell: Shell
    deadline: float
    branches: list[Branch]
    turns: list[TurnRecord] = field(default_factory=list[TurnRecord])

    async def play(self) -> StopReason:
        """Turn after turn until something ends the episode; says what did."""
        failures = 0
        for turn in range(self.config.max_turns):
            if not self._fits(self._branch.ids):
                return "context_limit"
            sampled = await self._sample(self.config.max_new_tokens)
            if sampled is None:
                return "time_limit"
            generated, record = sampled
            self._branch.add_turn(generated.token_ids, generated.logprobs)
            call = self.chat.call(self._branch.prompt, self._branch.reply, generated.cut)
            if isinstance(call, NoCall) and self._has_acted:
                self.turns.append(record)
                return "completed"
            record = await self._act(call, record)
            self.turns.append(record)
            was_late = isinstance(call, Command) and record.command is None
            if was_late or self._left_s() <= 0:
                return "time_limit"
            failures = 0 if isinstance(call, Command) else failures + 1
            if failures > self.config.max_recoveries:
                return "no_command"
            if turn + 1 < self.config.max_turns:
                stop = await self._go_on()
                if stop is not None:
                    return stop
        if not self._has_acted:
            return "no_command"
        return "completed" if self.config.max_turns == 1 else "turn_limit"

    async def _sample(self, most_tokens: int) -> tuple[Generated, TurnRecord] | None:
        """The current branch's next completion, or None when the time ran out first."""
        start = asyncio.get_running_loop().time()
        left = self._left_s()
        if left < MIN_USEFUL_S:
            return None
        prompt = self._branch.ids
        try:
            async with asyncio.timeout_at(self.deadline):
                generated = await self.generate(prompt, len(self.turns), most_tokens, left)
        except TimeoutError:
            return None
        return generated, TurnRecord(
            branch=len(self.branches) - 1,
            prompt_tokens=len(prompt),
            completion_tokens=len(generated.token_ids),
            text=self.chat.decode(generated.token_ids),
            finish_reason=generated.finish_reason,
            closer=self.chat.closer(prompt, generated.token_ids),
            generate_s=asyncio.get_running_loop().time() - start,
        )

    async def _act(self, call: Call, record: TurnRecord) -> TurnRecord:
        """Run the command, if there is time, or note why there is none."""
        if isinstance(call, Malformed):
            return record.model_copy(update={"problem": call.problem, "note": call.note})
        if isinstance(call, NoCall):
            return record.model_copy(update={"problem": "no_call", "note": NO_CALL_NOTE})
        left = self._left_s()
        if left < MIN_USEFUL_S:
            return record
        start = asyncio.get_running_loop().time()
        limit = min(self.config.command_timeout_s, left)
        result = await self.shell.run(call.text, limit, self.config.output_limit_bytes)
        return record.model_copy(
            update={
                "command": call.text,
                "left_out": call.left_out,
                "exit_code": result.exit_code,
                "output": result.output,
                "execute_s": asyncio.get_running_loop().time() - start,
            }
        )

    async def _go_on(self) -> StopReason | None:
        """Tell the model what its turn led to, in this branch or in the next one."""
        continued = self._extended(_answer(self.turns[-1]))
        if continued is None:
            return "no_command"
        compaction = self.config.compaction
        if compaction and self.threshold is not None and len(continued) >= self.threshold:
            return await self._compact(compaction, self.threshold)
        self._branch.extend(continued)
        return None

    async def _compact(self, compaction: CompactionConfig, threshold: int) -> StopReason | None:
        """Begin a branch with a summary of this one; says what prevented it."""
        asked = compaction.request
        told = [self._shortened_answer(asked)]
        continued = self._extended(*told)
        for _ in range(1 + compaction.max_retries):
            prompt = self._extended(*told, Told("user", asked))
            if continued is None or prompt is None or not self._fits(prompt):
                return "context_limit"
            self._branch.extend(prompt)
            sampled = await self._sample(compaction.summary_tokens)
            if sampled is None:
                return "time_limit"
            generated, record = sampled
            summary = self.chat.content(prompt, generated.token_ids)
            call = self.chat.call(prompt, generated.token_ids, generated.cut)
            problem = rejection(
                call, summary, len(generated.token_ids), generated.cut, compaction.summary_tokens
            )
            self._branch.add_summary(generated.token_ids, generated.logprobs, problem is None)
            record = record.model_copy(update={"purpose": "summary", "asked": asked})
            if problem is None:
                opening = self.chat.opening(self.instruction, handover(summary))
                keep = compaction.keep_turns
                branch = next_branch(opening, self._branch, continued, keep, threshold)
                changes = {"handover": handover(summary), "kept_turns": branch.repeated}
                self.turns.append(record.model_copy(update=changes))
                self.branches.append(branch)
                return None
            self.turns.append(record.model_copy(update={"problem": problem}))
            told, asked = [], SUMMARY_NOTES[problem]
        return "context_limit"

    def _shortened_answer(self, asked: str) -> Told:
        """The last turn's answer, without the output if that leaves no room for a summary."""
        record = self.turns[-1]
        prompt = self._extended(_answer(record), Told("user", asked))
        if record.command is not None and (prompt is None or not self._fits(prompt)):
            self.turns[-1] = record.model_copy(update={"output": LEFT_OUT_OUTPUT})
        return _answer(self.turns[-1])

    @property
    def _branch(self) -> Branch:
        return self.branches[-1]

    @property
    def _has_acted(self) -> bool:
        return any(turn.command is not None for turn in self.turns)

    def _extended(self, *told: Told) -> list[int] | None:
        """The current branch, whose last tokens are a reply, continued by messages."""
        return self.chat.extend(self._branch.prompt, self._branch.reply, told)

    def _fits(self, prompt: list[int]) -> bool:
        return len(prompt) + self.config.max_new_tokens <= self.max_model_len

    def _left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


def _answer(record: TurnRecord) -> Told:
    """What the model is told after a turn."""
    return Told("user" if record.command is None else "tool", record.answer)
