"""Where the actors run: one placement group for a whole run.

Invariants:
- All of a run's resources are reserved at once or not at all: two runs never hold half of
  what each needs.
- Everything lies on one node where one can hold it; else the actors are spread over nodes.
- An actor that asks for nothing runs where the driver runs.
- A cluster that can't hold the run is an error that names what is missing, and who has it;
  nothing waits longer than `limits.placement_s`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.errors import InfrastructureError
from rl.serving_config import ServingConfig

Strategy = Literal["STRICT_PACK", "SPREAD"]
TRAINER = "trainer"
POLL_S = 1
# Ray counts fractions in ten-thousandths: less is rounding.
EPSILON = 1e-4
SEARCH_STEPS = 5_000  # a second at most; a cluster that is not contrived takes a few dozen
_SELECTOR = re.compile(r"(?P<no>!)?(?:in\((?P<many>[^)]*)\)|(?P<one>.*))")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one actor asks for.

    Attributes:
        role: of the actor, such as "replica 0".
        resources: by Ray's names (CPU, GPU), without zeros.
        labels: selectors of the nodes that will do, by label.
    """

    role: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, with all that it has, used or not."""

    id: str
    name: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def replica_role(index: int) -> str:
    """The role of a replica."""
    return f"replica {index}"


def worker_role(index: int) -> str:
    """The role of an episode worker."""
    return f"episode worker {index}"


def bundles(config: ServingConfig, *, trainer: bool) -> list[Bundle]:
    """What the actors of a run ask for, the largest first; those that ask for nothing are left out.

    Args:
        config: its `resources`, and how many replicas and workers there are.
        trainer: whether there is a trainer.
    """
    need = config.resources
    wanted = [
        (TRAINER, need.trainer_cpus, need.trainer_gpus, need.trainer_labels)
        for _ in range(int(trainer))
    ]
    wanted += [
        (replica_role(index), need.replica_cpus, need.replica_gpus, need.replica_labels)
        for index in range(config.engine.replicas)
    ]
    wanted += [
        (worker_role(index), need.worker_cpus, 0.0, need.worker_labels)
        for index in range(config.episodes.workers)
    ]
    found = [
        Bundle(role, {key: n for key, n in (("GPU", gpus), ("CPU", cpus)) if n}, labels)
        for role, cpus, gpus, labels in wanted
        if cpus or gpus
    ]
    return sorted(found, key=lambda bundle: -bundle.resources.get("GPU", 0.0))


def matches(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node's labels are what Ray's label selectors ask for.

    A selector is a value, `in(a,b)`, or either with `!` before it.
    """
    for key, selector in selectors.items():
        found = _SELECTOR.fullmatch(selector)
        assert found is not None  # the pattern takes any text
        many = found["many"]
        allowed = [found["one"]] if many is None else [item.strip() for item in many.split(",")]
        if (labels.get(key) in allowed) == (found["no"] is not None):
            return False
    return True


