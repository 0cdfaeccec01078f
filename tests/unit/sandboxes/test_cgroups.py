"""Where control groups can be made, and what is written to them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sandboxes.cgroups import CONTROLLERS, Limits, Owner, settings, writable

LIMITS = Limits(memory=1 << 20, processes=7, cpus=1.5)
EVERY = frozenset(CONTROLLERS)


def _mount(kind: str, mount: Path, options: str, root: str = "/") -> str:
    return f"30 20 0:25 {root} {mount} rw,relatime shared:9 - {kind} {kind} rw,{options}"


def test_first_version_is_used_at_our_own_place_in_each_hierarchy(tmp_path: Path) -> None:
    for name in ("memory/own/place", "cpu,cpuacct", "unified"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "unified" / "cgroup.subtree_control").write_text("memory\n")
    mounts = "\n".join(
        [
            _mount("cgroup", tmp_path / "memory", "memory"),
            _mount("cgroup", tmp_path / "cpu,cpuacct", "cpu,cpuacct"),
            _mount("cgroup", tmp_path / "absent", "pids"),
            _mount("cgroup2", tmp_path / "unified", "nsdelegate"),
            _mount("tmpfs", tmp_path, "mode=755"),
        ]
    )
    found, unified = writable(mounts, "4:memory:/own/place\n2:cpu,cpuacct:/\n8:pids:/\n0::/\n")
    assert not unified
    assert found == {
        tmp_path / "memory" / "own" / "place": frozenset({"memory"}),
        tmp_path / "cpu,cpuacct": frozenset({"cpu"}),
    }


def test_mount_that_shows_a_part_of_the_hierarchy_is_followed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    mounts = _mount("cgroup", tmp_path, "pids", root="/docker/abc")
    found, _ = writable(mounts, "8:pids:/docker/abc/inner\n")
    assert found == {tmp_path / "inner": frozenset({"pids"})}


def test_second_version_is_used_at_the_nearest_place_that_gives_controllers(tmp_path: Path) -> None:
    (tmp_path / "user" / "scope").mkdir(parents=True)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids cpu io\n")
    (tmp_path / "user" / "cgroup.subtree_control").write_text("pids memory\n")
    (tmp_path / "user" / "scope" / "cgroup.subtree_control").write_text("\n")
    found, unified = writable(_mount("cgroup2", tmp_path, "x"), "0::/user/scope\n")
    assert unified
    assert found == {tmp_path / "user": frozenset({"memory", "pids"})}


def test_without_a_writable_controller_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("hugetlb\n")
    assert writable(_mount("cgroup2", tmp_path, "x"), "0::/\n")[0] == {}
    assert writable("", "")[0] == {}


@pytest.mark.parametrize("unified", [True, False])
def test_every_limit_of_a_present_controller_is_written(unified: bool) -> None:
    files = settings(LIMITS, EVERY, unified)
    assert files["pids.max"] == "7"
    assert files["memory.max" if unified else "memory.limit_in_bytes"] == str(1 << 20)
    assert files["cpu.max" if unified else "cpu.cfs_quota_us"].split()[0] == "150000"
    assert settings(LIMITS, frozenset({"pids"}), unified) == {"pids.max": "7"}


@pytest.mark.parametrize(
    ("unified", "file", "each", "most"),
    [(False, "cpu.shares", 1024, 262_144), (True, "cpu.weight", 100, 10_000)],
)
def test_sandboxes_weigh_as_many_processes_as_they_are(
    tmp_path: Path, unified: bool, file: str, each: int, most: int
) -> None:
    owner = Owner({tmp_path: frozenset({"cpu"})}, unified, -1, itertools.count())
    first = owner.group(LIMITS)
    assert (tmp_path / file).read_text() == str(each)
    assert (first.directories[0] / file).read_text() == str(each)
    for _ in range(2):
        owner.group(LIMITS)
    assert (tmp_path / file).read_text() == str(3 * each)
    for name in range(300):
        (tmp_path / f"other-{name}").mkdir()
    owner.group(LIMITS)
    assert (tmp_path / file).read_text() == str(most)
