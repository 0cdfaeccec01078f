"""Compaction: exact tokens, masks, logprobs and branches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl.agent.chat import Chat
from rl.agent.compaction import SUMMARY_NOTES, Branch, handover, next_branch
from rl.agent.harness import LEFT_OUT_OUTPUT, Generated
from rl.agent_config import AgentConfig
from rl.learner.tree import common_length
from rl.records import Sample, TurnRecord
from tests.unit.rl.agent.scripted import (
    END,
    RecordingShell,
    ScriptedModel,
    agent_config,
    ids_of,
    make_chat,
    parts,
    play,
    write_tokenizer,
)

NEXT = "<|im_start|>assistant\n"
TASK = f"<|im_start|>system\nUse bash.{END}\n<|im_start|>user\nDo it.{END}\n"
ASK = "Sum up."
DONE = f"done{END}"
LONG = "a b c d e f g h i j k l m " * 10


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(threshold: int, call_format: str = "fenced", **changes: object) -> AgentConfig:
    compaction = {
        "threshold_tokens": threshold,
        "summary_tokens": 30,
        "keep_turns": 0,
        "request": ASK,
    }
    return agent_config(call_format=call_format, max_turns=6, compaction=compaction | changes)


def user(*texts: str) -> str:
    return "\n" + "".join(f"<|im_start|>user\n{text}{END}\n" for text in texts) + NEXT


def fenced(command: str) -> str:
    return f"```bash\n{command}\n```{END}"


def called(command: str) -> str:
    call = f'{{"name": "bash", "arguments": {{"command": "{command}"}}}}'
    return f"<tool_call>\n{call}\n</tool_call>{END}"


def output(text: str) -> str:
    return f"{text}\n[exit status 0]"


def response(text: str) -> str:
    return f"<tool_response>\n{output(text)}\n</tool_response>"


Part = str | int  # text that nobody sampled, or the number of a reply


def expected(model: ScriptedModel, *texts: Part, masked: tuple[int, ...] = ()) -> list[object]:
    """The runs of a sample that consists of `texts`; replies in `masked` are no training data."""
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for text in texts:
        if isinstance(text, int) and text not in masked:
            part, trained, values = model.replies[text], True, model.logprobs[text]
        else:
            given = model.replies[text] if isinstance(text, int) else ids_of(model.chat, text)
            part, trained, values = given, False, [0.0] * len(given)
        ids += part
        sampled += [trained] * len(part)
        logprobs += values
    return list(parts(Sample(token_ids=ids, sampled=sampled, logprobs=logprobs)))


def decoded(chat: Chat, samples: list[Sample]) -> list[str]:
    return [chat._tokenizer.decode(sample.token_ids) for sample in samples]


@pytest.mark.parametrize(
    ("renderer", "call_format", "call", "answer"),
    [("chatml", "fenced", fenced, output), ("qwen3", "tool", called, response)],
)
def test_at_the_threshold_a_branch_of_task_and_summary_begins(
    model_dir: Path,
    renderer: str,
    call_format: str,
    call: Callable[[str], str],
    answer: Callable[[str], str],
) -> None:
    chat = make_chat(model_dir, config(1, call_format), renderer)
    opening = chat._tokenizer.decode(chat.opening("Do it."))
    model = ScriptedModel(chat, [call("ls"), call("cat a"), f"I found a.{END}", call("rm a"), DONE])
    one_turn = ids_of(chat, opening + call("ls") + user(answer(LONG)))
    shell = RecordingShell([LONG, "x", "y"])
    result = play(model, config(len(one_turn) + 1, call_format), shell)
    assert shell.commands == ["ls", "cat a", "rm a"]
    assert result.stop_reason == "completed"
    first, second = result.samples
    assert (first.branch, second.branch) == (0, 1)
    assert parts(first) == expected(
        model, opening, 0, user(answer(LONG)), 1, user(answer("x"), ASK), 2
    )
    again = opening.removesuffix(NEXT) + user(handover("I found a.")).removeprefix("\n")
    assert parts(second) == expected(model, again, 3, user(answer("y")), 4)
    assert common_length(first.token_ids, second.token_ids) > len(ids_of(chat, opening)) - 4


def test_latest_turns_are_repeated_token_by_token_and_masked(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    replies = [fenced("ls"), fenced("cat a"), f"I found a.{END}", fenced("rm a"), DONE]
    model = ScriptedModel(chat, replies)
    one_turn = ids_of(chat, TASK + NEXT + replies[0] + user(output(LONG)))
    settings = config(len(one_turn) + 1, keep_turns=1)
    result = play(model, settings, RecordingShell([LONG, "x", "y"]))
    first, second = result.samples
    again = TASK + user(handover("I found a.")).removeprefix("\n")
    assert parts(first)[-1] == (True, model.replies[2], model.logprobs[2])
    assert parts(second) == expected(
        model, again, 1, user(output("x")), 3, user(output("y")), 4, masked=(1,)
    )
    assert result.turns[2].kept_turns == 1


def test_a_turn_that_does_not_fit_the_next_branch_is_not_repeated(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), fenced("cat a"), f"I found a.{END}", DONE])
    settings = config(400, keep_turns=2)
    result = play(model, settings, RecordingShell(["x", "word " * 200]))
    assert result.turns[2].kept_turns == 0
    assert parts(result.samples[1])[-1][0]
    assert decoded(chat, result.samples)[1] == (
        TASK + user(handover("I found a.")).removeprefix("\n") + DONE
    )


def test_repeated_turns_are_repeated_again_while_they_are_among_the_latest() -> None:
    old = Branch.opened(list(range(10)), [4, 7])
    old.add_turn([10, 11], [-1.0, -1.0])
    continued = [*range(12), 12]
    new = next_branch([90, 91], old, continued, keep=2, limit=99)
    assert new.ids == [90, 91, 7, 8, 9, 10, 11, 12]
    assert new.starts == [2, 5]
    assert (new.repeated, new.own_turns) == (2, 0)
    assert not any(new.sampled)
    assert next_branch([90, 91], old, continued, keep=2, limit=6).ids == [90, 91, 10, 11, 12]
    assert next_branch([90, 91], old, continued, keep=2, limit=5).ids == [90, 91]


REJECTED = {
    "too_long": "I found a. " * 5 + END,
    "empty": END,
    "holds_call": fenced("rm a"),
}


@pytest.mark.parametrize("problem", ["too_long", "empty", "holds_call"])
def test_a_rejected_summary_is_kept_masked_never_run_and_asked_for_again(
    model_dir: Path, problem: str
) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), REJECTED[problem], f"I found a.{END}", DONE])
    shell = RecordingShell("x")
    result = play(model, config(1), shell)
    assert shell.commands == ["ls"]
    note = next(note for name, note in SUMMARY_NOTES.items() if name == problem)
    first, second = result.samples
    assert parts(first) == expected(
        model, TASK + NEXT, 0, user(output("x"), ASK), 1, user(note), 2, masked=(1,)
    )
    assert parts(second) == expected(
        model, TASK + user(handover("I found a.")).removeprefix("\n"), 3
    )
    assert [turn.problem for turn in result.turns] == [None, problem, None, None]
    turn, summary = config(1).max_new_tokens, 30
    assert model.limits == [turn, summary, summary, turn]


def test_a_summary_cut_by_the_length_limit_is_rejected(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), "I found", f"I found a.{END}", DONE], cut=[1])
    result = play(model, config(1), RecordingShell())
    assert result.turns[1].problem == "too_long"
    assert result.stop_reason == "completed"


def test_without_an_acceptable_summary_the_episode_ends_at_the_cap(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), END, END, END, END])
    result = play(model, config(1, max_retries=2), RecordingShell("x"))
    assert result.stop_reason == "context_limit"
    assert [turn.problem for turn in result.turns] == [None, "empty", "empty", "empty"]
    (sample,) = result.samples
    assert sample.sampled_tokens == len(model.replies[0])


def test_a_full_window_is_rebuilt_below_any_threshold(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), f"I found a.{END}", DONE])
    turn = ids_of(chat, TASK + NEXT + fenced("ls") + user(output(LONG), ASK))
    settings = config(10**6)
    window = len(turn) + settings.max_new_tokens  # just enough for a summary
    result = play(model, settings, RecordingShell(LONG), max_model_len=window)
    assert result.stop_reason == "completed"
    assert len(result.samples) == 2
    assert result.turns[0].output == LONG


def test_an_output_that_leaves_no_room_for_a_summary_is_left_out(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), f"I found a.{END}", DONE])
    result = play(model, config(1), RecordingShell("word " * 400), max_model_len=400)
    assert result.stop_reason == "completed"
    assert result.turns[0].output == LEFT_OUT_OUTPUT
    told = user(output(LEFT_OUT_OUTPUT), ASK)
    assert parts(result.samples[0]) == expected(model, TASK + NEXT, 0, told, 1)


class NeverBrief:
    """Fills every reply, within a command, and sums up when it is asked to."""

    def __init__(self, chat: Chat, tokens: int) -> None:
        self.chat = chat
        self.reply = ids_of(chat, "```bash\n" + "a " * tokens)[:tokens]
        self.summary = ids_of(chat, f"I found a.{END}")

    async def __call__(self, prompt: list[int], number: int, most: int, left: float) -> Generated:
        del number, most, left
        asked = self.chat._tokenizer.decode(prompt).endswith(user(ASK))
        ids = self.summary if asked else self.reply
        return Generated(ids, [-1.0] * len(ids), "stop" if asked else "length")


@pytest.mark.parametrize("renderer", ["chatml", "qwen3"])
def test_there_is_room_for_a_summary_however_the_window_is_filled(
    model_dir: Path, renderer: str
) -> None:
    settings = config(10**6).model_copy(update={"max_recoveries": 9})
    chat = make_chat(model_dir, settings, renderer)
    model = NeverBrief(chat, settings.max_new_tokens)
    branches: set[int] = set()
    for window in range(500, 650, 20):
        result = play(model, settings, RecordingShell(), max_model_len=window)
        assert result.stop_reason == "no_command"
        assert sum(turn.purpose == "act" for turn in result.turns) == settings.max_turns
        branches.add(len(result.samples))
    assert min(branches) > 1


def test_a_window_without_room_for_a_summary_ends_the_episode(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    model = ScriptedModel(chat, [fenced("ls"), f"I found a.{END}", DONE])
    room = len(chat.opening("Do it.")) + 40
    result = play(model, config(1), RecordingShell("x"), max_model_len=room)
    assert result.stop_reason == "context_limit"
    assert len(model.prompts) == 1


def test_every_message_can_be_told_from_the_records(model_dir: Path) -> None:
    chat = make_chat(model_dir, config(1))
    replies = [
        fenced("ls"), "```bash\nrm a", END, f"I found a.{END}", fenced("cat a"), fenced("rm a"),
        f"a is gone.{END}", DONE,
    ]  # fmt: skip
    model = ScriptedModel(chat, replies, cut=[1])
    one_turn = ids_of(chat, TASK + NEXT + replies[0] + user(output(LONG)))
    settings = config(len(one_turn) + 1, keep_turns=1)
    result = play(model, settings, RecordingShell([LONG, "x", LONG]))
    assert result.stop_reason == "completed"
    assert [turn.kept_turns for turn in result.turns] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert decoded(chat, result.samples) == [told(result.turns, branch) for branch in range(3)]


def told(turns: list[TurnRecord], branch: int) -> str:
    """A branch's text, from the records alone."""
    text = TASK
    if branch:
        before = [turn for turn in turns if turn.branch < branch]
        text += user(before[-1].handover).removeprefix("\n")
        acts = [turn for turn in before if turn.purpose == "act"]
        for act in acts[len(acts) - before[-1].kept_turns :]:
            text += act.text + act.closer + END + user(act.answer)
    else:
        text += NEXT
    records = [turn for turn in turns if turn.branch == branch]
    for record, following in zip(records, [*records[1:], None], strict=True):
        text += record.text + record.closer + END
        if following:
            text += user(*[told for told in (record.answer, following.asked) if told])
    return text
