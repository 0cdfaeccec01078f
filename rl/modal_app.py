"""What `modal run rl/modal_app.py::COMMAND` knows: the commands of `rl.rent`, options included.

The app that Modal makes of this file is empty, costs nothing and ends with the command.
"""

from __future__ import annotations

from typing import Final

import modal

from rl.errors import CampaignError, report_error
from rl.rent import main

app: Final = modal.App("terminal-rl-launcher", include_source=False)


@app.local_entrypoint()
def prepare_account(*arguments: str) -> None:
    """Make the volumes and fill them; options as `python -m rl.rent prepare_account`."""
    _entered("prepare_account", arguments)


@app.local_entrypoint()
def train(*arguments: str) -> None:
    """The short run; options as `python -m rl.rent train`."""
    _entered("train", arguments)


@app.local_entrypoint()
def final_train(*arguments: str) -> None:
    """The campaign; options as `python -m rl.rent final_train`."""
    _entered("final_train", arguments)


@app.local_entrypoint()
def follow(*arguments: str) -> None:
    """Follow a campaign; options as `python -m rl.rent follow`."""
    _entered("follow", arguments)


@app.local_entrypoint()
def stop(*arguments: str) -> None:
    """Stop a campaign; options as `python -m rl.rent stop`."""
    _entered("stop", arguments)


def _entered(command: str, arguments: tuple[str, ...]) -> None:
    """Run a command under `modal run`, which ends with its exit code."""
    try:
        code = main([command, *arguments])
    except CampaignError as error:
        code = report_error(error)
    if code:
        raise SystemExit(code)
