"""What comes after training: the held-out evaluation on workers, then the report.

Invariants:
- Nothing is evaluated before the training's call has ended well.
- Each shard is evaluated by one call, also if this one is preempted in between: calls are
  noted when they are made, and a worker's claim tells of one that was not noted.
- What training's container has evaluated and reported itself is not evaluated again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rl.errors import (
    EXIT_REFUSED,
    CampaignError,
    ConfigurationError,
    DeadlineExceeded,
    InfrastructureError,
)
from rl.provision.container import Runtime, here, shard_run
from rl.provision.order import Answer, Order, claim_key, read_answer, read_order

REPORT_S: Final = 1_500.0  # verifying a checkpoint and writing the report, within the margin
"""See `rl.provision.functions.WAIT_MARGIN_S`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of this app.

    Attributes:
        wait: the answer of a call, after at most so many seconds.
        spawn: calls the worker of a shard; the call's id.
        noted: notes a call under a key, and returns the one that is noted.
        find: the call that is noted under a key, or "".
    """

    wait: Callable[[str, float], Answer]
    spawn: Callable[[str, int, int], str]
    noted: Callable[[str, str], str]
    find: Callable[[str], str]


def continue_campaign(
    text: str,
    training: str,
    shards: int,
    runtime: Runtime | None = None,
    calls: Calls | None = None,
) -> str:
    """Wait for the call `training`, have the shards evaluated, and report."""
    try:
        order = read_order(text)
        own = here(order) if runtime is None else runtime
        answer = _continue(order, training, shards, own, calls or _modal_calls(order))
    except CampaignError as error:
        answer = Answer(ending="failed", exit_code=EXIT_REFUSED, note=str(error))
    print(f"continuation: {answer.ending}, exit code {answer.exit_code} {answer.note}", flush=True)
    return answer.model_dump_json()


def _continue(order: Order, training: str, shards: int, own: Runtime, calls: Calls) -> Answer:
    owner = own.claim(claim_key(order.submission_id, "continue"))
    if owner != own.call:
        return Answer(ending="taken", exit_code=EXIT_REFUSED, owner=owner)
    bound = own.config().limits.function_bound_s
    if bound is None:
        raise ConfigurationError("must be given", "limits.function_bound_s")
    trained = _followed(calls, training, bound)
    if trained.ending != "done":
        note = f"training has ended otherwise ({trained.note}): nothing is evaluated"
        return Answer(ending="failed", exit_code=trained.exit_code or EXIT_REFUSED, note=note)
    own.reload()
    if (own.state / "campaigns" / order.run_id / "summary.json").exists():
        return Answer(ending="done", exit_code=0, note="training's container has reported")
    workers = [_worker(order, shard, shards, calls) for shard in range(1, shards + 1)]
    limit = time.monotonic() + bound
    for call in workers:
        answer = _followed(calls, call, max(0.0, limit - time.monotonic()))
        if answer.ending != "done":
            raise InfrastructureError(
                f"a worker ended with exit code {answer.exit_code}: {answer.note}",
                call,
                "see its log; then launch with --resume",
            )
    own.reload()
    command = [sys.executable, "-m", "rl.final", "--resume", order.run_id, "--no-dashboard"]
    command += ["--state", str(own.state)]
    for shard in range(1, shards + 1):
        command += ["--take-in", shard_run(order.run_id, shard)]
    code = own.machine.run(command, REPORT_S)
    own.commit()
    return Answer(ending="done" if code == 0 else "failed", exit_code=code)


def _worker(order: Order, shard: int, shards: int, calls: Calls) -> str:
    """The call of a shard's worker; it is made unless there is one."""
    key = claim_key(order.submission_id, f"worker/{shard}")
    found = calls.find(key) or calls.find(claim_key(order.submission_id, f"heldout/{shard}"))
    return found or calls.noted(key, calls.spawn(order.model_dump_json(), shard, shards))


def _followed(calls: Calls, call: str, limit_s: float) -> Answer:
    """The answer of a call, or of the one that it leaves the submission to."""
    answer = calls.wait(call, limit_s)
    return calls.wait(answer.owner, limit_s) if answer.ending == "taken" else answer


def _modal_calls(order: Order) -> Calls:
    import modal

    notes = modal.Dict.from_name(order.claims, environment_name=order.environment)
    worker: Any = modal.Function.from_name(
        order.app, "heldout_worker", environment_name=order.environment
    )

    def wait(call: str, limit_s: float) -> Answer:
        try:
            return read_answer(modal.FunctionCall.from_id(call).get(timeout=limit_s), call)
        except TimeoutError:
            raise DeadlineExceeded(f"has not ended within {limit_s:g} s", call) from None
        except modal.exception.Error as error:
            raise InfrastructureError(f"has failed: {error!r}", call, "see its log") from error

    def spawn(text: str, shard: int, shards: int) -> str:
        return str(worker.spawn(text, shard, shards).object_id)

    def noted(key: str, call: str) -> str:
        notes.put(key, call, skip_if_exists=True)
        return str(notes[key])

    def find(key: str) -> str:
        return str(notes.get(key, ""))

    return Calls(wait, spawn, noted, find)
