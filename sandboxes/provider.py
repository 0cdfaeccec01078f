"""Makes sandboxes as the configuration says.

Invariants:
- An environment that is made here is not started, and costs nothing until it is.
- Remote sandboxes carry requests, never caps, and a lifetime of their own above
  any episode's deadline, so that one that is forgotten ends by itself.
- A remote sandbox is tagged with campaign and attempt, and one that no live attempt
  owns is terminated when the campaign starts again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment
from harbor.models.task.paths import TaskPaths
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
from harbor.models.trial.config import ResourceMode
from harbor.models.trial.paths import TrialPaths

from rl.agent.shell import Shell
from rl.config import SandboxConfig
from rl.errors import ConfigurationError, TaskPackageError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.launch import require_bubblewrap
from sandboxes.pace import Pace
from sandboxes.shells import BubblewrapShell, HarborShell
from sandboxes.tasks import TaskPackage

MODAL_IDLE_S = 600  # a sandbox without a call for this long has lost its owner
MODAL_MAX_S = 24 * 3600  # Modal's own bound, which its client does not check
DEFAULT_LIFETIME_S = 3600.0
# A remote sandbox that its owner forgot ends this long after the episode must have.
LIFETIME_GRACE_S = 600.0


class SandboxProvider:
    """One configured source of sandboxes.

    Args:
        config: which kind, and what each may use.
        lifetime_s: remote sandboxes end by themselves after this; above any
            episode's deadline (`lifetime` gives one).
        campaign: remote sandboxes are named and tagged with it; by default with a
            name of this provider's own.
        creators: how many providers share the rate at which remote ones are created.
    """

    def __init__(
        self,
        config: SandboxConfig,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        campaign: str | None = None,
        creators: int = 1,
    ) -> None:
        self.config = config
        self.campaign = campaign or f"unnamed-{secrets.token_hex(4)}"
        self._lifetime_s = lifetime_s
        self._pace = Pace(config.creates_per_s / creators)
        if not 0 < lifetime_s <= MODAL_MAX_S:
            raise ConfigurationError(
                f"a sandbox's lifetime must be within {MODAL_MAX_S} s, not {lifetime_s:g}",
                "episodes.deadline_s",
                f"set it to at most {MODAL_MAX_S - LIFETIME_GRACE_S:g}",
            )

    def preflight(self) -> None:
        """Check that sandboxes can be made.

        Raises:
            ConfigurationError: what is missing, and how to install it.
        """
        if self.config.provider == "bubblewrap":
            require_bubblewrap()
        else:
            _require_modal()

    def reap(self, live: Collection[str] = ()) -> list[str]:
        """Terminate remote sandboxes of the campaign that no live attempt owns.

        Args:
            live: ids of the attempts that are running: none when a campaign starts.

        Returns:
            The attempts that sandboxes were left from.

        Raises:
            InfrastructureError: the provider can't be reached.
        """
        if self.config.provider == "bubblewrap":
            return []  # a local one ends with its owner
        _require_modal()
        from sandboxes.modal_sandbox import reap_orphans

        return asyncio.run(reap_orphans(self.campaign, live))

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """An environment for one attempt, not yet started.

        Args:
            package: the task.
            attempt_id: names the sandbox.
            scratch: a folder of the attempt's own.
        """
        options: dict[str, Any] = {
            "environment_dir": package.environment_dir,
            "task_env_config": package.config.environment.model_copy(deep=True),
            "network_policy": package.config.environment.resolve_baseline(),
        }
        return self._made(package, attempt_id, scratch, "agent", options)

    def create_grader(
        self, package: TaskPackage, attempt_id: str, scratch: Path
    ) -> BaseEnvironment:
        """An environment for the separate grader of one attempt, not yet started.

        It asks for as much as the agent's.

        Raises:
            TaskPackageError: the package is graded in the agent's sandbox.
        """
        paths = TaskPaths(package.path)
        definition = resolve_verifier_environment_definition(package.config, paths)
        if definition is None:
            raise TaskPackageError("has no separate verifier environment", str(package.path))
        options: dict[str, Any] = {
            "environment_dir": definition.directory,
            "task_env_config": definition.config.model_copy(deep=True),
            "network_policy": definition.config.resolve_baseline(),
            "enable_environment_dir_upload": not definition.bundled_tests,
        }
        return self._made(package, attempt_id, scratch, "grader", options)

    def _made(
        self,
        package: TaskPackage,
        attempt_id: str,
        scratch: Path,
        role: str,
        options: dict[str, Any],
    ) -> BaseEnvironment:
        shared: dict[str, Any] = {
            **options,
            "environment_name": package.name,
            "trial_paths": TrialPaths(scratch),
            "override_cpus": self.config.cpus,
            "override_memory_mb": self.config.memory_mb,
            "cpu_enforcement_policy": ResourceMode.REQUEST,
            "memory_enforcement_policy": ResourceMode.REQUEST,
        }
        if self.config.provider == "bubblewrap":
            return BubblewrapEnvironment(
                **shared, session_id=attempt_id, disk_mb=self.config.disk_mb
            )
        _require_modal()
        from sandboxes.modal_sandbox import RequestedModalEnvironment, label

        lifetime = math.ceil(self._lifetime_s)
        name = f"{self.campaign}-{attempt_id}" + ("" if role == "agent" else f"-{role}")
        return RequestedModalEnvironment(
            **shared,
            session_id=label(name),
            pace=self._pace,
            sandbox_timeout_secs=lifetime,
            sandbox_idle_timeout_secs=min(MODAL_IDLE_S, lifetime),
            # Harbor's own labels hold the package's name, which need not be a valid tag.
            auto_labels=False,
            labels={
                "campaign": label(self.campaign),
                "attempt": label(attempt_id),
                "task": label(package.name),
                "role": role,
            },
        )

    def shell(self, env: BaseEnvironment) -> Shell:
        """The harness's view of a started environment."""
        if isinstance(env, BubblewrapEnvironment):
            return BubblewrapShell(env)
        return HarborShell(env)


def lifetime(deadline_s: float) -> float:
    """How long remote sandboxes live at most, given an episode's deadline, in seconds."""
    return deadline_s + LIFETIME_GRACE_S


def _require_modal() -> None:
    """Refuse to go on without Modal's client.

    Raises:
        ConfigurationError: the package is missing.
    """
    if importlib.util.find_spec("modal") is None:
        raise ConfigurationError(
            "provider = 'modal' needs the modal package",
            where="sandbox.provider",
            remedy="install it: pip install 'harbor[modal]'",
        )
