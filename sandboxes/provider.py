"""Makes sandboxes as the configuration says.

Invariants:
- An environment that is made here is not started, and costs nothing until it is.
- Remote sandboxes carry requests, never caps, and a lifetime of their own, so
  that one that is forgotten ends by itself.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment
from harbor.models.trial.config import ResourceMode
from harbor.models.trial.paths import TrialPaths

from rl.agent.shell import Shell
from rl.config import SandboxConfig
from rl.errors import ConfigurationError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.launch import require_bubblewrap
from sandboxes.shells import BubblewrapShell, HarborShell
from sandboxes.tasks import TaskPackage

MODAL_IDLE_S = 600  # a sandbox without a call for this long has lost its owner
MODAL_MAX_S = 24 * 3600  # Modal's own bound, which its client does not check
DEFAULT_LIFETIME_S = 3600.0


class SandboxProvider:
    """One configured source of sandboxes.

    Args:
        config: which kind, and what each may use.
        lifetime_s: remote sandboxes end by themselves after this; above any
            episode's deadline.
    """

    def __init__(self, config: SandboxConfig, lifetime_s: float = DEFAULT_LIFETIME_S) -> None:
        self.config = config
        self._lifetime_s = lifetime_s
        if not 0 < lifetime_s <= MODAL_MAX_S:
            raise ConfigurationError(f"a sandbox's lifetime must be within {MODAL_MAX_S} s")

    def preflight(self) -> None:
        """Check that sandboxes can be made.

        Raises:
            ConfigurationError: what is missing, and how to install it.
        """
        if self.config.provider == "bubblewrap":
            require_bubblewrap()
        else:
            _modal_environment()

    def create(self, package: TaskPackage, attempt_id: str, scratch: Path) -> BaseEnvironment:
        """An environment for one attempt, not yet started.

        Args:
            package: the task.
            attempt_id: names the sandbox.
            scratch: a folder of the attempt's own.
        """
        paths = TrialPaths(scratch)
        shared: dict[str, Any] = {
            "environment_dir": package.environment_dir,
            "environment_name": package.name,
            "session_id": attempt_id,
            "trial_paths": paths,
            "task_env_config": package.config.environment.model_copy(deep=True),
            "network_policy": package.config.environment.resolve_baseline(),
            "override_cpus": self.config.cpus,
            "override_memory_mb": self.config.memory_mb,
            "cpu_enforcement_policy": ResourceMode.REQUEST,
            "memory_enforcement_policy": ResourceMode.REQUEST,
        }
        if self.config.provider == "bubblewrap":
            return BubblewrapEnvironment(**shared, disk_mb=self.config.disk_mb)
        return _modal_environment()(
            **shared,
            sandbox_timeout_secs=math.ceil(self._lifetime_s),
            sandbox_idle_timeout_secs=min(MODAL_IDLE_S, math.ceil(self._lifetime_s)),
            labels={"attempt": attempt_id[:63]},
        )

    def shell(self, env: BaseEnvironment) -> Shell:
        """The harness's view of a started environment."""
        if isinstance(env, BubblewrapEnvironment):
            return BubblewrapShell(env)
        return HarborShell(env)


def _modal_environment() -> type[BaseEnvironment]:
    """Harbor's Modal environment, imported only when it is asked for.

    Raises:
        ConfigurationError: the package is missing.
    """
    if importlib.util.find_spec("modal") is None:
        raise ConfigurationError(
            "provider = 'modal' needs the modal package",
            where="sandbox.provider",
            remedy="install it: pip install 'harbor[modal]'",
        )
    from harbor.environments.modal import ModalEnvironment

    return ModalEnvironment
