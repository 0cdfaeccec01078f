"""What runs inside a container on Modal.

Invariants:
- A submission belongs to one call: a second one of the same submission does nothing.
- Modal restarts a preempted call on the same input: the run that its first start has begun
  is found in the volume and continued, never begun again.
- A campaign goes the way that it goes anywhere: a Ray head with tokens, a job through
  `rl.submit`.
- What a run has written is committed at intervals, when it is interrupted, and at its end.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rl.config import CampaignConfig
from rl.config_file import load_config
from rl.errors import EXIT_REFUSED, CampaignError, ConfigurationError
from rl.evidence.layout import CampaignDir
from rl.evidence.rows import Audit
from rl.evidence.summary import read_json
from rl.files import create_exclusive, write_bytes
from rl.modal_config import MAX_FUNCTION_S
from rl.provision.machine import Machine
from rl.provision.order import (
    CONFIG,
    GATES,
    OWN,
    SOURCES,
    STATE,
    Answer,
    Order,
    claim_key,
    read_order,
)
from sandboxes.gates import load_report, save_report

# Receipts of a head that ends with the container are of no use to the next one.
RECEIPTS: Final = OWN / "receipts"
END_MARGIN_S: Final = 240.0  # of a function's bound, kept for stopping and the last commit
JOIN_S: Final = 5.0  # for a commit that is under way when the run ends: another follows
GRACE_S: Final = 15.0  # a preempted container has half a minute; the rest is the last commit's


@dataclass
class Runtime:
    """What a container has: who calls it, its processes, its volumes.

    Attributes:
        call: id of the call that runs.
        claim: takes a submission for this call, and returns the id of the call that has it.
        commit: makes what is in the volumes durable.
        reload: shows what others have committed.
        tunnel: opens a tunnel to a port, and gives its address.
        machine: the processes.
        state: the state directory.
        sources: the program, and what was submitted with it.
        receipts: of the head that is started here.
    """

    call: str
    claim: Callable[[str], str]
    commit: Callable[[], None]
    reload: Callable[[], None]
    tunnel: Callable[[int], AbstractContextManager[str]]
    machine: Machine = field(default_factory=Machine)
    state: Path = STATE
    sources: Path = SOURCES
    receipts: Path = RECEIPTS

    def config(self) -> CampaignConfig:
        """The configuration that was submitted."""
        return load_config(self.sources / CONFIG)


def here(order: Order) -> Runtime:
    """The runtime of the call that runs in this container."""
    import modal

    config = load_config(SOURCES / CONFIG)
    if config.modal is None:
        raise ConfigurationError("has no [modal] table", str(SOURCES / CONFIG))
    call = modal.current_function_call_id() or ""
    claims = modal.Dict.from_name(order.claims, environment_name=order.environment)
    state, models = (
        modal.Volume.from_name(name, environment_name=config.modal.environment)
        for name in (config.modal.state_volume, config.modal.model_volume)
    )

    def commit() -> None:
        state.commit()
        models.commit()

    def claim(key: str) -> str:
        claims.put(key, call, skip_if_exists=True)
        return str(claims[key])

    @contextmanager
    def tunnel(port: int) -> Generator[str]:
        with modal.forward(port) as opened:
            yield opened.url

    return Runtime(call, claim, commit, state.reload, tunnel)


def train_campaign(text: str, runtime: Runtime | None = None, *, whole: bool = False) -> str:
    """Train a campaign as a job of a head of its own; begin or continue it.

    Args:
        text: the order.
        runtime: another than this container's, for tests.
        whole: evaluate and report, too.
    """
    return _answering(text, "train", runtime, lambda order, own: _train(order, own, whole=whole))


def train_on_cluster(
    text: str, runtime: Runtime | None = None, place: tuple[int, list[str]] | None = None
) -> str:
    """The same on several machines; this is called in each of them.

    Args:
        text: the order.
        runtime: another than this container's, for tests.
        place: which of the machines this is, and the addresses of all.
    """
    rank, hosts = place or _place()
    if rank == 0:
        return _answering(text, "train", runtime, lambda order, own: _train(order, own, hosts))
    machine = Machine() if runtime is None else runtime.machine
    try:
        machine.join(hosts[0], MAX_FUNCTION_S)
    finally:
        machine.stop()
    return Answer(ending="done", exit_code=0).model_dump_json()


def _place() -> tuple[int, list[str]]:
    import modal

    cluster = modal.Cluster.from_context()
    return cluster.container_rank(), cluster.container_ips("ipv4")


def evaluate_shard(text: str, shard: int, shards: int, runtime: Runtime | None = None) -> str:
    """Evaluate one shard of a campaign's held-out tasks, in a run of its own."""

    def evaluate(order: Order, own: Runtime) -> Answer:
        run_id = shard_run(order.run_id, shard)
        directory = CampaignDir(own.state / "heldout" / run_id)
        resumed = _begun(directory.root)
        if _is_clean(directory):
            return Answer(ending="done", exit_code=0, resumed=True, note="was evaluated before")
        what = (
            ["--resume", run_id]
            if resumed
            else [order.run_id, "--shard", f"{shard}/{shards}", "--run-id", run_id]
        )
        command = [sys.executable, "-m", "rl.heldout", *what, "--state", str(own.state)]
        return _supervised(own, command, (), resumed)

    return _answering(text, f"heldout/{shard}", runtime, evaluate)


def prepare(text: str, runtime: Runtime | None = None) -> str:
    """Bring model and task packages into the volumes, after proving that they can be used."""
    from rl.prepare import prepare_model, prepare_tasks

    def bring(_: Order, own: Runtime) -> Answer:
        config = own.config()
        prove_volume(own.state)
        model = prepare_model(config.model, own.state)
        tasks = prepare_tasks(config.tasks, own.state)
        own.commit()
        found = f"{model.name}, {len(tasks.train)} training and {len(tasks.heldout)} held-out tasks"
        return Answer(ending="done", exit_code=0, note=found)

    return _answering(text, "", runtime, bring)


