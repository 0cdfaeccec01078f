"""What the person at the terminal sees of a running campaign.

Invariants:
- Every stage, update, publication and note is one plain line, on a terminal and
  in a log alike; a terminal has a live status under them in addition.
- In a log, the state is repeated at most every `LOG_INTERVAL_S` seconds, so that
  a long stage is never silent and never floods.
- Showing progress decides nothing and holds nothing up.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.console import Group as Rows
from rich.live import Live
from rich.text import Text

from rl.records import EpisodeRecord, Publication, UpdateMetrics

LOG_INTERVAL_S = 20.0
_BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Prints a campaign's progress.

    Args:
        stderr: print to standard error, because standard output is for a script.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._begun = time.monotonic()
        self._logged = self._begun
        self._stage = ""
        self._updates = 0
        self._updates_done = 0
        self._rewards: list[float] = []
        self._state: dict[str, int | bool] = {}
        self._window: Counter[str] = Counter()
        self._arms: dict[str, tuple[int, float]] = {}
        self._arm_total = 0
        self._gated = (0, 0)
        self._evals: dict[int, tuple[int, int]] = {}  # by version: graded, solved

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._status, console=self._console, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def plan(self, updates: int, attempts_per_arm: int) -> None:
        """How much there is to do."""
        self._updates = updates
        self._arm_total = attempts_per_arm

    def stage(self, name: str, detail: str = "") -> None:
        """A stage begins."""
        self._stage = name
        self._line(f"== {name}" + (f": {detail}" if detail else ""))

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._line(f"   {text}")

    def gate(self, done: int, total: int) -> None:
        """Tasks gated so far."""
        self._gated = (done, total)
        self._log_state(f"gated {done}/{total} tasks")

    def episode(self, record: EpisodeRecord) -> None:
        """An episode ended while training goes on."""
        if record.stage == "eval":
            done, solved = self._evals.get(record.version, (0, 0))
            graded, won = record.outcome == "graded", (record.reward or 0.0) >= 1.0
            self._evals[record.version] = (done + graded, solved + won)
            return
        if record.outcome == "graded":
            self._window["solved" if record.reward and record.reward >= 1.0 else "unsolved"] += 1
        else:
            self._window[record.outcome] += 1

    def update(self, metrics: UpdateMetrics) -> None:
        """An update was made."""
        self._rewards.append(metrics.reward_mean)
        self._updates_done = metrics.update
        stale = ", ".join(f"{n} at {s}" for s, n in sorted(metrics.staleness.items()))
        whole = metrics.effective_sample_size
        sample = f"  ESS {whole:.0%}" if whole is not None else ""
        self._line(
            f"   update {metrics.update:>3}/{self._updates}  reward {metrics.reward_mean:.3f}"
            f"  loss {metrics.loss:+.4f}  grad {metrics.grad_norm:.3f}"
            f"  mismatch KL {metrics.mismatch_kl:.1e}{sample}  entropy {metrics.entropy:.3f}"
            f"  staleness {stale}  {metrics.seconds:.1f} of {metrics.wall_s:.1f} s"
        )

    def evaluated(self, version: int, graded: int, cells: int, reason: str) -> None:
        """An evaluation during training has ended."""
        done, solved = self._evals.get(version, (0, 0))
        share = f", {solved / done:.0%}" if done else ""
        short = f"; {cells - graded} of {cells} are missing: {reason}" if reason else ""
        self._line(
            f"   version {version} solves {solved} of {done} held-out attempts{share}{short}"
        )

    def published(self, publication: Publication) -> None:
        """A version became current."""
        where = ", ".join(str(replica) for replica in publication.replicas)
        self._line(
            f"   version {publication.version} serves on replicas {where}"
            f" ({publication.seconds:.1f} s)"
        )

    def state(self, **numbers: int | bool) -> None:
        """The scheduler's numbers now."""
        self._state = numbers
        self._log_state(self._state_text())

    def heldout(self, record: EpisodeRecord) -> None:
        """A held-out attempt ended."""
        if record.outcome != "graded" or record.arm is None or record.reward is None:
            return
        count, total = self._arms.get(record.arm, (0, 0.0))
        self._arms[record.arm] = (count + 1, total + record.reward)
        self._log_state(self._arms_text())

    def _state_text(self) -> str:
        state = self._state
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self._window.items()))
        trainer = "busy" if state.get("training") else "waiting"
        return (
            f"in flight {state.get('in_flight', 0)}, groups ready {state.get('ready_groups', 0)},"
            f" trainer {trainer}; episodes: {ended or 'none yet'}"
        )

    def _arms_text(self) -> str:
        return "  ".join(
            f"{arm} {count}/{self._arm_total}, mean reward {total / count:.2f}"
            for arm, (count, total) in self._arms.items()
        )

    def _status(self) -> Rows:
        """The live status: two or three lines under the log."""
        clock = _clock(time.monotonic() - self._begun)
        lines = [f"[{clock}] {self._stage}"]
        if self._rewards:
            spark = "".join(_bar(reward) for reward in self._rewards)
            lines.append(f"  updates {self._updates_done}/{self._updates}  reward {spark}")
        if self._arms:
            lines.append(f"  {self._arms_text()}")
        elif self._state:
            lines.append(f"  {self._state_text()}")
        elif self._gated[1]:
            lines.append(f"  gated {self._gated[0]}/{self._gated[1]} tasks")
        return Rows(*(Text(line, style="bold" if i == 0 else "") for i, line in enumerate(lines)))

    def _log_state(self, text: str) -> None:
        now = time.monotonic()
        if self._live is None and now - self._logged >= LOG_INTERVAL_S:
            self._line(f"   {text}")

    def _line(self, text: str) -> None:
        self._logged = time.monotonic()
        clock = _clock(self._logged - self._begun)
        self._console.print(Text(f"{clock} {text}"))


def _clock(seconds: float) -> str:
    """Minutes and seconds, hours where there are any."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def _bar(reward: float) -> str:
    """One character whose height is a reward between 0 and 1."""
    level = int(min(max(reward, 0.0), 1.0) * (len(_BARS) - 1) + 0.5)
    return _BARS[level]
