"""Modal sandboxes, as a campaign asks for them: Harbor's own environment, with bounds.

Invariants:
- CPU and memory are scalar requests; there is never a cap, for the agent's sandbox
  and a separate grader's alike.
- Every sandbox has a lifetime and an idle limit of its own, so that one that is
  forgotten ends by itself, and tags by which its campaign finds it again.
- Sandboxes are created at a bounded rate, second tries included.
- A floating base image is replaced by the pinned one (`sandboxes.modal_image`).
- No command goes beyond what Modal takes as arguments: a longer one is uploaded,
  in the pieces of Modal's own file transfer, and run from there.

Usable in `harbor run -e sandboxes.modal_sandbox:RequestedModalEnvironment` as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, override
from uuid import uuid4

import modal
from harbor.environments.base import ExecResult
from harbor.environments.modal import ModalEnvironment
from harbor.models.trial.config import ResourceMode
from tenacity import retry, stop_after_attempt, wait_exponential

from rl.errors import ConfigurationError, InfrastructureError
from sandboxes.modal_image import PINNED, pinned_dockerfile
from sandboxes.pace import Pace

APP_NAME = "terminal-rl-sandboxes"
REQUEST_CPUS = 0.125  # Modal's own smallest request, and what a task of a bank uses
REQUEST_MEMORY_MB = 128
IDLE_S = 600  # a sandbox without a call for this long has lost its owner
LIFETIME_S = 3600  # where nobody says how long an episode may take
CREATES_PER_S = 5.0  # cautious: Modal bounds creations per workspace
CREATE_TRIES = 2
# Modal refuses a command whose arguments are together longer than this.
ARGUMENTS_LIMIT_BYTES = 2**16
WRAPPING_BYTES = 1024  # the shell, the change of user and their quotes
NAME_LIMIT = 63  # of Modal's names and tags
REAP_TIMEOUT_S = 120.0
_OTHER = re.compile(r"[^A-Za-z0-9._-]")


class RequestedModalEnvironment(ModalEnvironment):
    """Harbor's Modal environment, with requests in place of caps.

    Args:
        pace: when sandboxes may be created; shared by those of one creator.
        override_cpus: CPU request, cores.
        override_memory_mb: memory request, MiB.
    """

    def __init__(
        self,
        *args: Any,
        pace: Pace | None = None,
        override_cpus: float | None = None,
        override_memory_mb: int | None = None,
        cpu_enforcement_policy: ResourceMode = ResourceMode.REQUEST,
        memory_enforcement_policy: ResourceMode = ResourceMode.REQUEST,
        **kwargs: Any,
    ) -> None:
        if {cpu_enforcement_policy, memory_enforcement_policy} != {ResourceMode.REQUEST}:
            raise ConfigurationError(
                "sandboxes carry requests, never caps",
                "cpu_enforcement_policy, memory_enforcement_policy",
                "leave them out",
            )
        kwargs.setdefault("app_name", APP_NAME)
        kwargs.setdefault("sandbox_timeout_secs", LIFETIME_S)
        kwargs.setdefault("sandbox_idle_timeout_secs", IDLE_S)
        self._pace = pace or Pace(CREATES_PER_S)
        self._definition: Path | None = None
        super().__init__(
            *args,
            override_cpus=REQUEST_CPUS if override_cpus is None else override_cpus,
            override_memory_mb=REQUEST_MEMORY_MB
            if override_memory_mb is None
            else override_memory_mb,
            cpu_enforcement_policy=cpu_enforcement_policy,
            memory_enforcement_policy=memory_enforcement_policy,
            **kwargs,
        )

    @property
    @override
    def _environment_definition_path(self) -> Path:
        return self._definition or super()._environment_definition_path

    @override
    async def start(self, force_build: bool) -> None:
        own = super()._environment_definition_path
        if own.is_file():
            text = pinned_dockerfile(own.read_text(encoding="utf-8"))
            if text is not None:
                pinned = self.trial_paths.trial_dir / PINNED.name
                pinned.parent.mkdir(parents=True, exist_ok=True)
                pinned.write_text(text, encoding="utf-8")
                self._definition = pinned
        await super().start(force_build)

    @retry(
        stop=stop_after_attempt(CREATE_TRIES),
        wait=wait_exponential(min=1, max=10),
        reraise=True,
    )
    @override
    async def _create_sandbox(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        *,
        entrypoint: list[str] | None = None,
        block_network: bool | None = None,
        experimental_options: dict[str, Any] | None = None,
    ) -> modal.Sandbox:
        # Each try has a turn of its own, so Harbor's own retries are left out.
        await self._pace.turn()
        return await ModalEnvironment._create_sandbox.__wrapped__(
            self,
            entrypoint=entrypoint,
            block_network=block_network,
            experimental_options=experimental_options,
        )

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        # Changing the user quotes the command once more, which makes it longer.
        if len(shlex.quote(command).encode()) <= ARGUMENTS_LIMIT_BYTES - WRAPPING_BYTES:
            return await super().exec(command, cwd, env, timeout_sec, user)
        if self._sandbox is None:
            raise InfrastructureError("the sandbox has not been started", self.session_id)
        script = f"/tmp/.command-{uuid4().hex}"
        await self._sandbox.filesystem.write_bytes.aio(command.encode(), script)
        run = f"{self._default_shell} {script}; status=$?; rm -f {script}; exit $status"
        return await super().exec(run, cwd, env, timeout_sec, user)


def label(text: str) -> str:
    """`text` as Modal takes it for a name or a tag: as it is, or shortened and told apart."""
    safe = _OTHER.sub("-", text)
    if safe == text and 0 < len(text) <= NAME_LIMIT:
        return text
    mark = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{safe[: NAME_LIMIT - len(mark) - 1]}.{mark}"


async def reap_orphans(campaign: str, live: Collection[str] = ()) -> list[str]:
    """Terminate the campaign's sandboxes that no live attempt owns.

    Args:
        campaign: the campaign's name, as its sandboxes are tagged.
        live: attempts that are running.

    Returns:
        The attempts whose sandboxes were terminated.

    Raises:
        InfrastructureError: Modal can't be reached, or does not answer in time.
    """
    owners = {label(attempt) for attempt in live}
    reaped: list[str] = []
    try:
        async with asyncio.timeout(REAP_TIMEOUT_S):
            app = await modal.App.lookup.aio(APP_NAME, create_if_missing=True)
            tags = {"campaign": label(campaign)}
            # Of both of Modal's generations of sandboxes, whatever this process creates.
            found = modal.Sandbox._experimental_list.aio(app_id=app.app_id, tags=tags)
            async for sandbox in found:
                owner = (await sandbox.get_tags.aio()).get("attempt", "")
                if owner not in owners:
                    await sandbox.terminate.aio()
                    reaped.append(owner)
    except (modal.exception.Error, OSError, TimeoutError) as error:
        what = f"its sandboxes can't be looked through: {error!r}"
        remedy = "check the connection and the token (modal token info), then start again"
        raise InfrastructureError(what, f"campaign {campaign} on Modal", remedy) from error
    return reaped