def prove_volume(state: Path) -> None:
    """Prove that a directory can hold evidence: exclusive links, renames, locks.

    Raises:
        InfrastructureError: it can't.
    """
    probe = state / ".probe"
    probe.unlink(missing_ok=True)
    create_exclusive(probe, b"first")
    write_bytes(probe, b"second")
    probe.unlink()


def shard_run(run_id: str, shard: int) -> str:
    """The name of a shard's run."""
    return f"{run_id}-shard{shard}"


def _train(order: Order, own: Runtime, hosts: Sequence[str] = (), *, whole: bool = False) -> Answer:
    """Train as a job of a head in this container, or in the first of `hosts`."""
    config = own.config()
    _keep_gates(own.sources, own.state)
    resumed = _begun(own.state / "campaigns" / order.run_id)
    what = (
        ["--resume", order.run_id]
        if resumed
        else ["--config", str(own.sources / CONFIG), "--run-id", order.run_id]
    )
    try:
        own.machine.start_head(hosts[0] if hosts else None)
        if len(hosts) > 1:
            own.machine.await_nodes(len(hosts))
    except BaseException:
        own.machine.stop()
        raise
    submit = [sys.executable, "-m", "rl.submit", "--address", own.machine.head.job_server]
    where = ["--state", str(own.state), "--receipts", str(own.receipts)]
    part = [] if whole else ["--train-only"]
    with _dashboard(own, config):
        stop = [*submit, "--stop", order.run_id, *where]
        return _supervised(own, [*submit, *what, *where, *part], stop, resumed)


def _keep_gates(sources: Path, state: Path) -> None:
    """Add what the launcher has proven of tasks to what is known here."""
    path = state / "gates" / "report.json"
    known, told = load_report(path), load_report(sources / GATES)
    known.results.update(told.results)
    save_report(known, path)


def _is_clean(directory: CampaignDir) -> bool:
    """Whether an evaluation has ended, and its audit has no findings."""
    result = read_json(directory.audit, Audit)
    return result is not None and not result.findings and directory.summary.is_file()


def _answering(
    text: str,
    part: str,
    runtime: Runtime | None,
    body: Callable[[Order, Runtime], Answer],
) -> str:
    """Read the order, take the submission for this call, and answer in any case.

    Args:
        text: the order.
        part: of the submission; empty: nobody else can have it.
        runtime: another than this container's, for tests.
        body: what is done.
    """
    try:
        order = read_order(text)
        own = here(order) if runtime is None else runtime
        owner = own.claim(claim_key(order.submission_id, part)) if part else own.call
        if owner != own.call:
            note = f"{order.submission_id} belongs to the call {owner}"
            answer = Answer(ending="taken", exit_code=EXIT_REFUSED, owner=owner, note=note)
        else:
            answer = body(order, own)
    except CampaignError as error:
        answer = Answer(ending="failed", exit_code=EXIT_REFUSED, note=str(error))
    print(f"container: {answer.ending}, exit code {answer.exit_code} {answer.note}", flush=True)
    return answer.model_dump_json()


def _supervised(own: Runtime, command: Sequence[str], stop: Sequence[str], resumed: bool) -> Answer:
    """Run a command; commit beside it; stop it in order when this call is interrupted."""
    config = own.config()
    limit = (config.limits.function_bound_s or config.limits.watchdog_s) - END_MARGIN_S
    every = config.modal.commit_s if config.modal else limit
    try:
        with _committing(own, every):
            code = own.machine.run(command, limit)
    except BaseException:  # preemption and cancellation are no Exceptions
        _try_commit(own)
        if stop:
            with contextlib.suppress(CampaignError):  # the machine is stopped next in any case
                own.machine.run(stop, GRACE_S)
        raise
    finally:
        own.machine.stop()
        own.commit()
    if code == 0:
        return Answer(ending="done", exit_code=0, resumed=resumed)
    note = "its last lines say why; what it has written is in the volume"
    return Answer(ending="failed", exit_code=code, resumed=resumed, note=note)


@contextmanager
def _committing(own: Runtime, every_s: float) -> Generator[None]:
    """Commit the volume at intervals; a failure is told, and the last commit's is raised."""
    ended = threading.Event()

    def commit() -> None:
        while not ended.wait(every_s):
            _try_commit(own)

    thread = threading.Thread(target=commit, name="commits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_S)


def _try_commit(own: Runtime) -> None:
    """Commit; a failure is told, since a later commit may do and the last one's is raised."""
    begun = time.monotonic()
    try:
        own.commit()
    except Exception as error:  # noqa: BLE001 -- of Modal's client
        print(f"container: a commit failed: {error!r}", file=sys.stderr, flush=True)
    else:
        print(f"container: committed in {time.monotonic() - begun:.1f} s", flush=True)


def _dashboard(own: Runtime, config: CampaignConfig) -> AbstractContextManager[Any]:
    """A tunnel to Ray's dashboard, if it is asked for; the dashboard wants the token."""
    if config.modal is None or not config.modal.dashboard:
        return nullcontext()
    return _told(own)


@contextmanager
def _told(own: Runtime) -> Generator[None]:
    with own.tunnel(own.machine.head.dashboard_port) as address:
        print(f"container: Ray's dashboard: {address} (it wants the cluster's token)", flush=True)
        yield


def _begun(directory: Path) -> bool:
    """Whether a run is to be continued; one that froze nothing is removed."""
    if (directory / "frozen.json").exists():
        return True
    if directory.exists():
        shutil.rmtree(directory)
    return False
