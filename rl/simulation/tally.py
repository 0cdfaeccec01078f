"""Running totals of a simulation: nothing that grows with the number of episodes.

*Waste* is the share of episodes that used up a slot for nothing: of all that were
trained on, dropped after they finished, or cancelled, those that were not trained
on.  An attempt that the infrastructure masked is neither.  What still runs or waits
for a batch when the last update ends is left over, and neither.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of episodes, and their seconds.

    Attributes:
        dispatched: attempts started.
        dispatched_s: their durations in the trace, whatever became of them.
        graded: attempts that ended by themselves.
        masked: ended by the infrastructure.
        cancelled: given up while running.
        trained: in a batch.
        trained_s: their durations in the trace.
        wasted: see the module.
        wasted_s: slot seconds that the wasted ones took.
        busy_s: slot seconds that ended attempts took.
        staleness: trained episodes by staleness.
    """

    dispatched: int = 0
    dispatched_s: float = 0.0
    graded: int = 0
    masked: int = 0
    cancelled: int = 0
    trained: int = 0
    trained_s: float = 0.0
    wasted: int = 0
    wasted_s: float = 0.0
    busy_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter[int])

    @property
    def waste(self) -> float:
        """See the module."""
        decided = self.trained + self.wasted
        return self.wasted / decided if decided else 0.0

    @property
    def mean_trained_s(self) -> float:
        """Mean trace duration of what was trained on, s."""
        return self.trained_s / self.trained if self.trained else 0.0

    @property
    def mean_dispatched_s(self) -> float:
        """Mean trace duration of what was dispatched, s."""
        return self.dispatched_s / self.dispatched if self.dispatched else 0.0

    @property
    def duration_bias(self) -> float:
        """How much longer, as a share, trained episodes are than dispatched ones."""
        return self.mean_trained_s / self.mean_dispatched_s - 1 if self.trained else 0.0

    @property
    def left_over(self) -> int:
        """Dispatched attempts that were neither trained on, nor wasted, nor masked."""
        return self.dispatched - self.trained - self.wasted - self.masked
