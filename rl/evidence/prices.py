"""What rented machines cost: a dated table of list prices, read from one TOML file.

Invariant: an unknown key, a price that is no positive number, and a table without its
date or origin are refused; nothing is guessed.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Final

from pydantic import Field, model_validator

from rl.config_file import load_config
from rl.errors import ConfigurationError
from rl.values import PositiveAmount, Section, Text

DEFAULT: Final = Path("configs/billing/prices.toml")


class MachinePrices(Section):
    """Of CPU and memory."""

    core_second: PositiveAmount = Field(description="one physical core for one second")
    gib_second: PositiveAmount = Field(description="one GiB of memory for one second")


class ModalPrices(Section):
    """Modal's."""

    gpu: Text = Field(description="which GPU a run's are taken for, where nothing says it")
    gpus: dict[Text, PositiveAmount] = Field(description="one GPU for one second, by its name")
    container: MachinePrices = Field(description="of what runs beside the GPUs")
    sandbox: MachinePrices = Field(description="of sandboxes")

    @model_validator(mode="after")
    def _gpu_has_a_price(self) -> ModalPrices:
        if self.gpu not in self.gpus:
            raise ValueError(f"gpu = '{self.gpu}' has no price in gpus")
        return self


class Prices(Section):
    """The table."""

    as_of: date = Field(description="the day on which they were read")
    source: Text = Field(description="where")
    currency: Text = Field(description="of all of them, such as USD")
    modal: ModalPrices = Field(description="Modal's")

    def gpu(self, name: str | None, where: str) -> tuple[str, float]:
        """A GPU's name and price; None takes the table's own choice.

        Raises:
            ConfigurationError: it has no price.
        """
        name = name or self.modal.gpu
        if name not in self.modal.gpus:
            known = ", ".join(self.modal.gpus)
            raise ConfigurationError(
                f"no price for GPU '{name}'", where, f"add it to modal.gpus, or take one of {known}"
            )
        return name, self.modal.gpus[name]


def load_prices(path: Path) -> Prices:
    """Read the table at `path`.

    Raises:
        ConfigurationError: it is missing, or a key is unknown or has a wrong value.
    """
    try:
        return load_config(path, model=Prices)
    except ConfigurationError as error:
        remedy = "correct the file, or name another by --prices (docs/evidence.md describes it)"
        raise ConfigurationError(error.what, error.where, remedy) from None
