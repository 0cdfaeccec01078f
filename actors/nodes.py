"""The nodes that a run's actors lie on, with what they need there and leave there.

Invariants:
- No shared file system is assumed: whether a node shares the driver's is found out by a
  file, and one that doesn't is sent model, task packages and checkpoint, by content, through
  the object store.
- What has been sent before, and is whole, is not sent again.
- Evidence lies where the driver runs: checkpoints are fetched as they are made, logs when
  the run stops.
- Every piece is in the object store only while it is under way.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from actors.calls import call
from actors.node_files import (
    NODE_ROOT_VARIABLE,
    Arrival,
    FileEntry,
    FolderManifest,
    clear_partial,
    node_root,
    pieces,
    read_piece,
    survey,
)
from rl.errors import DeadlineExceeded, InfrastructureError
from rl.files import disk_errors, sync_directory, write_bytes

KEEPER_START_S = 180.0
PIECE_S = 300.0  # 64 MiB at 2 Mbit/s
SURVEY_S = 1800.0  # hashing a large model on a slow disk
LOGS_S = 30.0  # of the time for stopping; a node that is gone answers nothing
LOG_SUFFIXES = (".log",)
# What an episode worker does not need of a model: it only reads the tokenizer.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


class NodeKeeper:
    """Reads and writes folders of one node, for the driver; a Ray actor.

    Args:
        run_id: whose logs and checkpoints lie there.
    """

    def __init__(self, run_id: str) -> None:
        self._root = node_root()
        self._run = self._root / "runs" / run_id
        self._arrivals: dict[str, Arrival] = {}

    def sees(self, path: Path, content: bytes) -> bool:
        """Whether the driver's file system is this node's too."""
        if NODE_ROOT_VARIABLE in os.environ:
            return False  # the node is to have files of its own
        try:
            return path.read_bytes() == content
        except OSError:
            return False

    def run_folder(self) -> Path:
        """Where what the run leaves on this node lies."""
        return self._run

    def holds(self, target: Path, manifest: FolderManifest) -> bool:
        """Whether a folder of this content lies at `target`; by name alone in the store."""
        if self._is_store(target):
            return target.is_dir()
        return target.is_dir() and survey(target) == manifest

    def store_path(self, digest: str) -> Path:
        """Where a folder lies that is named by its content."""
        return self._root / "files" / digest

    def begin(self, target: Path, manifest: FolderManifest) -> None:
        """Expect a folder; what a keeper that is gone has left of it is removed."""
        clear_partial(target)
        self._arrivals[str(target)] = Arrival(target, manifest)

    def append(self, target: Path, name: str, piece: bytes) -> None:
        """Add the next piece of one of its files."""
        self._arrivals[str(target)].append(name, piece)

    def seal(self, target: Path) -> None:
        """The folder is complete."""
        self._arrivals.pop(str(target)).seal()

    def survey(self, folder: Path, suffixes: Sequence[str] = ()) -> FolderManifest | None:
        """What lies in a folder, None if there is none; with `suffixes`, such files alone."""
        if not folder.is_dir():
            return None
        return survey(folder, lambda name: not suffixes or name.endswith(tuple(suffixes)))

    def read(self, path: Path, offset: int) -> bytes:
        """A piece of a file."""
        return read_piece(path, offset)

    def remove(self, folder: Path) -> None:
        """Remove what the run left in `folder` of its own."""
        if folder.is_relative_to(self._run) and folder.is_dir():
            rmtree(folder)

    def _is_store(self, target: Path) -> bool:
        return target.parent == self._root / "files"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a run's files lie on one node.

    Attributes:
        keeper: the node's keeper; None: its file system is the driver's.
        model: base weights, or only the tokenizer where no weights are needed.
        tasks: folder of the task packages.
        run: what actors leave there: logs/ and checkpoints/.
    """

    keeper: Any
    model: Path
    tasks: Path
    run: Path

    @property
    def shared(self) -> bool:
        """Whether the node's file system is the driver's."""
        return self.keeper is None


