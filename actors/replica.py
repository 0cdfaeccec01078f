"""One replica: an engine process and the adapters that it serves.

Invariants:
- A served name never changes its weights: within one engine process a name and
  a directory are used once, so that no prefix cache outlives its version.
- A name is served only after its probe matched the trainer's, and differed from
  the base model's where the trainer's does; one that fails is unloaded again.
- An adapter's directory is complete before the engine sees it, and is deleted
  only after the engine has let go of it: a missing directory kills an engine.
- A restarted replica serves the base model and nothing else.
- The engine's processes end with `stop`, and with the process that holds this
  object, by whatever cause it ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from actors.adapter_files import policy_name, write_adapter
from actors.adapter_ref import AdapterRef
from actors.engine_command import BASE_MODEL_NAME, HOST, engine_command
from actors.engine_metrics import parse_metrics
from actors.engine_process import EngineProcess, free_port
from rl.agent.client import EngineClient
from rl.errors import DeadlineExceeded, EngineError
from rl.records import AdapterBytes, Probe
from rl.serving_config import ServingConfig

# Ahead of every episode, whose priority is its version: a publication waits for it.
PROBE_PRIORITY = -1
STOP_TIMEOUT_S = 20.0  # vLLM takes 2 s to end in order; a GPU engine frees its memory first
# Changes of a logprob below this can't be told from an engine's rounding, which
# depends on what else is in its batch, nats.
NOISE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class _Served:
    """An adapter that the engine holds."""

    path: Path
    version: int


class Replica:
    """Serves policy versions; a Ray actor by `ray.remote(Replica)` with max_restarts=0."""

    def __init__(
        self,
        index: int,
        config: ServingConfig,
        model_dir: Path,
        run_dir: Path,
        api_key: str | None = None,
        host: str = HOST,
    ) -> None:
        self.index = index
        self._host = host
        self.home = run_dir / f"replica-{index}"
        self.api_key = api_key or secrets.token_urlsafe(32)
        self._config = config
        self._model_dir = model_dir
        self._client = EngineClient(self.api_key)
        self._process: EngineProcess | None = None
        self._state = "new"
        self._starts = 0
        self._served: dict[str, _Served] = {}
        self._used_names: set[str] = set()
        self._base_logprobs: dict[tuple[int, ...], list[float]] = {}
        self._adapter_lock = asyncio.Lock()
        self._lifecycle = asyncio.Lock()  # not of `stop`, which also ends a start

    def __repr__(self) -> str:
        where = f" at {self._process.base_url}" if self._process is not None else ""
        names = f", serves {', '.join(self._served)}" if self._served else ""
        return f"Replica({self.index}: {self._state}{where}{names})"

    async def start(self) -> str:
        """Start the engine and wait for its first token; its base URL.

        Raises:
            EngineError, DeadlineExceeded: it did not become ready; nothing is left of it.
            ConfigurationError: it cannot be started with this configuration.
        """
        async with self._lifecycle:
            return await self._start()

    async def _start(self) -> str:
        if self._process is not None:
            raise EngineError("already started", repr(self), "restart it instead")
        self._forget_adapters()
        self._starts += 1
        command = engine_command(
            self._config,
            self.index,
            self._model_dir,
            free_port(self._host),
            self.api_key,
            sorted(os.sched_getaffinity(0)),
            os.environ,
            host=self._host,
        )
        log = self.home / f"engine-{self._starts}.log"
        process = self._process = EngineProcess(command, log, self._client)
        self._state = "starting"
        try:
            await process.start(self._config.engine.start_timeout_s)
        except BaseException:
            if self._process is process:
                self._state = "failed"
                self._process = None
            raise
        self._state = "serving"
        return process.base_url

    async def restart(self) -> str:
        """End what runs and start afresh, on a new port, with no adapter; its base URL.

        Raises:
            EngineError, DeadlineExceeded: as for `start`.
        """
        async with self._lifecycle:  # two at once would lose an engine between them
            await self._end_process()
            return await self._start()

    async def stop(self) -> None:
        """End the engine; the replica can be started again.

        Raises:
            EngineError: a process of the engine could not be ended.
        """
        try:
            await self._end_process()
        finally:
            await self._client.close()

    async def receive(self, adapter: AdapterRef) -> dict[str, float]:
        """Fetch an adapter and `load` it; seconds by stage (put, transfer, write, ...).

        Raises:
            InfrastructureError: it can't be fetched.
            EngineError, DeadlineExceeded: as for `load`.
        """
        began = time.monotonic()
        files = await adapter.fetch()
        transfer = time.monotonic() - began
        parts = await self.load(files)
        total = adapter.put_s + transfer + parts["total"]
        return {"put": adapter.put_s, "transfer": transfer} | parts | {"total": total}

    async def load(self, adapter: AdapterBytes) -> dict[str, float]:
        """Serve `adapter` as `policy-v{n}` and prove it; seconds by stage.

        Raises:
            EngineError: it could not be loaded, or failed its proof; it is not served.
            DeadlineExceeded: a stage ran out of `engine.control_timeout_s`.
        """
        return await self.load_named(policy_name(adapter.version), adapter)

    async def load_named(self, name: str, adapter: AdapterBytes) -> dict[str, float]:
        """Serve `adapter` as `name` and prove it; seconds by stage (write, load, probe).

        Raises:
            EngineError, DeadlineExceeded: as for `load`.
        """
        async with self._adapter_lock:
            process = self._running()
            if name in self._used_names or name == BASE_MODEL_NAME:
                raise EngineError(
                    f"the name '{name}' was already used", repr(self), "use a new name"
                )
            self._used_names.add(name)
            began = time.monotonic()
            await self._measure_base(process, adapter.probe)
            directory = self.home / "adapters" / name
            scripted = self._config.engine.kind == "scripted"
            await asyncio.to_thread(write_adapter, directory, adapter, with_probe=scripted)
            written = time.monotonic()
            await self._load(process, name, _Served(directory, adapter.version))
            loaded = time.monotonic()
            try:
                await self._prove(process, name, adapter)
            except BaseException as error:
                await self._withdraw(process, name, error)
                raise
            proven = time.monotonic()
            return {
                "write": written - began,
                "load": loaded - written,
                "probe": proven - loaded,
                "total": proven - began,
            }

    async def unload(self, version: int) -> None:
        """Stop serving `policy-v{version}`, then delete its files.

        Raises:
            EngineError, DeadlineExceeded: it is not served, or the engine failed.
        """
        await self.unload_named(policy_name(version))

    async def unload_named(self, name: str) -> None:
        """Stop serving `name`, then delete its files.

        Raises:
            EngineError, DeadlineExceeded: it is not served, or the engine failed.
        """
        async with self._adapter_lock:
            process = self._running()
            if name not in self._served:
                raise EngineError(f"'{name}' is not served", repr(self))
            await self._unload(process, name)

    async def health(self) -> None:
        """Return if the engine runs and says that it is healthy.

        Raises:
            EngineError: it has exited (with the log's last lines) or is unhealthy.
            DeadlineExceeded: it did not answer.
        """
        process = self._running()
        await self._client.check_health(process.base_url, self._control_timeout)

    async def served(self) -> list[str]:
        """Names of the adapters that are served, as the engine tells them.

        Raises:
            EngineError, DeadlineExceeded: the engine failed.
        """
        process = self._running()
        names = await self._client.list_models(process.base_url, self._control_timeout)
        return [name for name in names if name != BASE_MODEL_NAME]

    async def metrics(self) -> dict[str, float]:
        """The engine's own gauges and counters, by name without prefix, labels summed.

        Raises:
            EngineError, DeadlineExceeded: the engine failed.
        """
        process = self._running()
        return parse_metrics(
            await self._client.metrics_text(process.base_url, self._control_timeout)
        )

    def processes(self) -> list[int]:
        """Ids of the engine's processes."""
        return self._process.processes() if self._process is not None else []

    async def whereabouts(self) -> tuple[str, list[int]]:
        """The machine's name, and the ids of the engine's processes on it."""
        return socket.gethostname(), self.processes()

    @property
    def _control_timeout(self) -> float:
        return self._config.engine.control_timeout_s

    def _running(self) -> EngineProcess:
        """The engine's process, or how it ended."""
        if self._process is None or self._state == "starting":
            raise EngineError(f"not serving: {self._state}", repr(self), "start it first")
        try:
            self._process.check_alive()
        except EngineError:
            self._state = "dead"
            raise
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._state = "stopping"
            await process.stop(STOP_TIMEOUT_S)
        self._state = "stopped"

    def _forget_adapters(self) -> None:
        """What a former process served is unknown to the next one."""
        self._served.clear()
        self._used_names.clear()
        self._base_logprobs.clear()
        adapters = self.home / "adapters"
        if adapters.exists():
            rmtree(adapters)

    async def _load(self, process: EngineProcess, name: str, served: _Served) -> None:
        await self._client.load_adapter(
            process.base_url, name, str(served.path.absolute()), self._control_timeout
        )
        self._served[name] = served

    async def _unload(self, process: EngineProcess, name: str) -> None:
        await self._client.unload_adapter(process.base_url, name, self._control_timeout)
        await asyncio.to_thread(rmtree, self._served.pop(name).path)

    async def _withdraw(self, process: EngineProcess, name: str, cause: BaseException) -> None:
        """Unload what failed its proof; a failure of that is told along with `cause`."""
        try:
            await self._unload(process, name)
        except (EngineError, DeadlineExceeded) as error:
            cause.add_note(f"and '{name}' could not be unloaded: {error}")

    async def _prove(self, process: EngineProcess, name: str, adapter: AdapterBytes) -> None:
        """Compare the engine's logprobs of the probe with the trainer's."""
        probe = adapter.probe
        ours = await self._probe(process, name, probe)
        difference = _mean_difference(ours, probe.logprobs)
        tolerance = self._config.engine.probe_tolerance
        if not difference <= tolerance:
            raise EngineError(
                f"probe of '{name}' is {difference:.4g} nats from the trainer's on average, "
                f"above {tolerance:g}",
                repr(self),
                "the engine does not serve the adapter that was trained",
            )
        if adapter.version > 0:
            self._require_applied(name, ours, probe)

    async def _measure_base(self, process: EngineProcess, probe: Probe) -> None:
        """Take the base model's logprobs of the probe, once, before any adapter is loaded.

        Later it would be too late: vLLM's CPU kernels compute a request for the base
        model that shares a batch with an adapter's as if it were for the adapter in
        the last slot.
        """
        key = tuple(probe.token_ids)
        if key not in self._base_logprobs:
            self._base_logprobs[key] = await self._probe(process, BASE_MODEL_NAME, probe)

    def _require_applied(self, name: str, ours: list[float], probe: Probe) -> None:
        base = self._base_logprobs[tuple(probe.token_ids)]
        if not applied(ours, base, probe, NOISE[self._config.model.dtype]):
            raise EngineError(
                f"probe of '{name}' equals the base model's; the trainer's does not",
                repr(self),
                "the adapter is not applied: see its keys and its target modules",
            )

    async def _probe(self, process: EngineProcess, name: str, probe: Probe) -> list[float]:
        try:
            return await self._client.logprobs(
                process.base_url, name, probe.token_ids, self._control_timeout, PROBE_PRIORITY
            )
        except (EngineError, DeadlineExceeded) as error:
            process.check_alive()  # an engine that died of it says so itself
            raise error


def _mean_difference(ours: list[float], theirs: list[float]) -> float:
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return sum(differences) / len(differences)


def _largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def applied(ours: list[float], base: list[float], probe: Probe, noise: float) -> bool:
    """Whether the engine changes the base model as the trainer's adapter does.

    Each side is compared with its own base, because engine and trainer differ by
    rounding alone, and a small update may change less than that.

    Args:
        ours: the engine's logprobs of the probe under the adapter.
        base: the engine's under the base model.
        probe: the trainer's, with and without the adapter.
        noise: changes below it say nothing, nats.
    """
    if not probe.base_logprobs:
        return True
    wanted = _largest_difference(probe.logprobs, probe.base_logprobs)
    return wanted < noise or _largest_difference(ours, base) >= wanted / 2
