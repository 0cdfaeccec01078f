"""The types of a configuration's values, and of its tables.

Invariants:
- A number is what it looks like: `true` is no integer, "8" is no number, and no
  number is infinite, undefined or too large for what it is handed to.
- A text can be encoded, and can be an argument of a process or part of a path.
- A table refuses keys that it doesn't know, and is frozen.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Seeds go to torch, NumPy and the engine, and counts into C; all take 31 bits.
MAX_INT = 2**31 - 1
MAX_AMOUNT = 1e9  # beyond any use, and products of such still fit float32
MAX_SECONDS = 1e8  # three years: far below what a lock's or a socket's timeout can hold


class Section(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _plain_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no character") from None
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


Text = Annotated[str, AfterValidator(_plain_text)]
# Ray's node labels, by key; a value may be a selector: "h100", "!spot", "in(a,b)".
Labels = dict[Text, Text]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[int, Field(gt=0, le=MAX_INT, strict=True)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]
AtLeastTwo = Annotated[int, Field(ge=2, le=MAX_INT, strict=True)]
PositiveAmount = Annotated[float, Field(gt=0, le=MAX_AMOUNT, allow_inf_nan=False, strict=True)]
Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Temperature = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False, strict=True)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
