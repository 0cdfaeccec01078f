"""Connecting to a Ray cluster, or starting one here.

Invariants:
- Tokens are used unless the person has switched them off.
- What keeps a connection from being made is said once, by its cause: nobody listens, the
  token is refused, the head is silent.
- A cluster that is started here lives as long as the thread that has started it, which is
  the event loop's, and ends in order with `ray.shutdown`.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from actors.calls import in_daemon, in_thread
from actors.ray_auth import MODE_VARIABLE, REFUSED_REMEDY, use_tokens
from actors.ray_listening import on_loopback
from rl.errors import ConfigurationError, DeadlineExceeded, InfrastructureError

RAYLET_START_S = 180
CONNECT_S = 60.0  # Ray itself gives up after 20 s, if it is answered at all
LISTEN_S = 10.0
_REFUSED = ("InvalidAuthToken", "Unauthenticated")
_ASK_WITHOUT_TOKEN = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_CHECK = "check the address with `ray status`, or unset RAY_ADDRESS to run on this machine"


async def connect(address: str | None, namespace: str, dashboard: bool = True) -> str:
    """Connect to a Ray cluster, or start one here; returns where the dashboard is.

    Args:
        address: of an existing cluster; None takes RAY_ADDRESS, or starts one.
        namespace: the campaign's run id.
        dashboard: whether a cluster that is started here has a dashboard.

    Raises:
        ConfigurationError: the cluster does not take our token, or takes anybody.
        InfrastructureError: the cluster can't be reached or started.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        # A Ray that is starting must be there before it can be stopped: given up midway, it
        # would end with its thread, and the interpreter wait for it at its own end.
        return await in_thread(RAYLET_START_S, lambda: start_here(namespace, dashboard))
    use_tokens()
    _require_listening(address)
    try:
        shown = await in_daemon(CONNECT_S, lambda: _join(address, namespace))
        await in_daemon(CONNECT_S, lambda: _require_tokens(address))
    except TimeoutError:
        raise DeadlineExceeded(
            f"the head has not answered within {CONNECT_S:g} s", address, _CHECK
        ) from None
    return shown


def start_here(namespace: str, dashboard: bool) -> str:
    """Start a cluster of this machine, on the loopback address; it ends with the calling thread.

    Raises:
        InfrastructureError: it can't be started.
    """
    use_tokens()
    # A busy machine takes longer than Ray's own 30 s to start its daemon.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(RAYLET_START_S))
    with on_loopback():
        return _init({"address": "local", "include_dashboard": dashboard}, namespace)


def _join(address: str, namespace: str) -> str:
    """Connect to an existing cluster."""
    with _heard() as heard:
        try:
            return _init({"address": address}, namespace)
        except InfrastructureError as error:
            failure = error
    if any(sign in heard.text + str(failure) for sign in _REFUSED):
        raise ConfigurationError(
            "the cluster does not take this token", address, REFUSED_REMEDY
        ) from failure
    raise failure


def _init(options: dict[str, Any], namespace: str) -> str:
    import ray
    from ray.exceptions import AuthenticationError

    try:
        context = ray.init(
            **options,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, AuthenticationError) as error:
        raise InfrastructureError(
            f"Ray could not be reached or started: {str(error).splitlines()[0]}",
            options["address"],
            _CHECK,
        ) from error
    return context.dashboard_url or ""


def _require_tokens(address: str) -> None:
    """Refuse a cluster that takes anybody while this process takes tokens only.

    Such a head's calls to this process would be turned away, and it would take every
    actor for forgotten.

    Raises:
        ConfigurationError: it answers who has no token.
    """
    import grpc
    import ray

    if os.environ.get(MODE_VARIABLE, "").lower() != "token":
        return
    target = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(target) as channel:
        ask = channel.unary_unary(_ASK_WITHOUT_TOKEN)
        try:
            ask(b"", timeout=LISTEN_S)
        except grpc.RpcError:
            return  # turned away, as it should be
    ray.shutdown()
    raise ConfigurationError(
        "the cluster takes whoever can reach it, and this process takes tokens only",
        address,
        "start the cluster with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here as well",
    )


def _require_listening(address: str) -> None:
    """Refuse an address where nobody listens; Ray would try for a minute.

    Raises:
        InfrastructureError: nobody does.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # such as "auto": Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_S).close()
    except OSError as error:
        raise InfrastructureError(
            f"no Ray head answers there: {error.strerror or error}", address, _CHECK
        ) from None


@dataclass
class _Heard:
    text: str = ""


@contextmanager
def _heard() -> Generator[_Heard]:
    """What is printed on standard error meanwhile: Ray's own code says there why it fails."""
    heard = _Heard()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield heard
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            heard.text = file.read().decode(errors="replace")
