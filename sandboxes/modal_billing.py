"""Ask Modal what a run cost.

Invariants:
- Rows are kept as Modal sends them, costs as its decimal texts; which of them are the
  run's is for `rl.evidence.billing` to say.
- Whole hours are asked for that hold the run: Modal leaves an hour out of its report
  that has not ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime
from typing import Final

import modal
from pydantic import JsonValue

from rl.errors import ConfigurationError, InfrastructureError
from rl.evidence.billing import MODAL, ProviderReport
from sandboxes.modal_sandbox import APP_NAME, label

APP_PREFIX: Final = APP_NAME.removesuffix("-sandboxes")
HOUR_S: Final = 3600
RESOLUTION: Final = "h"
TIMEOUT_S: Final = 120.0
ALL_TAGS: Final = "*"


def fetch_report(run_id: str, begun: float, ended: float) -> ProviderReport:
    """Modal's report of the hours from `begun` to `ended`.

    Args:
        run_id: the run, by whose name its sandboxes are tagged.
        begun: unix time, s.
        ended: unix time, s.

    Raises:
        ConfigurationError: there is no token, or it may not see costs.
        InfrastructureError: Modal can't be reached, or does not answer in time.
    """
    start = math.floor(begun / HOUR_S) * HOUR_S
    end = max(math.ceil(ended / HOUR_S) * HOUR_S, start + HOUR_S)
    try:
        return asyncio.run(_fetch(run_id, start, end))
    except (modal.exception.AuthError, modal.exception.PermissionDeniedError) as error:
        raise ConfigurationError(
            f"does not let us see what was spent: {str(error).splitlines()[0]}",
            "Modal",
            "run `modal token new` with an account that may see the workspace's costs, or "
            "leave --fetch out: the estimate needs no account",
        ) from error
    except (modal.exception.Error, OSError, TimeoutError, ValueError, ArithmeticError) as error:
        what = f"its cost report can't be had: {error!r}"
        remedy = "check the connection and the token (modal token info), then run it again"
        raise InfrastructureError(what, "Modal", remedy) from error


async def _fetch(run_id: str, start: int, end: int) -> ProviderReport:
    async with asyncio.timeout(TIMEOUT_S):
        workspace = modal.Workspace.from_context()
        await workspace.hydrate.aio()
        items = await workspace.billing.report.aio(
            start=datetime.fromtimestamp(start, UTC),
            end=datetime.fromtimestamp(end, UTC),
            resolution=RESOLUTION,
            tag_names=[ALL_TAGS],
        )
    return ProviderReport(
        provider=MODAL,
        workspace=workspace.name or "",
        fetched_at=time.time(),
        start=start,
        end=end,
        resolution=RESOLUTION,
        tag=label(run_id),
        app=APP_PREFIX,
        rows=[_row(item) for item in items],
    )


def _row(item: modal.types.BillingReportItem) -> dict[str, JsonValue]:
    """A row with the names and texts of Modal's own record."""
    return {
        "object_id": item.object_id,
        "description": item.description,
        "environment_name": item.environment_name,
        "interval_start": item.interval_start.isoformat(),
        "cost": format(item.cost, "f"),
        "cost_by_resource": {
            name: format(cost, "f") for name, cost in item.cost_by_resource.items()
        },
        "tags": dict(item.tags),
    }
