"""Whether Modal is the one that is meant: workspace, profile, environment, secrets, volumes.

Invariants:
- Nothing here makes anything at Modal: it only looks up.
- What Modal's client raises becomes a refusal with a remedy; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import modal
import modal.config
from grpclib.exceptions import GRPCError, StreamTerminatedError
from modal.exception import AuthError, Error, NotFoundError, PermissionDeniedError

from rl.config import CampaignConfig
from rl.errors import ConfigurationError, DeadlineExceeded, InfrastructureError
from rl.guards import Guard
from rl.provision.build import secrets, volumes
from rl.provision.functions import modal_of

LOOKUP_S: Final = 60.0  # a lookup takes a tenth of a second; Modal's client tries again
WHERE: Final = "Modal"
LOG_IN: Final = "log in with `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


@asynccontextmanager
async def asking(what: str, limit_s: float = LOOKUP_S) -> AsyncGenerator[None]:
    """Ask Modal for `what` within a deadline.

    Raises:
        ConfigurationError: the credentials are missing, wrong, or not enough.
        InfrastructureError: Modal can't be reached, or does not answer in time.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except AuthError as error:
        # Not with what was asked: whatever is asked next ends in the same way.
        raise ConfigurationError(f"not logged in: {_first_line(error)}", WHERE, LOG_IN) from error
    except PermissionDeniedError as error:
        raise ConfigurationError(f"{what}: {_first_line(error)}", WHERE, LOG_IN) from error
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{what}: no answer within {limit_s:g} s", WHERE, "see https://status.modal.com"
        ) from error
    except (Error, GRPCError, StreamTerminatedError, OSError) as error:
        raise InfrastructureError(
            f"{what}: {_first_line(error)}", WHERE, "check the connection, then look what there is"
        ) from error


def account_guards(config: CampaignConfig, *, prepared: bool) -> list[Guard]:
    """The guards of Modal's account.

    Args:
        config: of the campaign.
        prepared: whether the volumes must be there.
    """
    table = modal_of(config)
    guards = [
        Guard("Modal workspace", lambda: _run(_workspace(table.workspace))),
        Guard("Modal profile", lambda: _profile(table.profile)),
        Guard("Modal environment", lambda: _run(_environment(table.environment))),
        Guard("Modal secrets", lambda: _run(_secrets(config))),
    ]
    if prepared:
        guards.append(Guard("Modal volumes", lambda: _run(_volumes(config))))
    return guards


async def workspace_name() -> str:
    """The workspace that the credentials belong to.

    Raises:
        ConfigurationError, InfrastructureError: as for `asking`.
    """
    async with asking("who is logged in"):
        workspace = modal.Workspace.from_context()
        await workspace.hydrate.aio()
        return workspace.name or ""


async def require_workspace(wanted: str | None) -> str:
    """Refuse another workspace than the configured one.

    Raises:
        ConfigurationError: none is configured, or another one is logged in.
        InfrastructureError: as for `asking`.
    """
    return await _workspace(wanted)


async def _workspace(wanted: str | None) -> str:
    if not wanted:
        raise ConfigurationError(
            "no workspace is named, so nobody has agreed to pay",
            "modal.workspace",
            "name the one that is to pay: --set modal.workspace=NAME "
            "(`modal profile current` tells which is logged in)",
        )
    found = await workspace_name()
    if found != wanted:
        raise ConfigurationError(
            f"the workspace '{found}' is logged in, and '{wanted}' is configured",
            "modal.workspace",
            "switch with `modal profile activate`, or correct modal.workspace",
        )
    return found


def _profile(wanted: str | None) -> str:
    if wanted is None:
        return "any"
    if os.environ.get("MODAL_TOKEN_ID"):
        raise ConfigurationError(
            "MODAL_TOKEN_ID is set and goes before every profile",
            "modal.profile",
            "unset it, or leave modal.profile out",
        )
    found = modal.config._profile  # pyright: ignore[reportPrivateUsage]
    if found != wanted:
        raise ConfigurationError(
            f"the profile '{found}' is active, and '{wanted}' is configured",
            "modal.profile",
            f"switch with `modal profile activate {wanted}`",
        )
    return found


async def _environment(name: str) -> str:
    try:
        async with asking(f"the environment '{name}'"):
            await modal.Environment.from_name(name).hydrate.aio()
    except InfrastructureError as error:
        _raise_missing(error, "modal.environment", f"make it: modal environment create {name}")
    return name


async def _secrets(config: CampaignConfig) -> str:
    table = modal_of(config)
    for name, secret in zip(table.secrets, secrets(config), strict=True):
        try:
            async with asking(f"the secret '{name}'"):
                await secret.hydrate.aio()
        except InfrastructureError as error:
            _raise_missing(
                error,
                "modal.secrets",
                f"make it with `modal secret create {name} MODAL_TOKEN_ID=... "
                "MODAL_TOKEN_SECRET=...`, as docs/modal.md says",
            )
    return ", ".join(table.secrets) or "none"


async def _volumes(config: CampaignConfig) -> str:
    table = modal_of(config)
    for volume in volumes(config).values():
        try:
            async with asking("the volumes"):
                await volume.hydrate.aio()
        except InfrastructureError as error:
            command = "python -m rl.rent prepare_account"
            _raise_missing(error, "modal.state_volume", f"prepare the account: {command}")
    return f"{table.state_volume}, {table.model_volume}"


def _raise_missing(error: InfrastructureError, key: str, remedy: str) -> None:
    """Raise `error`; as a refusal if Modal knows no such thing."""
    if isinstance(error.__cause__, NotFoundError):
        raise ConfigurationError(error.what, key, remedy) from error
    raise error


def _run(asked: Coroutine[Any, Any, str]) -> str:
    return asyncio.run(asked)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
