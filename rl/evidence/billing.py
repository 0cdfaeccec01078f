"""What a run cost: estimated from its receipts, and as the provider reports it.

Invariants:
- An estimate is arithmetic on what the run's evidence shows and a dated price table;
  it is made again at any time with the same result.
- A provider's report is kept as it came, row by row, and never dropped: a later fetch
  adds one.
- Estimate and report stand side by side; neither corrects the other.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Final

from pydantic import Field, JsonValue, ValidationError, field_validator

from rl.errors import EvidenceError, first_problem
from rl.evidence.prices import MachinePrices, Prices
from rl.evidence.usage import Held, Usage
from rl.files import read_errors
from rl.records import Record

BILLING: Final = "billing"  # folder of a state directory
CAMPAIGN_TAG: Final = "campaign"  # sandboxes carry their run's name under it
MODAL: Final = "modal"
MIB_PER_GIB: Final = 1024.0


class BillingLine(Record):
    """One item of an estimate."""

    item: str
    quantity: float = Field(ge=0)
    unit: str = Field(description="of the quantity, such as GPU s")
    unit_price: float = Field(ge=0)
    amount: float = Field(ge=0, description="quantity times unit price")
    detail: str = Field(default="", description="what the quantity is made of")


class Estimate(Record):
    """What a run should have cost by its own receipts."""

    currency: str
    prices_as_of: date = Field(description="the day of the price table")
    prices_source: str = Field(description="where its prices are from")
    begun: float = Field(description="unix time, s")
    ended: float = Field(description="unix time of the last thing known of the run, s")
    lines: list[BillingLine]
    notes: list[str] = Field(description="what is not in it, or is uncertain")

    @property
    def total(self) -> float:
        """All lines together."""
        return sum(line.amount for line in self.lines)


class ProviderReport(Record):
    """What a provider says that something cost."""

    provider: str = Field(description="modal")
    workspace: str = Field(description="the account that was asked")
    fetched_at: float = Field(description="unix time, s; a provider's numbers may still grow")
    start: float = Field(description="unix time, s, inclusive")
    end: float = Field(description="unix time, s, exclusive")
    resolution: str = Field(description="h: a row is an object's cost in one hour")
    tag: str = Field(description=f"the value of the tag '{CAMPAIGN_TAG}' of the run's sandboxes")
    app: str = Field(description="what the names of this project's apps begin with")
    rows: list[dict[str, JsonValue]] = Field(description="as they came; costs are decimal texts")

    @field_validator("rows")
    @classmethod
    def _costs_are_numbers(cls, rows: list[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
        for row in rows:
            if not _cost(row.get("cost")).is_finite():
                raise ValueError(f"a row without a cost: {row}")
        return rows

    @property
    def tagged(self) -> list[dict[str, JsonValue]]:
        """Rows that carry the run's tag."""
        return [row for row in self.rows if _tags(row).get(CAMPAIGN_TAG) == self.tag]

    @property
    def of_apps(self) -> list[dict[str, JsonValue]]:
        """Rows of this project's apps; other runs of the same hours are among them."""
        return [row for row in self.rows if str(row.get("description", "")).startswith(self.app)]

    @property
    def total(self) -> float:
        """Of the run, as closely as the report tells it apart."""
        return cost(self.tagged or self.of_apps)

    @property
    def by_resource(self) -> dict[str, float]:
        """The same by what it was for."""
        sums: defaultdict[str, Decimal] = defaultdict(Decimal)
        for row in self.tagged or self.of_apps:
            parts = row.get("cost_by_resource")
            for name, amount in (parts if isinstance(parts, dict) else {}).items():
                sums[name] += _cost(amount)
        return {name: float(amount) for name, amount in sorted(sums.items())}


class Billing(Record):
    """Both, of one run: state/billing/RUN.json."""

    kind: str = Field(description="the run's folder: campaigns, heldout, screens, probes")
    run_id: str
    estimate: Estimate
    reports: list[ProviderReport] = Field(
        default_factory=list[ProviderReport], description="oldest first"
    )

    @property
    def difference(self) -> float | None:
        """The newest report minus the estimate; None without a report."""
        return self.reports[-1].total - self.estimate.total if self.reports else None


