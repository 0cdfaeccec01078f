"""What `modal run rl/modal_app.py::NAME` knows: prepare_account, train, final_train, follow, stop.

The app here is empty, costs nothing and ends with the command.  What costs is an app of its
own for each submission (`rl.provision.build`), made after every guard has held
(`rl.provision.launch`).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import modal

from rl.config import CampaignConfig
from rl.config_file import load_config
from rl.errors import CampaignError, Interrupted, report_error
from rl.evidence.layout import new_run_id
from rl.evidence.receipts import Ledger
from rl.provision.following import follow as follow_entry
from rl.provision.following import newest
from rl.provision.following import stop as stop_entry
from rl.provision.functions import smoke_overrides
from rl.provision.launch import Request, launch
from rl.provision.launch import prepare_account as prepare
from rl.running import overrides

FINAL: Final = "configs/final.toml"
SMOKE: Final = "configs/smoke.toml"
STATE: Final = "state"

app = modal.App("terminal-rl-launcher", include_source=False)


@app.local_entrypoint()
def prepare_account(config: str = FINAL, replace: str = "") -> None:
    """Make the volumes and fill them with model and tasks: no GPU, no model call."""

    def run() -> int:
        print(f"modal: prepared: {prepare(_config(config, replace))}")
        return 0

    _command(run)


@app.local_entrypoint()
def train(
    config: str = SMOKE,
    replace: str = "",
    run_id: str = "",
    max_steps: int = 2,
    concurrency: int = 16,
    resume: str = "",
    state: str = STATE,
    detach: bool = False,
) -> None:
    """The short run on two GPUs: one or two updates, 16 or 32 episodes at a time."""

    def run() -> int:
        given = smoke_overrides(max_steps, concurrency)
        short = _config(config, replace, given)
        sets = [f"{key}={value}" for key, value in given.items()]
        origin = _origin(config, [*shlex.split(replace), *sets])
        name = resume or run_id or new_run_id(short.name)
        return _launch(Request("train", short, origin, name, bool(resume), Path(state)), detach)

    _command(run)


@app.local_entrypoint()
def final_train(
    config: str = FINAL,
    replace: str = "",
    run_id: str = "",
    resume: str = "",
    state: str = STATE,
    detach: bool = False,
) -> None:
    """The campaign: training, then the held-out evaluation and the report."""

    def run() -> int:
        whole = _config(config, replace)
        name = resume or run_id or new_run_id(whole.name)
        origin = _origin(config, shlex.split(replace))
        request = Request("final_train", whole, origin, name, bool(resume), Path(state))
        return _launch(request, detach)

    _command(run)


@app.local_entrypoint()
def follow(run_id: str, state: str = STATE) -> None:
    """Follow a submission; leave with Ctrl-C, it goes on."""
    _command(lambda: _follow(run_id, Path(state)))


@app.local_entrypoint()
def stop(run_id: str, state: str = STATE) -> None:
    """Cancel a submission's calls: they stop in order, and commit."""

    def run() -> int:
        stopped = stop_entry(newest(Ledger(Path(state) / "receipts"), run_id))
        print(f"modal: stopped: {', '.join(stopped) or 'nothing was running'}")
        return 0

    _command(run)


def _launch(request: Request, detach: bool) -> int:
    launch(request)
    if detach:
        print(f"modal: follow it with {_following(request.run_id)}", flush=True)
        return 0
    return _follow(request.run_id, request.state)


def _follow(run_id: str, state: Path) -> int:
    entry = newest(Ledger(state / "receipts"), run_id)
    try:
        return follow_entry(entry)
    except KeyboardInterrupt:
        raise Interrupted(
            "detached; the calls go on", run_id, f"follow them with {_following(run_id)}"
        ) from None


def _following(run_id: str) -> str:
    return f"modal run rl/modal_app.py::follow --run-id {run_id}"


def _config(path: str, replace: str, given: dict[str, Any] | None = None) -> CampaignConfig:
    """The configuration; `replace` holds KEY=VALUE, several as a shell takes them apart."""
    options = argparse.Namespace(set=shlex.split(replace), seed=None)
    return load_config(Path(path), overrides(options) | (given or {}))


def _origin(path: str, sets: list[str]) -> str:
    return shlex.join([path, *(part for text in sets for part in ("--set", text))])


def _command(run: Callable[[], int]) -> None:
    """Run, and end the command with its exit code; a refusal is one message."""
    try:
        code = run()
    except CampaignError as error:
        code = report_error(error)
    if code:
        raise SystemExit(code)
