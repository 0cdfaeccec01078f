"""The bounds of a campaign, a table of `rl.config`'s tree."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl.values import Seconds, Section


class LimitsConfig(Section):
    """Bounds on the whole campaign."""

    watchdog_s: Seconds = Field(description="the campaign stops itself after this, s")
    function_bound_s: Seconds | None = Field(
        default=None, description="the provider's bound around it, s"
    )
    stall_s: Seconds = Field(default=1800.0, description="fails when nothing moves for so long, s")
    placement_s: Seconds = Field(
        default=60.0, description="how long resources that others use are waited for, s"
    )
    start_s: Seconds = Field(default=1800.0, description="limit of starting all actors, s")
    drain_s: Seconds = Field(
        default=120.0, description="limit of ending the attempts in flight when training ends, s"
    )
    checkpoint_s: Seconds = Field(default=600.0, description="limit of writing a checkpoint, s")
    stop_s: Seconds = Field(default=120.0, description="limit of stopping all actors, s")

    @model_validator(mode="after")
    def _watchdog_is_inside(self) -> LimitsConfig:
        if self.function_bound_s is not None and self.watchdog_s >= self.function_bound_s:
            raise ValueError("watchdog_s must be below function_bound_s")
        return self
