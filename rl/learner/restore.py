"""From a checkpoint's bytes back to a learner.

Invariant: whatever does not belong to this learner (another model's adapter, another
optimizer's moments, no state at all) is refused by its file's name, before anything
of the learner is changed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError

from rl.errors import EvidenceError
from rl.learner.checkpoint import load
from rl.learner.manifest import ADAPTER, OPTIMIZER
from rl.learner.policy import ADAPTER_WEIGHTS
from rl.learner.state import LearnerState

MOMENTS = ("exp_avg", "exp_avg_sq")
_FOREIGN = "resume with the model and the configuration that made it"
# What a file that is no state of ours makes torch and safetensors raise.
_UNREADABLE = (
    SafetensorError,
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


class Restorable(Protocol):
    """A learner that can become another one."""

    def load_state(self, state: LearnerState) -> None:
        """Become the learner that `state` was taken from, or change nothing."""
        ...


def restore(learner: Restorable, path: Path, config_digest: str) -> None:
    """Make `learner` the one whose checkpoint lies at `path`.

    Raises:
        EvidenceError: naming the file that is damaged or belongs to something else.
    """
    state = load(path, config_digest).learner
    try:
        learner.load_state(state)
    except EvidenceError as error:
        places = (path / error.where, path / ADAPTER / error.where)
        where = next((place for place in places if place.is_file()), path)
        raise EvidenceError(error.what, str(where), error.remedy) from error
    except _UNREADABLE as error:
        raise EvidenceError(
            f"can't be loaded: {str(error).splitlines()[0] if str(error) else error!r}",
            str(path / ADAPTER / ADAPTER_WEIGHTS),
            _FOREIGN,
        ) from error


def read_optimizer(
    content: bytes, version: int, shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The optimizer's and the random state of a learner at `version`.

    Args:
        content: what `PeftLearner.state` made.
        version: of the adapter that it belongs to.
        shapes: of the trained weights, in their order.

    Raises:
        EvidenceError: it is no such state, or one of other weights.
    """
    try:
        saved: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        found = saved["version"]
        moments = saved["optimizer"]["state"]
        held = [[tuple(moments[i][name].shape) for i in sorted(moments)] for name in MOMENTS]
        whole = {"rng", "cuda_rng"} <= saved.keys() and "param_groups" in saved["optimizer"]
    except _UNREADABLE as error:
        raise EvidenceError(
            f"is no optimizer's state of ours: {type(error).__name__}", OPTIMIZER, _FOREIGN
        ) from error
    if not whole:
        raise EvidenceError("lacks a part of a learner's state", OPTIMIZER, _FOREIGN)
    if found != version:
        raise EvidenceError(f"adapter of version {version}, optimizer of {found}", OPTIMIZER)
    # Before the first step there are no moments.
    if any(shape and shape != list(shapes) for shape in held):
        raise EvidenceError("holds moments of other weights", OPTIMIZER, _FOREIGN)
    return cast(dict[str, Any], saved)