def strategies(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> list[Strategy]:
    """How the cluster could hold the bundles if nobody else used it, the best first.

    Raises:
        InfrastructureError: it could not; what is missing is named.
    """
    found: list[Strategy] = []
    if any(_holds([node], wanted) for node in nodes):
        found.append("STRICT_PACK")
    if len(nodes) > 1 and _holds(nodes, wanted):
        found.append("SPREAD")
    if not found:
        raise InfrastructureError(
            f"the cluster can't hold the run: {_lack(wanted, nodes)}",
            "resources",
            "add nodes, ask for less in [resources] or engine.replicas, or give another --address",
        )
    return found


def _holds(nodes: Sequence[Node], wanted: Sequence[Bundle]) -> bool:
    """Whether some assignment of all bundles to nodes fits.

    The largest bundle is placed first, on the fullest node that will do, so that whole nodes
    are left for what needs one; where that leads nowhere, other nodes are tried.  A search
    that finds no end within `SEARCH_STEPS` refuses nothing: Ray tries, within its deadline.
    """
    free = [dict(node.resources) for node in nodes]
    ordered = sorted(wanted, key=_size, reverse=True)
    steps = 0

    def place(index: int) -> bool:
        nonlocal steps
        if index == len(ordered):
            return True
        bundle, failed = ordered[index], set[object]()
        fit = [
            number
            for number, node in enumerate(nodes)
            if matches(bundle.labels, node.labels) and _fits(bundle, free[number])
        ]
        for number in sorted(fit, key=lambda number: _room(free[number], bundle)):
            state = (
                tuple(sorted(free[number].items())),
                tuple(sorted(nodes[number].labels.items())),
            )
            if state in failed:  # another node just like it would not do either
                continue
            steps += 1
            if steps > SEARCH_STEPS:
                return True
            before = free[number]
            free[number] = {
                key: have - bundle.resources.get(key, 0.0) for key, have in before.items()
            }
            if place(index + 1):
                return True
            free[number] = before
            failed.add(state)
        return False

    return place(0)


def _size(bundle: Bundle) -> tuple[float, float, int]:
    """GPUs, then CPUs, then how particular it is about its node."""
    resources = bundle.resources
    return resources.get("GPU", 0.0), resources.get("CPU", 0.0), len(bundle.labels)


def _fits(bundle: Bundle, free: Mapping[str, float]) -> bool:
    return all(free.get(key, 0.0) + EPSILON >= n for key, n in bundle.resources.items())


def _room(free: Mapping[str, float], bundle: Bundle) -> tuple[float, float]:
    """What a node has free, GPUs first: a bundle without GPUs goes where none are."""
    gpus, cpus = free.get("GPU", 0.0), free.get("CPU", 0.0)
    return gpus, (cpus if "GPU" in bundle.resources else -cpus)


def _sum(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(one.get(key, 0.0) for one in many) for key in ("GPU", "CPU")}


def _words(resources: Mapping[str, float]) -> str:
    parts = [f"{resources[key]:g} {key}" for key in ("GPU", "CPU") if resources.get(key)]
    return " and ".join(parts) or "nothing"


def _lack(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    """What is missing, in words."""
    need, have = _sum([b.resources for b in wanted]), _sum([n.resources for n in nodes])
    short = {key: need[key] - have[key] for key in need if need[key] > have[key] + EPSILON}
    what = f"it needs {_words(need)}, and all {len(nodes)} nodes together have {_words(have)}"
    if short:
        return f"{what}: {_words(short)} missing"
    for bundle in wanted:
        labelled = [node for node in nodes if matches(bundle.labels, node.labels)]
        if not labelled:
            labels = ", ".join(f"{key}={value}" for key, value in bundle.labels.items())
            return f"no node has the labels that the {bundle.role} asks for: {labels}"
        if not any(_fits(bundle, node.resources) for node in labelled):
            largest = max(labelled, key=lambda node: node.resources.get("GPU", 0.0))
            return (
                f"the {bundle.role} needs {_words(bundle.resources)} on one node, and the largest "
                f"({largest.name}) has {_words(largest.resources)}"
            )
    return f"{what}, but not in pieces that fit"


@dataclass(frozen=True, slots=True)
class Placement:
    """What a run has reserved.

    Attributes:
        group: Ray's placement group; None if no actor asks for anything.
        index: of each role's bundle.
        node: each role's node, by its id.
        driver: the node of this process.
    """

    group: Any
    index: Mapping[str, int]
    node: Mapping[str, str]
    driver: str

    def node_of(self, role: str) -> str:
        """The node on which an actor runs."""
        return self.node.get(role, self.driver)

    def strategy(self, role: str) -> Any:
        """Ray's scheduling strategy for an actor."""
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        if role in self.index:
            return PlacementGroupSchedulingStrategy(self.group, self.index[role])
        return NodeAffinitySchedulingStrategy(self.driver, soft=False)

    def release(self) -> None:
        """Give everything back."""
        from ray.util.placement_group import remove_placement_group

        if self.group is not None:
            remove_placement_group(self.group)


async def acquire(wanted: Sequence[Bundle], name: str, limit_s: float) -> Placement:
    """Reserve everything; what is on its way out elsewhere is waited for.

    Args:
        wanted: what the actors ask for.
        name: of the placement group, by which others see who has it.
        limit_s: how long to wait for resources that others use, s.

    Raises:
        InfrastructureError: the cluster can't hold it, or others have it.
    """
    import ray

    driver = ray.get_runtime_context().get_node_id()
    if not wanted:
        return Placement(None, {}, {}, driver)
    deadline = time.monotonic() + limit_s
    ways = strategies(wanted, cluster_nodes())
    for left, way in zip(range(len(ways), 0, -1), ways, strict=True):
        group = await _reserve(wanted, name, way, (deadline - time.monotonic()) / left)
        if group is not None:
            index = {bundle.role: number for number, bundle in enumerate(wanted)}
            return Placement(group, index, _nodes_of(group, index), driver)
    raise InfrastructureError(
        f"the cluster is full: the run needs {_words(_sum([b.resources for b in wanted]))}, and "
        f"{_words(ray.available_resources())} is free{_holders()}; waited {limit_s:g} s",
        "resources",
        "wait until the others have ended, add nodes, or ask for less in [resources]",
    )


async def _reserve(wanted: Sequence[Bundle], name: str, way: Strategy, limit_s: float) -> Any:
    """A placement group that is there, or None after `limit_s`."""
    from ray.util.placement_group import placement_group, remove_placement_group

    labels = [dict(bundle.labels) for bundle in wanted]
    resources = [dict(bundle.resources) for bundle in wanted]
    selected: Any = {"bundle_label_selector": labels} if any(labels) else {}
    group = placement_group(resources, strategy=way, name=name, **selected)
    limit = time.monotonic() + limit_s
    there = False
    try:
        while not there and time.monotonic() < limit:
            there = await asyncio.to_thread(group.wait, POLL_S)
    finally:
        if not there:
            remove_placement_group(group)
    return group if there else None


def cluster_nodes() -> list[Node]:
    """The nodes that are alive."""
    import ray

    return [
        Node(
            id=str(node["NodeID"]),
            name=str(node["NodeManagerHostname"]),
            address=str(node["NodeManagerAddress"]),
            resources={str(key): float(n) for key, n in node["Resources"].items()},
            labels={str(key): str(value) for key, value in node.get("Labels", {}).items()},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _nodes_of(group: Any, index: Mapping[str, int]) -> dict[str, str]:
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    return {role: str(nodes[number]) for role, number in index.items()}


def _holders() -> str:
    """Names of the runs that hold resources, for a message."""
    from ray.util.placement_group import placement_group_table

    table: dict[str, Any] = placement_group_table()
    names = sorted(
        {str(row["name"]) for row in table.values() if row["state"] == "CREATED" and row["name"]}
    )
    return f" (held by {', '.join(names)})" if names else ""
