"""Logs that come home from nodes that share no files."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

import actors.node_files as node_files
import actors.nodes as nodes
from actors.nodes import NodeKeeper, Nodes, Site


class Handle:
    """A keeper without Ray: its calls answer in the same process, or never."""

    def __init__(self, keeper: NodeKeeper | None) -> None:
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        keeper = self._keeper

        class Method:
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                if keeper is None:
                    await asyncio.Event().wait()
                return getattr(keeper, name)(*arguments)

        return Method


def site(tmp_path: Path, name: str, *, gone: bool = False) -> Site:
    run = tmp_path / name
    (run / "logs" / "replica-0").mkdir(parents=True)
    (run / "logs" / "replica-0" / f"{name}.log").write_bytes(b"0123456789" * 5)
    (run / "logs" / "adapter.safetensors").write_bytes(b"no log")
    keeper = Handle(None if gone else NodeKeeper("run"))
    return Site(keeper, tmp_path, tmp_path, run)


def test_whole_logs_come_home_and_a_node_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("ray.exceptions")  # a second, which is none of the limit's below
    monkeypatch.setattr(node_files, "PIECE_BYTES", 7)
    monkeypatch.setattr(nodes, "LOGS_S", 0.5)
    home = Site(None, tmp_path, tmp_path, tmp_path / "home")
    home.run.mkdir()
    found = Nodes("run", home)
    found.sites = {
        "here": home,
        "far": site(tmp_path, "far"),
        "gone": site(tmp_path, "gone", gone=True),
    }
    problems = asyncio.run(found.fetch_logs())
    assert [line.split(":")[0] for line in problems] == ["logs of node gone"]
    come = {path.name: path.read_bytes() for path in home.run.rglob("*") if path.is_file()}
    assert come == {"far.log": b"0123456789" * 5}
