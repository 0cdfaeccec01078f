"""prime-rl's output directory: what is put there for it, and what it leaves there.

Invariants:
- Only `step_N` entries of the three folders named here are ever removed, and none
  that is, or lies behind, a symbolic link.
- A rank's batch appears under its name whole; over there the name alone counts.
- A step is complete when its manifest, written last, says so. prime-rl marks no
  checkpoint as complete, so one without our manifest is never resumed from.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from rl.errors import EvidenceError, TrainerError
from rl.files import disk_errors, sha256_file, write_bytes, write_json
from rl.learner.prime.wire import MicroBatch, encode
from rl.records import Record

STABLE: Final = "STABLE"
CHECKPOINT_INDEX: Final = ".metadata"  # written last, by the first rank
CHECKPOINT_SHARDS: Final = "*.distcp"
_STEP = re.compile(r"step_(0|[1-9]\d*)")
_REMEDY = "remove this campaign's checkpoint of that update to go on from the one before"


class CheckpointRef(Record):
    """Names prime-rl's checkpoint of one step: the optimizer's part of ours.

    Shards are held by size: they hold the base weights too, tens of gigabytes that
    would be read again after every update.
    """

    step: int = Field(ge=1, description="the update")
    index_sha256: str = Field(description="digest of the checkpoint's index, hex")
    files: dict[str, int] = Field(description="size by name, bytes")


class StepManifest(Record):
    """That a step is complete, and of what."""

    update: int = Field(ge=1)
    group_ids: list[str] = Field(description="trained on, sorted")
    batch_sha256: list[str] = Field(description="of each rank's file, hex")
    adapter_sha256: str = Field(description="over the adapter in PEFT's files")
    checkpoint: CheckpointRef


class PrimeFiles:
    """The directory at `root`, which this backend owns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rollouts = root / "rollouts"
        self.broadcasts = root / "broadcasts"
        self.checkpoints = root / "checkpoints"
        self.manifests = root / "complete"
        self.config = root / "trainer.json"

    def prepare(self) -> None:
        """Make the folders that are written to."""
        with disk_errors(self.root):
            for folder in (self.rollouts, self.broadcasts, self.checkpoints, self.manifests):
                folder.mkdir(parents=True, exist_ok=True)

    def clear_past(self, step: int) -> list[Path]:
        """Remove what lies past `step`, and its own broadcast, which is made again.

        Returns:
            What was removed.
        """
        doomed = [
            *_steps(self.rollouts, step + 1),
            *_steps(self.broadcasts, step),
            *_steps(self.checkpoints, step + 1),
        ]
        # Manifests first: no moment shows one of a step that is half removed.
        manifests = [
            path
            for path in sorted(self.manifests.glob("step_*.json"))
            if (number := _number(path.stem)) is not None and number > step
        ]
        with disk_errors(self.root):
            for path in manifests:
                path.unlink()
            for path in doomed:
                shutil.rmtree(path)
        return manifests + doomed

    def write_batch(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> list[str]:
        """Hand over the batch of `step`; the files' digests, by rank."""
        folder = self.rollouts / f"step_{step}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        digests: list[str] = []
        for rank, batches in enumerate(ranks):
            content = encode(batches)
            write_bytes(folder / f"rank_{rank}.bin", content)
            digests.append(hashlib.sha256(content).hexdigest())
        return digests

    def is_stable(self, step: int) -> bool:
        """Whether the weights of `step` are said to be whole."""
        return (self.broadcast(step) / STABLE).is_file()

    def broadcast(self, step: int) -> Path:
        """Where the weights of `step` are written."""
        return self.broadcasts / f"step_{step}"

    def forget(self, step: int) -> None:
        """Remove the batch and the weights of a step that is done with."""
        for folder in (self.rollouts, self.broadcasts):
            path = folder / f"step_{step}"
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # it may remove them too

    def checkpoint(self, step: int) -> CheckpointRef:
        """The checkpoint of `step` as it lies there.

        Raises:
            TrainerError: it has no index or no shard, or an empty one.
        """
        folder = self._checkpoint(step)
        index = folder / CHECKPOINT_INDEX
        shards = sorted(folder.glob(CHECKPOINT_SHARDS))
        found = [path for path in (index, *shards) if path.is_file() and path.stat().st_size]
        if index not in found or len(found) < 2 or len(found) != len(shards) + 1:
            raise TrainerError(
                f"the step is done, but its checkpoint is not whole: {len(shards)} shards, "
                f"{'an' if index.is_file() else 'no'} index",
                str(folder),
                "see prime-rl's log, then continue with --resume",
            )
        return CheckpointRef(
            step=step,
            index_sha256=sha256_file(index),
            files={path.name: path.stat().st_size for path in found},
        )

    def require(self, ref: CheckpointRef) -> StepManifest:
        """Raise unless the checkpoint that `ref` names can be resumed from.

        Raises:
            EvidenceError: it was never completed, or files are gone or altered.
        """
        where = str(self._checkpoint(ref.step))
        path = self.manifests / f"step_{ref.step}.json"
        try:
            manifest = StepManifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise EvidenceError(
                f"cannot resume after update {ref.step}: no completion manifest", str(path), _REMEDY
            ) from None
        except ValidationError:
            raise EvidenceError("is no completion manifest", str(path), _REMEDY) from None
        if manifest.checkpoint != ref or manifest.update != ref.step:
            raise EvidenceError("is of another checkpoint than ours names", str(path), _REMEDY)
        try:
            found = self.checkpoint(ref.step)
        except TrainerError:
            found = None
        if found != ref:
            problem = "is missing or incomplete" if found is None else "was altered"
            raise EvidenceError(
                f"cannot resume after update {ref.step}: prime-rl's checkpoint {problem}",
                where,
                _REMEDY,
            )
        return manifest

    def complete(self, manifest: StepManifest) -> None:
        """Declare a step complete; nothing of it is written afterwards."""
        write_json(self.manifests / f"step_{manifest.update}.json", manifest)

    def keep_checkpoints(self, steps: Set[int]) -> None:
        """Remove the checkpoints of all other steps up to the greatest of `steps`."""
        newest = max(steps, default=0)
        for path in _steps(self.checkpoints, 1):
            number = _number(path.name)
            if number is None or number in steps or number >= newest:
                continue
            with disk_errors(path):
                (self.manifests / f"{path.name}.json").unlink(missing_ok=True)
                shutil.rmtree(path)

    def _checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}" / "trainer"


def _number(name: str) -> int | None:
    """The step that a name is of; None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def _steps(folder: Path, least: int) -> list[Path]:
    """Directories `step_N` right below `folder` with N at least `least`."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        number = _number(path.name)
        if number is not None and number >= least and path.is_dir() and not path.is_symlink():
            found.append(path)
    return found
