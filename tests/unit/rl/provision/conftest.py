"""A Modal of our own for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.modal_apps import ModalApps
from tests.support.modal_rented import account, modal_of_our_own
from tests.support.modal_server import ModalServer


@pytest.fixture(scope="module")
def server() -> Iterator[ModalServer]:
    with modal_of_our_own() as server:
        yield server


@pytest.fixture
def apps(server: ModalServer) -> ModalApps:
    """An account in which everything is prepared and nothing runs."""
    return account(server)
