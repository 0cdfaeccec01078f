"""Ask Modal what exists of a submission.

Invariants:
- An app is one submission: whatever was called in it belongs to that submission, and where
  there is no such app nothing was called.
- A call that has run says so itself in the Dict of claims, also after Modal has forgotten it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Literal

import modal
from modal._utils.async_utils import synchronize_api
from modal.exception import NotFoundError
from modal_proto import api_pb2

from rl.errors import ConfigurationError, InfrastructureError
from rl.evidence.intents import Intent
from rl.provision.account import asking, workspace_name
from rl.provision.functions import NAMES
from rl.provision.order import claim_key

CALLS_ASKED: Final = 100  # of one function; a submission makes at most one for each shard
PARTS: Final = ("launch", "train", "continue")

Kind = Literal["app", "call", "claim"]


@dataclass(frozen=True, slots=True)
class Found:
    """Something that Modal holds.

    Attributes:
        kind: app; call: of a function; claim: what a launcher or a call has said of itself.
        name: the app's, the function's, or the claim's.
        id: Modal's id; of a claim, what it says.
        detail: how it stands.
    """

    kind: Kind
    name: str
    id: str
    detail: str = ""


def what_exists(intent: Intent) -> list[Found]:
    """Everything that Modal holds of a submission.

    Raises:
        ConfigurationError: another workspace is logged in than the one that was asked.
        InfrastructureError: Modal can't be reached, or does not answer in time.
    """
    return asyncio.run(existing(intent))


def told(intent: Intent, found: list[Found]) -> str:
    """What a person is told of it: one line each, and what follows from them."""
    lines = [f"{one.kind} {one.name}: {one.id} {one.detail}".rstrip() for one in found]
    # Workers are called by the continuation, not by a launcher.
    calls = [one for one in found if one.kind == "call" and one.name != "heldout_worker"]
    claimed = [one for one in found if one.kind == "claim" and not one.name.endswith("/launch")]
    if calls or claimed:
        named = " ".join(f"--call {one.name}={one.id}" for one in calls or claimed)
        lines.append(f"so it was submitted: --finding present {named}")
    else:
        lines.append("so nothing was called: --finding absent")
    return "; ".join(lines) if found else f"no app {intent.tags.get('app', '')}; {lines[-1]}"


async def existing(intent: Intent) -> list[Found]:
    """See `what_exists`."""
    workspace, _, environment = intent.target.partition("/")
    found = await workspace_name()
    if found != workspace:
        raise ConfigurationError(
            f"the workspace '{found}' is logged in, and '{workspace}' was asked",
            intent.submission_id,
            "switch with `modal profile activate`",
        )
    claims = await _claims(intent, environment)
    app = await _app(intent.tags["app"], environment)
    if app is None:
        return claims
    calls = [call for name in NAMES for call in await _calls(intent.tags["app"], name, environment)]
    return [app, *calls, *claims]


async def _app(name: str, environment: str) -> Found | None:
    try:
        async with asking(f"the app '{name}'"):
            app = await modal.App.lookup.aio(name, environment_name=environment)
            return Found("app", name, app.app_id or "")
    except InfrastructureError as error:
        return _absent(error)


async def _calls(app: str, name: str, environment: str) -> list[Found]:
    """The calls of one function; none, if the app has no such function."""
    try:
        async with asking(f"the calls of '{name}'"):
            function: Any = modal.Function.from_name(app, name, environment_name=environment)
            await function.hydrate.aio()
            client: Any = await modal.Client.from_env.aio()
            reply = await _fetch_calls.aio(client, function.object_id)
    except InfrastructureError as error:
        _absent(error)
        return []
    return [
        Found("call", name, call.function_call_id, _status(call.status))
        for call in reply.function_call_inputs
    ]


async def _fetch(client: Any, function_id: str) -> api_pb2.FunctionCallFetchResponse:
    """What `modal function calls` asks: the library has no public name for it."""
    tail = api_pb2.FunctionCallFetchRequest.Tail(count=CALLS_ASKED)
    request = api_pb2.FunctionCallFetchRequest(function_id=function_id, tail=tail)
    return await client._stub.FunctionCallFetch(request)


# A request is made in the loop of Modal's own thread.
_fetch_calls: Any = synchronize_api(_fetch)


async def _claims(intent: Intent, environment: str) -> list[Found]:
    try:
        async with asking("the claims"):
            claims = modal.Dict.from_name(intent.tags["claims"], environment_name=environment)
            keys = [claim_key(intent.submission_id, part) for part in PARTS]
            said = [(key, await claims.get.aio(key, None)) for key in keys]
    except InfrastructureError as error:
        _absent(error)
        return []
    return [Found("claim", key, str(value)) for key, value in said if value is not None]


def _status(number: int) -> str:
    name = api_pb2.FunctionCallInputStatus.Name(number)  # pyright: ignore[reportArgumentType]
    return name.removeprefix("FUNCTION_CALL_INPUT_STATUS_").lower()


def _absent(error: InfrastructureError) -> None:
    """Nothing, if that is what Modal says; else its refusal.

    Raises:
        InfrastructureError: it says something else.
    """
    if not isinstance(error.__cause__, NotFoundError):
        raise error
