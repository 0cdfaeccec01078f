"""The `trainer.loss` table: the objective, and what it is divided by.

Invariants:
- A loaded `LossConfig` holds a number for every knob of its objective, given or by
  default, and none for any other: `KNOBS` is the one list of both.
- A knob that the objective doesn't have is refused when it is set, never ignored.
- `normaliser_constant` is given exactly when it is divided by.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from rl.values import Amount, Fraction, PositiveAmount, Section

LossName = Literal[
    "trust_region", "importance_sampling", "ppo_clip", "cispo", "icepop", "tis", "gspo"
]
AdvantageKind = Literal["mean", "mean_std"]
Normalisation = Literal["tokens", "sequences", "constant"]

DEFAULT_LOSS: LossName = "trust_region"

# The knobs of every objective with their defaults; docs/learner.md has the sources.
KNOBS: dict[str, dict[str, float]] = {
    "trust_region": {"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 1e-3},
    "importance_sampling": {},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"ratio_cap": 5.0},
    "icepop": {"clip_low": 0.2, "clip_high": 0.2},
    "tis": {"ratio_cap": 2.0},
    # Of a whole sequence's mean log-ratio, which moves far less than a token's.
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
KNOB_NAMES = sorted({knob for knobs in KNOBS.values() for knob in knobs})


def _defaults(knob: str) -> str:
    """Which objectives have the knob, and its default in each."""
    return ", ".join(f"{name} {knobs[knob]:g}" for name, knobs in KNOBS.items() if knob in knobs)


class LossConfig(Section):
    """The policy-gradient objective; formulas in docs/learner.md."""

    name: LossName = Field(default=DEFAULT_LOSS, description="objective, see docs/learner.md")
    advantage: AdvantageKind = Field(
        default="mean", description="centre by the group, or also divide by its deviation"
    )
    normalisation: Normalisation = Field(
        default="tokens",
        description="what an update's summed loss is divided by; tokens: its loss tokens; "
        "sequences: each sequence's mean over its loss tokens counts once; "
        "constant: normaliser_constant",
    )
    normaliser_constant: PositiveAmount | None = Field(
        default=None, description="constant: the divisor of an update's summed token losses"
    )
    clip_low: Fraction | None = Field(
        default=None,
        description="largest decrease that is pushed: of a probability (trust_region), of the "
        f"ratio below 1 (others); defaults: {_defaults('clip_low')}",
    )
    clip_high: PositiveAmount | None = Field(
        default=None,
        description="largest increase that is pushed: of a probability (trust_region), of the "
        f"ratio above 1 (others); defaults: {_defaults('clip_high')}",
    )
    kl_weight: Amount | None = Field(
        default=None, description=f"weight of the squared log-ratio; {_defaults('kl_weight')}"
    )
    ratio_cap: PositiveAmount | None = Field(
        default=None,
        description=f"largest weight that a token's ratio gives it; {_defaults('ratio_cap')}",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, data: Any) -> Any:
        """Put in the objective's own defaults, so that they are frozen with the rest."""
        if not isinstance(data, dict):
            return data
        given = cast(dict[str, Any], data)
        name = given.get("name", DEFAULT_LOSS)
        # A name of another type is refused as every wrong value is, after this.
        defaults = KNOBS.get(name, {}) if isinstance(name, str) else {}
        # A dumped configuration has null for a knob that isn't there.
        unset = {knob for knob in KNOB_NAMES if given.get(knob) is None}
        kept = {key: value for key, value in given.items() if key not in unset}
        return {**defaults, **kept}

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> LossConfig:
        own = KNOBS[self.name]
        foreign = [k for k in KNOB_NAMES if k not in own and getattr(self, k) is not None]
        if foreign:
            raise ValueError(
                f"{self.name} has no {' or '.join(foreign)}: "
                + (f"its knobs are {', '.join(own)}" if own else "it has no knobs")
            )
        if (self.normalisation == "constant") != (self.normaliser_constant is not None):
            raise ValueError("normaliser_constant is given exactly when normalisation = 'constant'")
        return self

    def normaliser(self, tokens: int, sequences: int) -> float:
        """What the summed loss of so many loss tokens in so many sequences is divided by."""
        if self.normaliser_constant is not None:
            return self.normaliser_constant
        return sequences if self.normalisation == "sequences" else tokens

    @property
    def knobs(self) -> dict[str, float]:
        """The objective's knobs, as its function takes them."""
        return {knob: getattr(self, knob) for knob in KNOBS[self.name]}
