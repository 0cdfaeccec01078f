"""Which clusters can hold a run, and what is said of those that can't."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.placement import Bundle, Node, bundles, matches, strategies
from rl.config_file import load_config
from rl.errors import InfrastructureError

ROOT = Path(__file__).parents[3]


def node(name: str, gpus: float = 0.0, cpus: float = 8.0, **labels: str) -> Node:
    return Node(name, name, f"10.0.0.{name}", {"GPU": gpus, "CPU": cpus}, labels)


def gpu(role: str, gpus: float = 1.0, pool: str | None = None) -> Bundle:
    return Bundle(role, {"GPU": gpus, "CPU": 1.0}, {} if pool is None else {"pool": pool})


THREE = [gpu("trainer"), gpu("replica 0"), gpu("replica 1"), Bundle("worker 0", {"CPU": 1.0}, {})]


def refusal(wanted: list[Bundle], nodes: list[Node]) -> str:
    with pytest.raises(InfrastructureError) as refused:
        strategies(wanted, nodes)
    return str(refused.value)


def test_the_reference_campaign_asks_for_three_gpus_largest_first() -> None:
    config = load_config(ROOT / "configs/final.toml")
    found = bundles(config, trainer=True)
    assert [bundle.role for bundle in found[:3]] == ["trainer", "replica 0", "replica 1"]
    assert sum(bundle.resources.get("GPU", 0) for bundle in found) == 3
    assert sum(bundle.resources["CPU"] for bundle in found) == 4 + 2 * 4 + 4 * 1
    assert len(bundles(config, trainer=False)) == len(found) - 1


def test_what_asks_for_nothing_is_in_no_bundle() -> None:
    config = load_config(ROOT / "configs/local.toml", {"resources.worker_cpus": 0.0})
    assert not any(bundle.role.startswith("episode") for bundle in bundles(config, trainer=True))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("1", 3)], ["STRICT_PACK"]),
        ([node("1", 3), node("2", 3)], ["STRICT_PACK", "SPREAD"]),
        ([node("1", 1), node("2", 1), node("3", 1)], ["SPREAD"]),
        ([node(str(n), 8) for n in range(5)], ["STRICT_PACK", "SPREAD"]),
        ([node("head", 0, 2), node("1", 2), node("2", 1)], ["SPREAD"]),
    ],
)
def test_one_node_is_preferred_and_several_will_do(nodes: list[Node], expected) -> None:
    assert strategies(THREE, nodes) == expected


def test_a_whole_node_is_left_for_what_needs_one() -> None:
    wanted = [gpu(f"replica {n}") for n in range(32)] + [gpu("trainer", 8)]
    assert strategies(wanted, [node(str(n), 8, 64) for n in range(5)]) == ["SPREAD"]


def test_what_is_missing_is_named() -> None:
    assert "1 GPU missing" in refusal(THREE, [node("1", 2)])
    assert "3 GPU and 4 CPU, and all 1 nodes together have 2 GPU" in refusal(THREE, [node("1", 2)])
    wide = refusal([gpu("trainer", 4)], [node("a", 2), node("b", 3)])
    assert "the trainer needs 4 GPU and 1 CPU on one node, and the largest (b) has 3 GPU" in wide
    labelled = refusal([gpu("trainer", pool="train")], [node("1", 8, pool="serve")])
    assert "no node has the labels that the trainer asks for: pool=train" in labelled
    pieces = refusal([gpu(f"r{n}", 3) for n in range(3)], [node("a", 5), node("b", 4)])
    assert "not in pieces that fit" in pieces


@pytest.mark.parametrize(
    ("selector", "value", "expected"),
    [
        ("h100", "h100", True),
        ("h100", None, False),
        ("!h100", "h200", True),
        ("!h100", None, True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", "c", True),
    ],
)
def test_labels_are_selected_as_ray_does(selector: str, value, expected: bool) -> None:
    labels = {} if value is None else {"kind": value}
    assert matches({"kind": selector}, labels) is expected


def feasible(wanted: list[Bundle], nodes: list[Node]) -> bool:
    """By trying every assignment."""
    for places in itertools.product(range(len(nodes)), repeat=len(wanted)):
        used = [{"GPU": 0.0, "CPU": 0.0} for _ in nodes]
        for bundle, place in zip(wanted, places, strict=True):
            for key, amount in bundle.resources.items():
                used[place][key] += amount
        fits = all(
            used[n][key] <= nodes[n].resources[key] for n in range(len(nodes)) for key in used[n]
        )
        if fits and all(
            matches(bundle.labels, nodes[place].labels)
            for bundle, place in zip(wanted, places, strict=True)
        ):
            return True
    return False


some_nodes = st.lists(
    st.builds(
        lambda gpus, cpus, pool: (gpus, cpus, pool),
        st.integers(0, 4),
        st.integers(1, 6),
        st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=3,
)


def test_where_the_fullest_node_leads_nowhere_another_one_is_tried() -> None:
    # The trainer fits the first node exactly, and then the replicas have too few CPUs.
    wanted = [gpu("trainer", 2), gpu("replica 0"), gpu("replica 1")]
    assert strategies(wanted, [node("a", 2, 2), node("b", 3, 1)]) == ["SPREAD"]


def test_a_search_without_an_end_refuses_nothing() -> None:
    # Ninety nodes of 3 and pieces of 2: no pair fits, which only trying everything shows.
    nodes = [node(str(n), 3, 3 + n) for n in range(90)]
    assert strategies([gpu(f"r{n}", 2) for n in range(91)], nodes)[-1] == "SPREAD"


@settings(max_examples=400, deadline=None)
@given(some_nodes, st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_no_cluster_that_could_hold_a_run_is_refused(
    given_nodes, trainer: int, replicas: int, workers: int, labelled: bool
) -> None:
    nodes = [
        node(str(n), gpus, cpus, pool=pool) for n, (gpus, cpus, pool) in enumerate(given_nodes)
    ]
    pool = "a" if labelled else None
    wanted = [gpu("trainer", trainer, pool)] if trainer else []
    wanted += [gpu(f"replica {n}") for n in range(replicas)]
    wanted += [Bundle(f"worker {n}", {"CPU": 1.0}, {}) for n in range(workers)]
    assume(wanted)
    try:
        found = strategies(wanted, nodes)
    except InfrastructureError:
        found = []
    assert bool(found) == feasible(wanted, nodes)
    assert ("STRICT_PACK" in found) == any(feasible(wanted, [one]) for one in nodes)