def estimate(usage: Usage, prices: Prices, gpu: str | None = None, where: str = "") -> Estimate:
    """What `usage` costs by `prices`.

    Args:
        usage: what a run used.
        prices: the table.
        gpu: which GPU the run's are; None takes the table's own choice.
        where: the table's file, for messages.

    Raises:
        ConfigurationError: the GPU has no price.
    """
    lines: list[BillingLine] = []
    notes = list(usage.notes)
    if usage.gpus:
        name, price = prices.gpu(gpu, where)
        for held in usage.held:
            lines += _held_lines(held, name, price, prices.modal.container)
        notes.append(
            f"GPUs are priced as rented {name}; memory of the actors is not in it, for the "
            "configuration asks for none"
        )
    else:
        notes.append("no GPU was asked for: the run's own machines are taken to cost nothing")
    if usage.sandbox.provider == MODAL:
        lines += _sandbox_lines(usage, prices.modal.sandbox)
        notes.append(
            "sandboxes are priced by what they ask for; Modal charges for what they use "
            "where that is more"
        )
    else:
        notes.append(f"sandboxes cost nothing: {usage.sandbox.provider}, on the run's own machines")
    return Estimate(
        currency=prices.currency,
        prices_as_of=prices.as_of,
        prices_source=prices.source,
        begun=usage.begun,
        ended=usage.ended,
        lines=lines,
        notes=notes,
    )


def read_billing(path: Path) -> Billing | None:
    """The record at `path`; None if there is none yet.

    Raises:
        EvidenceError: it can't be read, or is no record of ours.
    """
    with read_errors(path):
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        return Billing.model_validate_json(content)
    except ValidationError as error:
        raise EvidenceError(
            f"not a valid billing record: {first_problem(error)}",
            str(path),
            "restore it from an archive, or move it away: the provider's reports in it are lost",
        ) from None


def cost(rows: list[dict[str, JsonValue]]) -> float:
    """The cost of some rows of a provider's report."""
    return float(sum((_cost(row.get("cost")) for row in rows), Decimal()))


def _held_lines(held: Held, gpu: str, price: float, machine: MachinePrices) -> list[BillingLine]:
    lines: list[BillingLine] = []
    if held.gpus:
        detail = f"{held.gpus:g} x {held.seconds:.0f} s"
        lines.append(_line(f"{held.who}: {gpu}", held.gpus * held.seconds, "GPU s", price, detail))
    if held.cpus:
        detail = f"{held.cpus:g} x {held.seconds:.0f} s"
        quantity = held.cpus * held.seconds
        lines.append(_line(f"{held.who}: CPU", quantity, "core s", machine.core_second, detail))
    return lines


def _sandbox_lines(usage: Usage, prices: MachinePrices) -> list[BillingLine]:
    lines: list[BillingLine] = []
    cores, gib = usage.sandbox.cpus, usage.sandbox.memory_mb / MIB_PER_GIB
    for group in usage.sandboxes:
        detail = f"{group.number} sandboxes, {group.seconds:.0f} s in all"
        for what, unit, size, price in (
            ("CPU", "core s", cores, prices.core_second),
            ("memory", "GiB s", gib, prices.gib_second),
        ):
            item = f"sandboxes of {group.purpose}: {what}"
            lines.append(_line(item, group.seconds * size, unit, price, f"{detail}, {size:g} each"))
    return lines


def _line(item: str, quantity: float, unit: str, price: float, detail: str) -> BillingLine:
    return BillingLine(
        item=item,
        quantity=quantity,
        unit=unit,
        unit_price=price,
        amount=quantity * price,
        detail=detail,
    )


def _tags(row: dict[str, JsonValue]) -> dict[str, JsonValue]:
    tags = row.get("tags")
    return tags if isinstance(tags, dict) else {}


def _cost(value: object) -> Decimal:
    """A decimal text as a number; NaN if it is none."""
    try:
        return Decimal(value) if isinstance(value, str) else Decimal("NaN")
    except InvalidOperation:
        return Decimal("NaN")
