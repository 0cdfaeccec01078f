"""What differs between two checkpoints.

Invariants:
- Two checkpoints differ if anything differs that training goes on from: the update,
  the configuration, adapter, optimizer, or the scheduler's state.
- What is only measured or noted is told and makes no difference: durations of
  episodes, by which the scheduler orders its work, and versions of packages.
- Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from rl.learner.checkpoint import Checkpoint
from rl.records import Record

MEASURED: Final = frozenset({"durations"})  # of the scheduler's state: of time, not of training
_SHORT = 60  # characters of a value in a sentence


class Difference(Record):
    """One thing that differs."""

    part: str = Field(description="update, configuration, adapter, optimizer, scheduler, ...")
    what: str = Field(description="how, in words")


class Comparison(Record):
    """Two checkpoints, compared."""

    a: str = Field(description="path of the first")
    b: str = Field(description="path of the second")
    same: bool = Field(description="whether training would go on from both alike")
    differences: list[Difference]
    notes: list[Difference] = Field(description="what differs without making a difference")
    largest_weight: float | None = Field(
        description="largest change of one adapter weight; None: the tensors can't be compared"
    )
    relative_weight: float | None = Field(
        description="norm of the change by the norm of the first's weights"
    )
    largest_probe: float | None = Field(
        description="largest change of a probe token's logprob, nats; None: other tokens"
    )


def compare(a: Checkpoint, b: Checkpoint) -> Comparison:
    """Compare two verified checkpoints."""
    differences: list[Difference] = []
    notes: list[Difference] = []
    one, two = a.manifest, b.manifest
    if one.update != two.update:
        differences.append(Difference(part="update", what=f"{one.update} and {two.update}"))
    if one.config_digest != two.config_digest:
        digests = f"digests {one.config_digest[:12]} and {two.config_digest[:12]}"
        differences.append(Difference(part="configuration", what=digests))
    largest, relative, adapter = _adapters(a.learner.adapter.files, b.learner.adapter.files)
    differences += adapter
    if a.learner.optimizer != b.learner.optimizer:
        sizes = f"{len(a.learner.optimizer)} and {len(b.learner.optimizer)} bytes"
        what = f"moments or random state differ ({sizes})"
        differences.append(Difference(part="optimizer", what=what))
    for key, what in _values(a.scheduler, b.scheduler):
        found = Difference(part="scheduler", what=f"{key}: {what}")
        (notes if key in MEASURED else differences).append(found)
    notes += [
        Difference(part="versions", what=f"{key}: {what}")
        for key, what in _values(one.versions, two.versions)
    ]
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        same=not differences,
        differences=differences,
        notes=notes,
        largest_weight=largest,
        relative_weight=relative,
        largest_probe=_probes(a, b),
    )


def _adapters(
    a: Mapping[str, bytes], b: Mapping[str, bytes]
) -> tuple[float | None, float | None, list[Difference]]:
    """Largest and relative change of the weights, and what differs in the files."""
    if a == b:
        return 0.0, 0.0, []
    found: list[Difference] = []
    largest = relative = None
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) == b.get(name):
            continue
        if name not in a or name not in b:
            what = f"{name} is in the {'second' if name in b else 'first'} only"
        elif name.endswith(".safetensors"):
            largest, relative, what = _tensors(a[name], b[name])
        elif name.endswith(".json"):
            what = "; ".join(f"{key}: {how}" for key, how in _json(a[name], b[name])) or "spelling"
        else:
            what = f"{name}: other bytes"
        found.append(Difference(part="adapter", what=what))
    return largest, relative, found


def _tensors(a: bytes, b: bytes) -> tuple[float | None, float | None, str]:
    try:
        one, two = load_tensors(a), load_tensors(b)
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        return None, None, f"weights that can't be read: {error}"
    shapes = [{name: value.shape for name, value in side.items()} for side in (one, two)]
    if shapes[0] != shapes[1]:
        return None, None, "other layers or shapes"
    largest = change = norm = 0.0
    changed = 0
    for name, value in one.items():
        before = value.astype(np.float64)
        step = two[name].astype(np.float64) - before
        largest = max(largest, float(np.abs(step).max(initial=0.0)))
        changed += bool(step.any())
        change += float((step**2).sum())
        norm += float((before**2).sum())
    relative = math.sqrt(change / norm) if norm else None
    share = f", {relative:.3g} of the first's norm" if relative is not None else ""
    what = f"{changed} of {len(one)} tensors differ, by {largest:.3g} at most{share}"
    return largest, relative, what


def _json(a: bytes, b: bytes) -> list[tuple[str, str]]:
    try:
        one, two = json.loads(a), json.loads(b)
    except (ValueError, RecursionError):
        return [("content", "no JSON")]
    if not isinstance(one, dict) or not isinstance(two, dict):
        return [("content", "other values")]
    return _values(one, two)


def _values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys whose values differ, with both."""
    return [
        (key, f"{_short(a.get(key))} and {_short(b.get(key))}")
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _probes(a: Checkpoint, b: Checkpoint) -> float | None:
    one, two = a.manifest.probe, b.manifest.probe
    if one.token_ids != two.token_ids or len(one.logprobs) != len(two.logprobs):
        return None
    pairs = zip(one.logprobs, two.logprobs, strict=True)
    return max((abs(x - y) for x, y in pairs), default=0.0)
