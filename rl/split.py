"""Which tasks there are, which are trained on, and which are held out.

Invariants:
- Training and held-out tasks are disjoint by content digest, and the split
  depends on the tasks' content and the seed alone.
- Each family, and tier of it, has its share in both, none above what it has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from rl.config import TasksConfig
from rl.errors import ConfigurationError, TaskPackageError
from rl.records import TaskRef


def load_tasks(folder: Path) -> list[TaskRef]:
    """The packages in `folder`, each with its path relative to it.

    Raises:
        TaskPackageError: one is wrong, or there is none.
    """
    from sandboxes.tasks import load_folder

    root = folder.resolve()
    packages = load_folder(root)
    for package in packages:
        if not package.path.is_relative_to(root):
            raise TaskPackageError(
                "a link leaves the folder of task packages",
                str(package.path),
                f"move the package into {root}",
            )
    return [
        TaskRef(
            name=package.name,
            digest=package.digest,
            path=package.path.relative_to(root).as_posix(),
            family=package.family,
            tier=package.tier,
            instruction=package.instruction,
        )
        for package in packages
    ]


def split(
    tasks: Sequence[TaskRef], config: TasksConfig, where: str
) -> tuple[list[TaskRef], list[TaskRef]]:
    """Draw training and held-out tasks, every family and tier in proportion.

    Raises:
        ConfigurationError: there are fewer different tasks than asked for.
    """
    families: dict[tuple[str, int], list[TaskRef]] = {}
    for task in {task.digest: task for task in sorted(tasks, key=lambda t: t.digest)}.values():
        families.setdefault((task.family, task.tier or 0), []).append(task)
    available, wanted = sum(map(len, families.values())), config.train + config.heldout
    if available < wanted:
        raise ConfigurationError(
            f"{wanted} tasks are wanted (train {config.train}, heldout {config.heldout}) "
            f"and {available} different ones are there",
            where,
            "lower tasks.train or tasks.heldout, or add task packages",
        )
    generator = random.Random(config.seed)
    names = sorted(families)
    for name in names:
        generator.shuffle(families[name])
    sizes = [len(families[name]) for name in names]
    held = apportion(config.heldout, sizes)
    kept = apportion(config.train, [size - count for size, count in zip(sizes, held, strict=True)])
    heldout: list[TaskRef] = []
    train: list[TaskRef] = []
    for name, held_count, kept_count in zip(names, held, kept, strict=True):
        heldout += families[name][:held_count]
        train += families[name][held_count : held_count + kept_count]
    generator.shuffle(heldout)
    generator.shuffle(train)
    return train, heldout


def subset(tasks: Sequence[TaskRef], count: int, where: str) -> list[TaskRef]:
    """The first `count` tasks, every family and tier in proportion, in their own order.

    Raises:
        ConfigurationError: there are fewer.
    """
    if count > len(tasks):
        raise ConfigurationError(
            f"{count} tasks are wanted and {len(tasks)} are there", where, "ask for fewer"
        )
    strata: dict[tuple[str, int], list[TaskRef]] = {}
    for task in tasks:
        strata.setdefault((task.family, task.tier or 0), []).append(task)
    groups = list(strata.values())
    counts = apportion(count, [len(group) for group in groups])
    chosen = {
        task.name for group, size in zip(groups, counts, strict=True) for task in group[:size]
    }
    return [task for task in tasks if task.name in chosen]


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Divide `total` over `sizes` in proportion, by largest remainder, none above its size."""
    everything = sum(sizes)
    if everything == 0:
        return [0] * len(sizes)
    counts = [total * size // everything for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-(total * sizes[i] % everything), i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