@dataclass
class Nodes:
    """The sites of a run, by node id.

    Args:
        run_id: the run.
        home: the driver's own site.
        note: told of what is sent.
    """

    run_id: str
    home: Site
    note: Callable[[str], None] = lambda _: None
    sites: dict[str, Site] = field(default_factory=dict[str, Site])
    _keepers: list[Any] = field(default_factory=list[Any])

    async def settle(self, driver: str, weights: Iterable[str], others: Iterable[str]) -> None:
        """Find or bring what every node needs.

        Args:
            driver: the node of this process.
            weights: nodes that load the model.
            others: nodes that need the tokenizer and the task packages alone.

        Raises:
            InfrastructureError: a node can't be reached, or its disk is full.
        """
        self.sites[driver] = self.home
        full = set(weights)
        foreign: dict[str, Any] = {}
        for node in sorted((full | set(others)) - {driver}):
            keeper = self._keeper(node)
            if await self._shares(keeper):
                self.sites[node] = self.home
                continue
            foreign[node] = keeper
        if not foreign:
            return
        tasks = await self._send(self.home.tasks, foreign)
        for wanted, keep in ((full, _anything), (set(foreign) - full, _no_weights)):
            part = {node: keeper for node, keeper in foreign.items() if node in wanted}
            if not part:
                continue
            models = await self._send(self.home.model, part, keep)
            for node, keeper in part.items():
                run = await call(keeper.run_folder.remote(), KEEPER_START_S, f"node {node[:8]}")
                self.sites[node] = Site(keeper, models[node], tasks[node], run)

    async def send_run_folder(self, node: str, folder: Path) -> Path:
        """A folder of the run, as the node's actors see it; sent if they don't.

        Raises:
            InfrastructureError: as for `settle`.
        """
        site = self.sites[node]
        if site.shared:
            return folder
        target = site.run / folder.relative_to(self.home.run)
        manifest = await asyncio.to_thread(survey, folder)
        await self._bring(folder, manifest, {node: (site.keeper, target)})
        return target

    async def fetch_run_folder(self, node: str, path: Path) -> Path:
        """A folder that an actor of `node` has left, brought to the driver's place for it.

        Raises:
            InfrastructureError: it has gone, or the disk is full.
        """
        site = self.sites[node]
        if site.shared:
            return path
        target = self.home.run / path.relative_to(site.run)
        manifest = await call(site.keeper.survey.remote(path), SURVEY_S, f"node {node[:8]} survey")
        if manifest is None:
            raise InfrastructureError("has gone", f"{path} on node {node[:8]}")
        arrival = await asyncio.to_thread(Arrival, target, manifest)
        try:
            for entry in manifest.entries:
                if entry.is_file:
                    await self._fetch(site.keeper, path, entry, arrival)
            await asyncio.to_thread(arrival.seal)
        except BaseException:
            arrival.give_up()
            raise
        return target

    async def fetch_logs(self, name: str = "logs") -> list[str]:
        """Bring every node's logs to the driver; returns what could not be had in `LOGS_S`."""
        foreign = {node: site for node, site in self.sites.items() if not site.shared}

        async def fetch(site: Site) -> None:
            try:
                async with asyncio.timeout(LOGS_S):
                    await self._fetch_logs(site, name)
            except TimeoutError:
                raise DeadlineExceeded(f"not fetched within {LOGS_S:g} s", str(site.run)) from None

        # One node that is gone must not keep the others' logs, nor the stop.
        results = await asyncio.gather(*map(fetch, foreign.values()), return_exceptions=True)
        return [
            f"logs of node {node[:8]}: {result}"
            for node, result in zip(foreign, results, strict=True)
            if isinstance(result, BaseException)
        ]

    def close(self) -> None:
        """End the keepers."""
        import ray

        for keeper in self._keepers:
            ray.kill(keeper)
        self._keepers.clear()

    # ---- inside ---------------------------------------------------------

    def _keeper(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor: Any = ray.remote(NodeKeeper)
        keeper = actor.options(
            name=f"files-{node[:8]}",
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self.run_id)
        self._keepers.append(keeper)
        return keeper

    async def _shares(self, keeper: Any) -> bool:
        """Whether a file that the driver writes now is there on the keeper's node."""
        content = secrets.token_hex(16).encode()
        path = (self.home.run / f".seen-{content[:8].decode()}").resolve()
        await asyncio.to_thread(write_bytes, path, content)
        try:
            seen: bool = await call(
                keeper.sees.remote(path, content), KEEPER_START_S, "a node's keeper"
            )
        finally:
            path.unlink(missing_ok=True)
        return seen

    async def _send(
        self, folder: Path, keepers: dict[str, Any], keep: Callable[[str], bool] | None = None
    ) -> dict[str, Path]:
        """Bring `folder` into the store of each node; where it lies there."""
        manifest = await asyncio.to_thread(survey, folder, keep or _anything)
        digest = manifest.digest
        targets: dict[str, tuple[Any, Path]] = {}
        for node, keeper in keepers.items():
            path = await call(keeper.store_path.remote(digest), PIECE_S, f"node {node[:8]}")
            targets[node] = (keeper, path)
        await self._bring(folder, manifest, targets)
        return {node: path for node, (_, path) in targets.items()}

    async def _bring(
        self, folder: Path, manifest: FolderManifest, targets: dict[str, tuple[Any, Path]]
    ) -> None:
        """Bring `folder` to each target that does not hold it yet, all at once."""
        import ray

        lacking: list[tuple[str, Any, Path]] = []
        for node, (keeper, path) in targets.items():
            if not await call(keeper.holds.remote(path, manifest), SURVEY_S, f"node {node[:8]}"):
                lacking.append((node[:8], keeper, path))
        if not lacking:
            return
        self.note(
            f"sending {folder.name} ({manifest.size / 1e6:.1f} MB) to "
            f"{len(lacking)} node{'s' * (len(lacking) > 1)}"
        )
        await self._each(lacking, "begin", manifest)
        parts = pieces(folder, manifest)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            name, piece = part
            held = ray.put(piece)  # once, however many nodes take it from there
            await self._each(lacking, "append", name, held)
        await self._each(lacking, "seal")

    @staticmethod
    async def _each(to: Sequence[tuple[str, Any, Path]], method: str, *arguments: Any) -> None:
        limit = SURVEY_S if method == "seal" else PIECE_S
        await asyncio.gather(
            *(
                call(getattr(keeper, method).remote(path, *arguments), limit, f"node {node}")
                for node, keeper, path in to
            )
        )

    @staticmethod
    async def _fetch(keeper: Any, folder: Path, entry: FileEntry, arrival: Arrival) -> None:
        """All pieces of one file."""
        offset = 0
        while offset < entry.size:
            piece: bytes = await call(
                keeper.read.remote(folder / entry.path, offset), PIECE_S, entry.path
            )
            if not piece:
                break  # shorter than it was: the seal finds it
            await asyncio.to_thread(arrival.append, entry.path, piece)
            offset += len(piece)

    async def _fetch_logs(self, site: Site, name: str) -> None:
        folder = site.run / name
        manifest = await call(
            site.keeper.survey.remote(folder, list(LOG_SUFFIXES)), LOGS_S, "survey of logs"
        )
        for entry in manifest.entries if manifest is not None else []:
            if entry.is_file:
                await self._fetch_log(site.keeper, folder, entry, self.home.run / name)

    @staticmethod
    async def _fetch_log(keeper: Any, folder: Path, entry: FileEntry, home: Path) -> None:
        """One log as it stands now; it may still be written to."""
        target = home / entry.path
        aside = target.with_name(f".{target.name}.partial")
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                while file.tell() < entry.size:
                    piece: bytes = await call(
                        keeper.read.remote(folder / entry.path, file.tell()), LOGS_S, entry.path
                    )
                    if not piece:
                        break
                    await asyncio.to_thread(file.write, piece)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(target)
            sync_directory(target.parent)


def _anything(name: str) -> bool:
    del name
    return True


def _no_weights(name: str) -> bool:
    return not name.endswith(WEIGHT_SUFFIXES)
