"""A Harbor environment on this machine, without Docker: bubblewrap and a small daemon.

Invariants:
- Nothing of the host can be written, and only /usr and public parts of /etc can
  be read; there is no network unless the task asks for it and the owner allows it.
- `stop` ends every process, whatever state `start` reached, and may be repeated.
- The Dockerfile's FROM is recorded and logged, not followed: the host's /usr
  stands in for the image.
- `limits_in_force` says, once it is started, what bounds the sandbox and what does not.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import NetworkMode

from rl.errors import ConfigurationError, SandboxError, TaskPackageError
from sandboxes import launch
from sandboxes.build import Build, build
from sandboxes.channel import Finished, Request
from sandboxes.dockerfile import DEFAULT_PATH, EMPTY_RECIPE, Recipe, Run, parse_dockerfile
from sandboxes.layers import default_folder
from sandboxes.transfer import file_entries, tree_entries, write_file, write_tree

DEFAULT_DISK_MB = 256
DEFAULT_WORKDIR = "/app"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
MAX_EXEC_S = 6 * 3600.0  # a command without a limit of its own; the caller has one
EXEC_OUTPUT_LIMIT = 4 << 20
MAX_PROCESSES = 256
MAX_OPEN_FILES = 1024
# A task's memory and CPU are requests; these bound what it can do to the machine.
MEMORY_FACTOR = 2
MIN_MEMORY_MB = 512  # what interpreters and compilers take without being greedy
MIN_CPUS = 1.0
# Address space, not memory: runtimes reserve far more than they touch.
ADDRESS_SPACE_FACTOR = 8
MIN_ADDRESS_SPACE_MB = 4096


class BubblewrapEnvironment(BaseEnvironment):
    """Runs a task in a bubblewrap sandbox on this machine.

    Options (Harbor's `--ek key=value`): `disk_mb`, the size of the writable
    disk; `allow_host_network`, to let a task that asks for the network share
    this machine's, loopback included; `layers`, the folder where what a
    Dockerfile's RUNs left is kept, or `none` to run them each time.
    """

    def __init__(
        self,
        *args: Any,
        disk_mb: int | None = None,
        allow_host_network: bool = False,
        layers: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._sandbox: launch.Sandbox | None = None
        self._recipe: Recipe = EMPTY_RECIPE
        self._allow_host_network = bool(allow_host_network)
        folder = Path(layers).absolute() if layers else default_folder()
        self._layers = None if layers == "none" else folder
        super().__init__(*args, **kwargs)
        self.disk_mb = int(disk_mb or self._effective_storage_mb or DEFAULT_DISK_MB)
        self.limits_in_force: dict[str, str] = {}

    @staticmethod
    @override
    def type() -> str:
        return "bubblewrap"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(
            cpu_request=True, memory_request=True, fractional_cpus=True
        )

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        launch.require_bubblewrap()

    @override
    def _validate_definition(self) -> None:
        path = self.environment_dir / "Dockerfile"
        if path.exists():
            self._recipe = parse_dockerfile(path)
        elif not self.task_env_config.docker_image:
            raise TaskPackageError("has neither Dockerfile nor docker_image", str(path.parent))
        elif (self.environment_dir / "docker-compose.yaml").exists():
            raise TaskPackageError("docker-compose.yaml cannot be followed", str(path.parent))

    @property
    def workdir(self) -> str:
        """Where commands run."""
        of_recipe = self._recipe.workdir if self._recipe.workdir != "/" else DEFAULT_WORKDIR
        return self.task_env_config.workdir or of_recipe

    @property
    def image(self) -> str:
        """The image that the package names, which the host's /usr stands in for."""
        return self._recipe.image or self.task_env_config.docker_image or ""

    @override
    async def start(self, force_build: bool = False) -> None:
        """Start the sandbox and follow the Dockerfile.

        Args:
            force_build: run its commands even if what they leave is known.

        Raises:
            SandboxError: it could not be started or a RUN failed; nothing is left.
            ConfigurationError: it needs what this machine or its owner does not give.
        """
        if self._sandbox is not None:
            raise SandboxError("this sandbox has already been started", self.session_id)
        launch.require_bubblewrap()
        self._sandbox = await launch.start(self._bounds(), START_TIMEOUT_S)
        self._describe_limits()
        try:
            await self._build(force_build)
            await self._upload_environment_dir_after_start()
        except BaseException:
            await asyncio.shield(self.stop(delete=True))
            raise

    @override
    async def stop(self, delete: bool = True) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await launch.end(sandbox, STOP_TIMEOUT_S)

    async def kill_all(self) -> None:
        """End every process in the sandbox; files and the sandbox itself stay."""
        await self._live().channel.kill_all()

    async def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
        output_limit: int = EXEC_OUTPUT_LIMIT,
        merged: bool = False,
        clean_env: bool = False,
    ) -> Finished:
        """Run a command with bash; see `exec`, which is this in Harbor's words.

        Args:
            output_limit: bytes kept of each stream, head and tail.
            merged: one stream for standard output and error, as printed.
            clean_env: nothing but `env` and a fixed PATH.
        """
        base = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}
        given = (env or {}) if clean_env else {**self._recipe.env, **(self._merge_env(env) or {})}
        who = self._resolve_user(user)
        request = Request(
            command=command,
            cwd=cwd or self.workdir,
            user=self._recipe.user or "root" if who is None else str(who),
            env={**base, **given},
            rlimits=self._rlimits(),
            timeout_s=MAX_EXEC_S if timeout_s is None else timeout_s,
            output_limit=output_limit,
            merged=merged,
        )
        return await self._live().channel.run(request)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await self.run(command, cwd=cwd, env=env, timeout_s=timeout_sec, user=user)
        stdout, stderr = done.streams
        return ExecResult(stdout=stdout.text(), stderr=stderr.text(), return_code=done.exit_code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._live().channel.put(file_entries(Path(source_path), self._inside(target_path)))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._live().channel.put(tree_entries(Path(source_dir), self._inside(target_dir)))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = self._inside(source_path)
        async with aclosing(self._live().channel.get(source, whole=False)) as records:
            await write_file(records, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        source = self._inside(source_dir)
        async with aclosing(self._live().channel.get(source, whole=True)) as records:
            refused = await write_tree(records, Path(target_dir))
        if refused:
            self.logger.warning(f"not downloaded (links or special files): {refused[:10]}")

    async def read_file(self, path: str, limit: int) -> bytes | None:
        """The first `limit` bytes of a regular file that is no link, None if there is none.

        Raises:
            SandboxError: it could not be read, or the sandbox is gone.
        """
        return await self._live().channel.look(self._inside(path), limit)

    def _live(self) -> launch.Sandbox:
        if self._sandbox is None:
            raise SandboxError("this sandbox is not running", self.session_id)
        return self._sandbox

    def _inside(self, path: str) -> str:
        return str(PurePosixPath(self.workdir) / path)

    def _wants_network(self) -> bool:
        config = self.task_env_config
        asked = "network_mode" in config.model_fields_set and self._network_is_public
        if config.network_mode != NetworkMode.PUBLIC or not asked:
            return False
        if not self._allow_host_network:
            raise ConfigurationError(
                "the task asks for a network, and a local sandbox can only share this machine's, "
                "loopback included",
                where=str(self.environment_dir.parent / "task.toml"),
                remedy="remove network_mode, use the modal provider, or allow_host_network=true",
            )
        return True

    def _bounds(self) -> launch.Bounds:
        return launch.Bounds(
            disk_mb=self.disk_mb,
            memory_mb=max(MIN_MEMORY_MB, MEMORY_FACTOR * (self._effective_memory_mb or 0)),
            processes=MAX_PROCESSES,
            cpus=max(MIN_CPUS, self._effective_cpus or 0),
            network=self._wants_network(),
        )

    def _rlimits(self) -> str:
        limits = {
            "RLIMIT_NPROC": MAX_PROCESSES,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_FSIZE": self.disk_mb << 20,
            "RLIMIT_CORE": 0,
        }
        if "memory" not in self._live().grouped:
            space = max(MIN_ADDRESS_SPACE_MB, ADDRESS_SPACE_FACTOR * self._bounds().memory_mb)
            limits["RLIMIT_AS"] = space << 20
        return " ".join(f"{name}={value}" for name, value in limits.items())

    def _describe_limits(self) -> None:
        self.limits_in_force = describe_limits(self._live(), self._bounds(), self._rlimits())
        self.logger.debug(f"sandbox limits: {self.limits_in_force}")

    async def _build(self, fresh: bool) -> None:
        if self.image:
            self.logger.debug(f"image {self.image}: this machine's /usr stands in for it")
        plan = Build(
            recipe=self._recipe,
            context=self.environment_dir,
            workdir=self.workdir,
            disk_mb=self.disk_mb,
            layers=self._layers,
            fresh=fresh,
            timeout_s=self.task_env_config.build_timeout_sec,
        )
        sandbox = self._live()
        await build(plan, sandbox.channel, self._run_step, sandbox.full_map, self.logger)

    async def _run_step(self, step: Run, timeout_s: float) -> Finished:
        return await self.run(
            step.command,
            cwd=step.workdir,
            env=dict(step.env),
            timeout_s=timeout_s,
            user=step.user,
            merged=True,
            clean_env=True,
        )


def describe_limits(sandbox: launch.Sandbox, bounds: launch.Bounds, rlimits: str) -> dict[str, str]:
    """What bounds a sandbox, in words, and what does not."""
    grouped, holding = sandbox.grouped, sandbox.holding
    memory, processes = f"{bounds.memory_mb} MiB besides the disk", f"{bounds.processes}"
    return {
        "ids": "0-65535 of an own range" if sandbox.full_map else "one user id: root is the owner",
        "nested user namespaces": "denied" if "nested" in holding else "allowed",
        "sysctls": "read-only" if "sealed" in holding else "as the kernel guards them",
        "system calls": "filtered" if "calls" in holding else "not filtered",
        "disk": f"{bounds.disk_mb} MiB tmpfs"
        + ("" if "inodes" in holding else ", its number of files not limited"),
        "memory": f"cgroup: {memory}"
        if "memory" in grouped
        else f"watched: {memory}, a moment late, without what no process has mapped",
        "processes": f"cgroup: {processes}"
        if "pids" in grouped
        else f"rlimit: {processes} per user id"
        + (" and process numbers: twice that in all" if "processes" in holding else ""),
        "cpu": f"cgroup: {bounds.cpus:g} cores, weight of one process"
        if "cpu" in grouped
        else "not limited",
        "each process": f"rlimit: {rlimits}",
        "shared memory and queues": "16 MiB" if "ipc" in holding else "not limited",
    }
