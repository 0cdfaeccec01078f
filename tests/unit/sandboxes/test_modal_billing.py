"""What is asked of Modal about costs, on the wire, and what is made of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from rl.errors import ConfigurationError, InfrastructureError
from sandboxes.modal_billing import fetch_report
from sandboxes.modal_sandbox import APP_NAME, label
from tests.support.modal_server import WORKSPACE, ModalBooks, ModalServer

RUN = "final-20261129-1200"
BEGUN = datetime(2026, 11, 29, 12, 20, 5, tzinfo=UTC).timestamp()
ENDED = datetime(2026, 11, 29, 14, 0, 1, tzinfo=UTC).timestamp()


@pytest.fixture(scope="module")
def server() -> Iterator[ModalServer]:
    from modal import Client

    with pytest.MonkeyPatch.context() as environment, ModalServer() as server:
        environment.setenv("MODAL_SERVER_URL", server.url)
        environment.setenv("MODAL_TOKEN_ID", "ak-1")
        environment.setenv("MODAL_TOKEN_SECRET", "as-1")
        yield server
        Client.from_env().close()


@pytest.fixture
def books(server: ModalServer) -> ModalBooks:
    server.books = ModalBooks()
    return server.books


def item(cost: str, app: str = APP_NAME, hour: int = 12, **tags: str) -> Any:
    at = Timestamp()
    at.FromDatetime(datetime(2026, 11, 29, hour))
    return api_pb2.WorkspaceBillingReportItem(
        object_id="ap-1",
        description=app,
        environment_name="main",
        interval=at,
        cost=cost,
        tags=tags,
        cost_by_resource={"cpu": cost},
    )


def test_exactly_the_hours_of_the_run_are_asked_for(books: ModalBooks) -> None:
    fetch_report(RUN, BEGUN, ENDED)
    (asked,) = books.of("WorkspaceBillingReport")
    assert asked.start_timestamp.ToDatetime() == datetime(2026, 11, 29, 12)
    assert asked.end_timestamp.ToDatetime() == datetime(2026, 11, 29, 15)
    assert asked.resolution == "h"
    assert list(asked.tag_names) == ["*"]
    assert not asked.environment_ids and not asked.app_ids
    assert len(books.of("WorkspaceNameLookup")) == 1


def test_a_run_of_seconds_asks_for_one_hour(books: ModalBooks) -> None:
    at = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
    fetch_report(RUN, at, at)
    (asked,) = books.of("WorkspaceBillingReport")
    seconds = asked.end_timestamp.ToSeconds() - asked.start_timestamp.ToSeconds()
    assert seconds == 3600


def test_rows_are_kept_as_they_come(books: ModalBooks) -> None:
    books.costs = [item("0.000000012345678901234567", campaign=label(RUN))]
    report = fetch_report(RUN, BEGUN, ENDED)
    assert (report.provider, report.workspace, report.resolution) == ("modal", WORKSPACE, "h")
    assert report.rows == [
        {
            "object_id": "ap-1",
            "description": APP_NAME,
            "environment_name": "main",
            "interval_start": "2026-11-29T12:00:00+00:00",
            "cost": "0.000000012345678901234567",
            "cost_by_resource": {"cpu": "0.000000012345678901234567"},
            "tags": {"campaign": label(RUN)},
        }
    ]


def test_the_runs_rows_are_told_apart_by_its_tag(books: ModalBooks) -> None:
    books.costs = [
        item("1.25", campaign=label(RUN)),
        item("0.25", hour=13, campaign=label(RUN)),
        item("7", campaign="another"),
        item("100", app="something else"),
    ]
    report = fetch_report(RUN, BEGUN, ENDED)
    assert report.total == 1.5 and report.by_resource == {"cpu": 1.5}
    books.costs = books.costs[2:]
    assert fetch_report(RUN, BEGUN, ENDED).total == 7.0  # untagged: all of our apps


@pytest.mark.parametrize(
    ("status", "kind", "why"),
    [
        (Status.PERMISSION_DENIED, ConfigurationError, "does not let us see"),
        (Status.UNAUTHENTICATED, ConfigurationError, "does not let us see"),
        (Status.FAILED_PRECONDITION, InfrastructureError, "can't be had"),
    ],
)
def test_a_refusal_says_what_to_do(
    server: ModalServer,
    books: ModalBooks,
    monkeypatch: pytest.MonkeyPatch,
    status: Status,
    kind: type[Exception],
    why: str,
) -> None:
    def fail(_: Any) -> Any:
        raise GRPCError(status, "no")

    monkeypatch.setitem(server.answers, "WorkspaceBillingReport", fail)
    with pytest.raises(kind, match=why):
        fetch_report(RUN, BEGUN, ENDED)


def test_a_cost_that_is_no_number_is_refused(books: ModalBooks) -> None:
    books.costs = [item("much")]
    with pytest.raises(InfrastructureError, match="can't be had"):
        fetch_report(RUN, BEGUN, ENDED)


def test_without_a_token_there_is_one_clear_error(tmp_path: Path) -> None:
    """In a process of its own: Modal reads its configuration on import."""
    import os
    import subprocess
    import sys

    code = (
        "from rl.errors import CampaignError\n"
        "from sandboxes.modal_billing import fetch_report\n"
        "try: fetch_report('r', 0.0, 1.0)\n"
        "except CampaignError as error: print(type(error).__name__, error)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"HOME": str(tmp_path), "MODAL_CONFIG_PATH": str(tmp_path / "none.toml")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("ConfigurationError Modal: does not let us see what was spent")
    assert "modal token new" in done.stdout and "--fetch" in done.stdout
