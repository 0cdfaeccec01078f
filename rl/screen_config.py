"""The configuration of a screen: which tasks a base model can learn from.

Invariant: those of `rl.config`.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rl.serving_config import ServingConfig
from rl.values import NonNegative, Positive, Section, Share


class ScreenSection(Section):
    """Attempts at every task, and the rule by which tasks are kept."""

    attempts: Positive = Field(description="attempts per task")
    shards: Positive = Field(description="disjoint sets of tasks, each on one replica")
    retries: NonNegative = Field(default=2, description="relaunches of a masked attempt")
    low: Share = Field(
        default=0.05, description="least pass rate of a task that is kept: below it nothing rewards"
    )
    high: Share = Field(
        default=0.95, description="largest pass rate of a task that is kept: above it none differ"
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> ScreenSection:
        if self.low > self.high:
            raise ValueError("low may not exceed high")
        return self


class ScreenConfig(ServingConfig):
    """One screening of task packages with the base model.

    `tasks.train` and `tasks.heldout` say how many of the kept tasks become each set.
    """

    screen: ScreenSection = Field(description="attempts, and which tasks are kept")

    @model_validator(mode="after")
    def _screen_fits(self) -> ScreenConfig:
        if self.screen.shards > self.engine.replicas:
            raise ValueError("screen.shards may not exceed engine.replicas")
        return self
