"""The context of one episode: branches of tokens, and what the next one begins with.

Invariants:
- A branch is only ever extended.
- A token that the model sampled is marked as sampled in the one branch that it was
  sampled in; where a later branch repeats it, it is given. So each is trained on once.
- A summary that is rejected stays in its branch, as given tokens.
- A branch is left only after a turn of its own, so there are at most as many branches
  as turns.
- Nothing here waits, renders or samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl.agent.calls import Call, NoCall
from rl.records import Sample

SummaryProblem = Literal["empty", "too_long", "holds_call"]

SUMMARY_NOTES: dict[SummaryProblem, str] = {
    "empty": "Your summary is empty. Write what you did and found out, in plain text.",
    "too_long": "Your summary is too long. Write a shorter one.",
    "holds_call": "Your reply holds a command; it was not run. Write a summary in plain text only.",
}


def handover(summary: str) -> str:
    """The message that stands for the turns that `summary` sums up."""
    return (
        "You have worked on this task before. Your summary of that:\n\n"
        f"{summary}\n\nGo on from there."
    )


def rejection(call: Call, text: str, tokens: int, cut: bool, limit: int) -> SummaryProblem | None:
    """Why a summary can't be used; None if it can.

    Args:
        call: what the reply asks to be run.
        text: what it says.
        tokens: its length.
        cut: whether the length limit ended it.
        limit: most tokens of a summary.
    """
    if cut or tokens > limit:
        return "too_long"
    if not isinstance(call, NoCall):
        return "holds_call"
    return None if text else "empty"


@dataclass(slots=True)
class Branch:
    """One token sequence, with what was sampled in it.

    Attributes:
        ids: of all its tokens.
        sampled: whether each is to be trained on here.
        logprobs: the sampler's, nats; 0 where not sampled.
        starts: where the reply of each turn begins, repeated turns first.
        repeated: how many of them are an earlier branch's.
        reply_start: where the latest reply begins, a summary's included.
    """

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    starts: list[int] = field(default_factory=list[int])
    repeated: int = 0
    reply_start: int = 0

    @classmethod
    def opened(cls, ids: list[int], starts: Sequence[int] = ()) -> Branch:
        """A branch of given tokens, with the starts of the turns that they repeat."""
        return cls(
            ids=ids,
            sampled=[False] * len(ids),
            logprobs=[0.0] * len(ids),
            starts=list(starts),
            repeated=len(starts),
            reply_start=len(ids),
        )

    @property
    def prompt(self) -> list[int]:
        """What the latest reply was sampled from."""
        return self.ids[: self.reply_start]

    @property
    def reply(self) -> list[int]:
        """The latest reply, as sampled."""
        return self.ids[self.reply_start :]

    @property
    def own_turns(self) -> int:
        """Turns that were sampled in this branch."""
        return len(self.starts) - self.repeated

    def extend(self, ids: list[int]) -> None:
        """Adopt `ids`, which extend the branch by tokens that nobody sampled.

        Raises:
            ValueError: they don't.
        """
        old = len(self.ids)
        if ids[:old] != self.ids:
            raise ValueError("the tokens of a branch can't be changed, only extended")
        self.ids = ids
        self.sampled.extend([False] * (len(ids) - old))
        self.logprobs.extend([0.0] * (len(ids) - old))

    def add_turn(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append the reply of a turn."""
        self.starts.append(len(self.ids))
        self._append(ids, [True] * len(ids), logprobs)

    def add_summary(self, ids: Sequence[int], logprobs: Sequence[float], accepted: bool) -> None:
        """Append a summary, which is trained on only if it is accepted."""
        kept = logprobs if accepted else [0.0] * len(ids)
        self._append(ids, [accepted] * len(ids), kept)

    def _append(
        self, ids: Sequence[int], sampled: Sequence[bool], logprobs: Sequence[float]
    ) -> None:
        self.reply_start = len(self.ids)
        self.ids = [*self.ids, *ids]
        self.sampled.extend(sampled)
        self.logprobs.extend(logprobs)


def next_branch(
    opening: list[int], old: Branch, continued: list[int], keep: int, limit: int
) -> Branch:
    """The branch of `opening` and the latest turns of `old`, token by token.

    Args:
        opening: system, task and summary, with the header of a reply behind them.
        old: the branch that is left.
        continued: its tokens up to its last turn, with the answer to that and a header.
        keep: most turns to repeat.
        limit: fewer are, so that the branch stays shorter than this, tokens.
    """
    for count in range(min(keep, len(old.starts)), 0, -1):
        first = old.starts[-count]
        if len(opening) + len(continued) - first < limit:
            shift = len(opening) - first
            starts = [start + shift for start in old.starts[-count:]]
            return Branch.opened([*opening, *continued[first:]], starts)
    return Branch.opened(opening)


def samples(branches: Sequence[Branch]) -> list[Sample]:
    """The training sequences: every branch in which something was sampled."""
    return [
        Sample(
            branch=index,
            token_ids=branch.ids,
            sampled=branch.sampled,
            logprobs=branch.logprobs,
        )
        for index, branch in enumerate(branches)
        if any(branch.sampled)
    ]
