"""A Modal of our own for the tests of what is rented: a server, an account, a configuration."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modal
import pytest

from rl.config import CampaignConfig
from rl.config_file import load_config
from tests.support.modal_apps import ModalApps
from tests.support.modal_server import WORKSPACE, ModalServer

ROOT = Path(__file__).resolve().parents[2]
TOKEN_ID, TOKEN_SECRET = "ak-canary-3b1f", "as-canary-77e0"


@contextmanager
def modal_of_our_own() -> Generator[ModalServer]:
    """A server that this process's Modal client talks to."""
    with pytest.MonkeyPatch.context() as patch, ModalServer() as server:
        patch.setenv("MODAL_SERVER_URL", server.url)
        patch.setenv("MODAL_TOKEN_ID", TOKEN_ID)
        patch.setenv("MODAL_TOKEN_SECRET", TOKEN_SECRET)
        patch.delenv("MODAL_PROFILE", raising=False)
        yield server
        modal.Client.from_env().close()


def account(server: ModalServer) -> ModalApps:
    """An account in which everything is prepared and nothing runs."""
    apps = ModalApps(server)
    apps.volumes = {"terminal-rl-state": "vo-1", "terminal-rl-models": "vo-2"}
    return apps


def configured(name: str = "final", **changes: Any) -> CampaignConfig:
    """A shipped configuration, with the workspace named and some keys replaced."""
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(ROOT / "configs" / f"{name}.toml", {"modal.workspace": WORKSPACE, **values})
