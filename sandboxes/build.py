"""Following a Dockerfile in a fresh sandbox, or loading what that left the last time.

Invariants:
- A recipe's commands run at most once for the same content: what they left is kept
  as a layer.  A recipe without commands is followed each time, which costs less.
- After a command nothing of it runs, as after a step of `docker build`.
- Files go over in pieces as they are read, so memory is bounded whatever they hold.
- A layer that cannot be kept costs time, never the sandbox: it is made again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.errors import InfrastructureError, SandboxError
from sandboxes.archives import archive_entries
from sandboxes.channel import Channel, Entry, Finished
from sandboxes.dockerfile import Copy, MakeDir, Recipe, Run, Step, Unpack
from sandboxes.layers import layer_name, read_layer, write_layer
from sandboxes.rootfs import OWN_MOUNTS_MB, first_files
from sandboxes.transfer import file_entries, tree_entries

FRAMING_FACTOR = 2  # a layer of many small files is mostly names and numbers
LEAST_STEP_S = 0.1
SHOWN_OUTPUT = 1000


class RunStep(Protocol):
    """Runs a command of the recipe in the sandbox."""

    async def __call__(self, step: Run, timeout_s: float) -> Finished:
        """Run `step` for at most `timeout_s` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """What a sandbox is made from.

    `layers` is where layers are kept, None to keep none; `fresh` makes one again.
    """

    recipe: Recipe
    context: Path
    workdir: str
    disk_mb: int
    layers: Path | None
    fresh: bool
    timeout_s: float


async def build(
    plan: Build, channel: Channel, run: RunStep, full_map: bool, logger: logging.Logger
) -> None:
    """Write the first files and follow the recipe.

    Raises:
        SandboxError: a step failed, or what it needs does not fit.
        TaskPackageError: an archive is refused.
    """
    commands = any(isinstance(step, Run) for step in plan.recipe.steps)
    if plan.layers is None or not commands:
        await _follow(plan, channel, run)
        return
    name = await asyncio.to_thread(layer_name, plan.context, full_map)
    layer = None if plan.fresh else await asyncio.to_thread(read_layer, plan.layers, name)
    if layer is not None:
        await channel.load(layer)
        return
    await _follow(plan, channel, run)
    layer = await channel.save(FRAMING_FACTOR * (plan.disk_mb + OWN_MOUNTS_MB) << 20)
    if layer is None:
        logger.warning("what the Dockerfile's steps left is too large to be kept")
        return
    try:
        await asyncio.to_thread(write_layer, plan.layers, name, layer)
    except InfrastructureError as error:
        logger.warning(f"a layer could not be kept, and is made again each time: {error}")


async def _follow(plan: Build, channel: Channel, run: RunStep) -> None:
    """Do every step in order; transfers between commands go over together."""
    until = time.monotonic() + plan.timeout_s
    pending: list[Iterable[Entry]] = [first_files(), [(plan.workdir, "d", 0, b"")]]
    fresh = True
    for step in plan.recipe.steps:
        if not isinstance(step, Run):
            pending.append(step_entries(step))
            continue
        await channel.put(itertools.chain.from_iterable(pending), fresh)
        pending, fresh = [], False
        await _run(plan, step, run, max(until - time.monotonic(), LEAST_STEP_S))
        await channel.kill_all()
    await channel.put(itertools.chain.from_iterable(pending), fresh)


async def _run(plan: Build, step: Run, run: RunStep, timeout_s: float) -> None:
    env = (("DEBIAN_FRONTEND", "noninteractive"), *step.env)
    command = f"exec /bin/sh -c {shlex.quote(step.command)}"
    done = await run(Run(command, step.workdir, env, step.user or "root"), timeout_s)
    if done.exit_code != 0:
        raise SandboxError(
            f"RUN ended with exit code {done.exit_code}: {done.streams[0].text()[-SHOWN_OUTPUT:]}",
            where=str(plan.context / "Dockerfile"),
            remedy="a local sandbox has no network and a read-only /usr",
        )


def step_entries(step: Step) -> Iterable[Entry]:
    """What a step that is no command writes."""
    if isinstance(step, MakeDir):
        return [(step.path, "d", 0, b"")]
    if isinstance(step, Unpack):
        return archive_entries(step.archive, step.target)
    if isinstance(step, Copy):
        return itertools.chain.from_iterable(_copied(step, source) for source in step.sources)
    raise TypeError(f"a command writes nothing by itself: {step}")


def _copied(step: Copy, source: Path) -> Iterable[Entry]:
    """What one source of COPY writes: folders by content, files by name or into the target."""
    if source.is_dir():
        return tree_entries(source, step.target)
    goal = f"{step.target.rstrip('/')}/{source.name}" if step.into else step.target
    return file_entries(source, goal)
