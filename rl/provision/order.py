"""What is said to a container, and what it answers: plain JSON over Modal's wire.

Invariants:
- Neither holds a secret.
- Whoever reads an order that is not its own version's refuses it: unknown keys are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from rl.errors import ConfigurationError, InfrastructureError, first_problem
from rl.records import Record

SOURCES: Final = Path("/opt/terminal-rl")  # the sources, in a container
STATE: Final = Path("/state")
MODELS: Final = Path("/models")
OWN: Final = Path("/opt/terminal-rl-own")  # of the container itself, and gone with it
CONFIG: Final = "submitted.json"  # the configuration, beside the sources
GATES: Final = "gates-report.json"  # what the launcher has proven of tasks, there as well
CLAIMS: Final = "claims"  # suffix of the Dict's name: who has which submission

Ending = Literal["done", "failed", "stopped", "taken"]


class Order(Record):
    """What a function is called with."""

    run_id: str = Field(description="the campaign")
    submission_id: str = Field(description="this attempt at it")
    intent_sha256: str = Field(description="of the intent of whoever asks")
    app: str = Field(description="name of the app, for what asks for more of its functions")
    claims: str = Field(description="name of the Dict of claims")
    environment: str = Field(description="Modal environment of both")


class Answer(Record):
    """What a function's call ends with."""

    ending: Ending = Field(
        description="done; failed: see exit_code; stopped: by somebody; taken: another call "
        "has this submission"
    )
    exit_code: int = Field(description="of the driver")
    resumed: bool = Field(default=False, description="whether it continued a run that was begun")
    owner: str = Field(default="", description="taken: the call that has it")
    note: str = Field(default="", description="for people")


def read_order(text: str) -> Order:
    """The order of a call.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        return Order.model_validate_json(text)
    except ValidationError as error:
        raise ConfigurationError(f"no order: {first_problem(error)}", "argument") from None


def read_answer(text: object, call: str) -> Answer:
    """The answer of a call.

    Raises:
        InfrastructureError: it is none.
    """
    try:
        return Answer.model_validate_json(str(text))
    except ValidationError as error:
        raise InfrastructureError(
            f"answered something else: {first_problem(error)}", call, "see its log"
        ) from None


def claim_key(submission_id: str, part: str) -> str:
    """The key in the Dict of claims: of the launcher, or of a function's call."""
    return f"{submission_id}/{part}"
