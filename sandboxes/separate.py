"""Grading in a sandbox of the verifier's own, which the agent has never been in.

Invariants:
- What goes over are the package's artifacts and /logs/artifacts, taken when every
  process of the agent is gone; and it goes to none of the places that decide the reward.
- An artifact that is not there, or is neither file nor folder, is the agent's result;
  one that is and can't be carried over is infrastructure's failure, never a reward of 0.
- Links and special files inside a folder do not go over.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from harbor.environments.base import BaseEnvironment
from harbor.models.trial.paths import EnvironmentPaths
from harbor.trial.artifact_handler import ArtifactHandler

from rl.errors import SandboxError
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.grading import (
    TESTS_DIR,
    Grade,
    end_processes,
    holds,
    run_verifier,
    within,
)
from sandboxes.tasks import TaskPackage

_log = logging.getLogger(__name__)


async def grade_separately(
    agent: BaseEnvironment,
    grader: BaseEnvironment,
    package: TaskPackage,
    folder: Path,
    timeout_s: float,
) -> Grade:
    """Carry the artifacts over and run the package's verifier in `grader`.

    Args:
        agent: where the agent was.
        grader: a started sandbox as the package defines its verifier's.
        package: the task.
        folder: where artifacts lie in between; it is made.
        timeout_s: for all of it.

    Raises:
        VerifierError, TaskPackageError: see `sandboxes.grading.grade`.
        SandboxError: a sandbox is gone, or an artifact that is there can't be read.
    """
    handler = ArtifactHandler(artifacts=package.config.artifacts, logger=_log)
    place = EnvironmentPaths().artifacts_dir
    async with within(package, timeout_s):
        await end_processes(agent)
        manifest = await handler.download_artifacts(
            agent, folder / "artifacts", source_artifacts_dir=place
        )
        for entry in manifest.entries:
            path = shlex.quote(entry.source)
            if entry.status == "failed" and await holds(agent, f"[ -f {path} ] || [ -d {path} ]"):
                raise SandboxError("an artifact can't be carried over", entry.source)
        await handler.upload_artifacts(
            grader,
            folder / "artifacts",
            source_artifacts_dir=place,
            target_artifacts_dir=place,
        )
        if isinstance(grader, BubblewrapEnvironment) or not package.tests_in_image:
            await grader.upload_dir(package.path / "tests", TESTS_DIR)
        await grader.empty_dirs([EnvironmentPaths().verifier_dir], chmod=True)
        return await run_verifier(grader, package, timeout_s)
