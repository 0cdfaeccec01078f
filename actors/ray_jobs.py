"""Jobs of a Ray cluster, through its job server.

Invariants:
- Every call ends by its deadline, also when the server accepts a connection and is silent.
- What the server answers becomes an error of ours: no such job, no right, not there.
- A submission id is Ray's idempotency key: of two submissions of one id, one is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.calls import in_daemon
from actors.ray_auth import REFUSED_REMEDY
from rl.errors import CampaignError, ConfigurationError, DeadlineExceeded, InfrastructureError

CALL_S = 30.0
UPLOAD_S = 300.0  # of the working directory, on a slow line
# Statuses after which a job never runs again.
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_OTHER_ADDRESSES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
_NO_RIGHT = ("401", "403", "Unauthenticated", "authentication", "Unauthorized", "Forbidden")


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the cluster tells it.

    Attributes:
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: why, if the cluster says so.
        exit_code: the driver's; None: it has none (yet).
        metadata: what it was submitted with.
    """

    submission_id: str
    status: str
    message: str
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def ended(self) -> bool:
        """Whether it will never run again."""
        return self.status in ENDED


class JobTaken(ConfigurationError):
    """The cluster has a job of this submission id already."""


class RayJobs:
    """The jobs of one cluster.

    Args:
        address: of its job server, http://HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: Any = None

    async def connect(self) -> None:
        """Reach the job server.

        Raises:
            ConfigurationError: the address is no job server's.
            ConfigurationError: it does not take our token.
            InfrastructureError: nothing answers there, or nothing that is Ray's.
        """
        if not self.address.startswith(("http://", "https://")):
            raise ConfigurationError("is no job server's address", self.address, _CHECK)
        self._client = await self._ask(lambda: _client(self.address), CALL_S)

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
    ) -> None:
        """Submit a job; it is the cluster's when this returns.

        Raises:
            JobTaken: the cluster has one of this id.
            CampaignError: as for `connect`; whether it was taken is then unknown.
        """

        def submit() -> None:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=dict(runtime_env),
                metadata=dict(metadata),
            )

        await self._ask(submit, UPLOAD_S, submission_id)

    async def find(self, submission_id: str) -> Job | None:
        """The job of this id, None if the cluster has none.

        Raises:
            CampaignError: as for `connect`.
        """
        try:
            info = await self._ask(lambda: self._client.get_job_info(submission_id), CALL_S)
        except _NoSuchJob:
            return None
        return Job(
            submission_id=submission_id,
            status=str(getattr(info.status, "value", info.status)),
            message=info.message or "",
            exit_code=info.driver_exit_code,
            metadata=info.metadata or {},
        )

    async def stop(self, submission_id: str) -> None:
        """Ask a job to end: its driver gets SIGTERM, and SIGKILL later.

        Raises:
            CampaignError: as for `connect`.
        """
        await self._ask(lambda: self._client.stop_job(submission_id), CALL_S)

    def tail(self, submission_id: str) -> AsyncIterator[str]:
        """What the job prints, from its beginning, in pieces, until it ends."""
        return self._client.tail_job_logs(submission_id)

    async def _ask(self, work: Callable[[], Any], limit_s: float, where: str = "") -> Any:
        """Do a blocking call in a thread that nobody waits for beyond its deadline."""
        from ray.exceptions import RayError

        try:
            return await in_daemon(limit_s, work)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the job server has not answered within {limit_s:g} s", self.address, _CHECK
            ) from None
        except CampaignError:
            raise
        except (RayError, RuntimeError, OSError, ValueError) as error:  # requests' are OSErrors
            raise self._named(error, where) from error

    def _named(self, error: Exception, where: str) -> CampaignError:
        """What the server's answer means."""
        text = str(error).strip()
        first = text.splitlines()[0] if text else type(error).__name__
        if "already exists" in text:
            return JobTaken("the cluster has a job of this id already", where or self.address)
        if "404" in text or "does not exist" in text:
            return _NoSuchJob("no such job", where or self.address)
        if any(sign in text for sign in _NO_RIGHT) or "Authentication" in type(error).__name__:
            return ConfigurationError(
                "the cluster does not take this token", self.address, REFUSED_REMEDY
            )
        if isinstance(error, OSError):
            return InfrastructureError("no Ray job server answers there", self.address, _CHECK)
        return InfrastructureError(f"the job server refuses: {first}", self.address, _CHECK)


_CHECK = (
    "check --address: it is the dashboard's, such as http://127.0.0.1:8265, and the head "
    "must run (`ray status` there)"
)


class _NoSuchJob(ConfigurationError):
    """The cluster does not know the job."""


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    # Ray's client would take these in the place of the address that it is given.
    for name in _OTHER_ADDRESSES:
        os.environ.pop(name, None)
    logging.getLogger("ray").setLevel(logging.WARNING)
    return JobSubmissionClient(address)
