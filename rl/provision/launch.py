"""Launch on Modal: guards, intent, deployment, calls, receipt.

Invariants:
- Nothing is made at Modal before every guard holds, and nothing is called before the intent
  is on disk.
- What failed before anything was called is known to be absent, and stands so in the ledger;
  what failed later is ambiguous, and blocks the run until somebody has looked.
- Of launchers on several machines one gets a submission: it is taken in a Dict at Modal.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import modal
from modal.exception import NotFoundError

from rl.config import CampaignConfig
from rl.errors import CampaignError, ConfigurationError, InfrastructureError
from rl.evidence.code_pin import CodePin, pin_code
from rl.evidence.intents import Entry, Intent, attempt_of, new_intent, submission_name
from rl.evidence.receipts import Ledger
from rl.files import write_bytes
from rl.guards import Guard, Launch, launch_guards, rehearsal_guard, require
from rl.prepare import prepare_tasks
from rl.provision.account import account_guards, asking, require_workspace
from rl.provision.build import Built, app_name, build, claims_name, volumes
from rl.provision.following import answered, calls_of
from rl.provision.functions import FunctionName, campaign_functions, functions, modal_of
from rl.provision.inquiry import what_exists
from rl.provision.order import GATES, Order, claim_key, read_answer
from rl.running import ROOT
from rl.submitting import stage
from sandboxes.modal_sandbox import label

BUILD_S: Final = 5_400.0  # the images are built at the first launch, vLLM and prime-rl too
CALL_S: Final = 120.0
TOKEN_BYTES: Final = 32  # as of Ray's own token


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asks for.

    Attributes:
        entry: train: the short run; final_train: the campaign.
        config: with whatever the command line has replaced.
        origin: the file that it was read from, and what was replaced, for remedies.
        run_id: the campaign.
        resume: whether it continues.
        state: the state directory of this machine.
    """

    entry: FunctionName
    config: CampaignConfig
    origin: str
    run_id: str
    resume: bool
    state: Path

    @property
    def ledger(self) -> Ledger:
        """Intents and receipts of this machine."""
        return Ledger(self.state / "receipts")

    @property
    def names(self) -> tuple[FunctionName, ...]:
        """The functions of the app."""
        return ("train",) if self.entry == "train" else campaign_functions(self.config)


def launch(request: Request) -> dict[str, str]:
    """Launch what is asked for; the ids of its calls.

    Raises:
        CampaignError: a guard refuses, or Modal does.
    """
    code = pin_code(ROOT)
    entries = request.ledger.entries(request.run_id)
    functions(request.config, request.names)
    for guard in require(_guards(request, code, entries)):
        print(f"modal: guard holds: {guard.name}: {guard.found}", flush=True)
    intent = _intent(request, code, entries)
    called: list[str] = []
    try:
        with request.ledger.claim(intent):
            calls = asyncio.run(_submit(request, intent, code, called))
            request.ledger.record(intent, calls)
    except (CampaignError, KeyboardInterrupt) as error:
        _settle(request.ledger, intent, called, error)
        raise
    return calls


def prepare_account(config: CampaignConfig) -> str:
    """Make the volumes and fill them, in a container without a GPU; what was found.

    Raises:
        CampaignError: a guard refuses, or Modal does.
    """
    for guard in require(account_guards(config, prepared=False)):
        print(f"modal: guard holds: {guard.name}: {guard.found}", flush=True)
    return asyncio.run(_prepare(config))


# ---- guards -----------------------------------------------------------------


def _guards(request: Request, code: CodePin, entries: Sequence[Entry]) -> list[Guard]:
    config = request.config
    account = account_guards(config, prepared=True)
    if request.resume:
        return [
            *account,
            Guard("the attempt before has ended", lambda: _ended(request, entries)),
            Guard("what was launched first", lambda: _same(request, code, entries)),
        ]
    tasks = prepare_tasks(config.tasks, request.state)
    what = Launch(
        config, request.origin, tasks.train, tasks.heldout, tasks.root, code, request.state
    )
    unused = Guard("no receipt or intent of this run id", lambda: _unused(request, entries))
    return [*account, *launch_guards(what), rehearsal_guard(what), unused]


def _unused(request: Request, entries: Sequence[Entry]) -> str:
    """That nothing exists under the run id: here, and at Modal."""
    request.ledger.require_settled(request.run_id)
    taken = [entry for entry in entries if entry.standing == "submitted"]
    if taken:
        raise ConfigurationError(
            f"run '{request.run_id}' was submitted before: {taken[-1].intent.submission_id}, "
            f"calls {', '.join(taken[-1].calls.values())}",
            str(request.ledger.root / request.run_id),
            f"follow it with `python -m rl.rent follow {request.run_id}`, "
            "continue it with --resume, or choose another --run-id",
        )
    name = app_name(request.config, _next_name(request, entries))
    if asyncio.run(_deployed(name, modal_of(request.config).environment)):
        raise ConfigurationError(
            f"there is an app '{name}' at Modal, of another machine's launch",
            request.run_id,
            "choose another --run-id",
        )
    return f"nothing was submitted as '{request.run_id}'"


def _ended(request: Request, entries: Sequence[Entry]) -> str:
    """That the newest attempt has no call any more that runs.

    Raises:
        ConfigurationError: there is no attempt, or it runs.
    """
    request.ledger.require_settled(request.run_id)
    submitted = [entry for entry in entries if entry.standing == "submitted"]
    if not submitted:
        raise ConfigurationError(
            f"nothing was submitted as '{request.run_id}'",
            str(request.ledger.root),
            "launch it without --resume",
        )
    newest = submitted[-1]
    # Workers are called by the continuation, so no receipt names them.
    found = [(one.id, one.name) for one in what_exists(newest.intent) if one.kind == "call"]
    told = [(call, name) for name, call in calls_of(newest).items()]
    for call, name in dict.fromkeys([*told, *found]):
        if not asyncio.run(answered(call)):
            raise ConfigurationError(
                f"its call {call} ({name}) has not ended",
                newest.intent.submission_id,
                f"follow it with `python -m rl.rent follow {request.run_id}`, "
                f"or stop it with `python -m rl.rent stop {request.run_id}`",
            )
    return newest.intent.submission_id


def _same(request: Request, code: CodePin, entries: Sequence[Entry]) -> str:
    """That configuration and commit are those of the first attempt.

    Raises:
        ConfigurationError: one is not; the container would refuse it, and be paid for.
    """
    if not entries:
        return "nothing"
    first = entries[0].intent
    for what, before, now in (
        ("configuration", first.config_digest, request.config.digest()),
        ("commit", str(first.commit), str(code.commit)),
    ):
        if before != now:
            raise ConfigurationError(
                f"the {what} is another one ({before[:12]} -> {now[:12]})",
                first.submission_id,
                "give the same --config, --set and --seed, from the same commit",
            )
    return f"configuration {first.config_digest[:12]} at commit {str(first.commit)[:12]}"


async def _deployed(name: str, environment: str) -> bool:
    try:
        async with asking(f"the app '{name}'"):
            await modal.App.lookup.aio(name, environment_name=environment)
    except InfrastructureError as error:
        if isinstance(error.__cause__, NotFoundError):
            return False
        raise
    return True


# ---- submitting -------------------------------------------------------------


def _next_name(request: Request, entries: Sequence[Entry]) -> str:
    attempts = [attempt_of(entry.intent.submission_id) for entry in entries]
    return submission_name(request.run_id, 1 + max(attempts, default=0))


def _intent(request: Request, code: CodePin, entries: Sequence[Entry]) -> Intent:
    table, name = modal_of(request.config), _next_name(request, entries)
    return new_intent(
        request.run_id,
        name,
        "modal",
        f"{table.workspace}/{table.environment}",
        request.names[0],
        ["python", "-m", "rl.rent", request.entry, "--run-id", request.run_id],
        {
            "app": app_name(request.config, name),
            "claims": claims_name(request.config),
            "campaign": label(request.run_id),
            "attempt": str(attempt_of(name)),
        },
        config_digest=request.config.digest(),
        commit=code.commit,
    )


async def _submit(
    request: Request, intent: Intent, code: CodePin, called: list[str]
) -> dict[str, str]:
    """Deploy the app and make its calls; `called` says which were tried."""
    config, table = request.config, modal_of(request.config)
    order = Order(
        run_id=intent.run_id,
        submission_id=intent.submission_id,
        intent_sha256=request.ledger.digest(intent),
        app=intent.tags["app"],
        claims=intent.tags["claims"],
        environment=table.environment,
    )
    # A guard has seen the right workspace; the credentials may have been changed since.
    await require_workspace(table.workspace)
    await _take(order)
    with tempfile.TemporaryDirectory(prefix="rl-modal-") as folder:
        built = await _deploy(request, order, code, Path(folder))
    text, training = order.model_dump_json(), request.names[0]
    calls = {"app": built.app.app_id or ""}
    calls[training] = await _call(built, training, called, text)
    if request.entry != "train":
        shards = config.heldout.shards
        rest = (text, calls[training], shards)
        calls["final_continue"] = await _call(built, "final_continue", called, *rest)
    return calls


async def _deploy(request: Request, order: Order, code: CodePin, folder: Path) -> Built:
    config = request.config
    stage(folder, config, code)
    gates = request.state / "gates" / "report.json"
    if gates.exists():
        write_bytes(folder / GATES, gates.read_bytes())
    tags = {"campaign": label(order.run_id), "attempt": str(attempt_of(order.submission_id))}
    token = secrets.token_hex(TOKEN_BYTES) if modal_of(config).nodes > 1 else ""
    built = build(config, order.app, tags, request.names, folder, token)
    print(f"modal: deploying {order.app} (the first time, images are built)", flush=True)
    async with asking(f"deploying {order.app}", BUILD_S):
        await built.app.deploy.aio(name=order.app, environment_name=order.environment)
    return built


async def _take(order: Order) -> None:
    """Take the submission among launchers of all machines.

    Raises:
        ConfigurationError: another one has it.
    """
    key = claim_key(order.submission_id, "launch")
    async with asking("the claims"):
        claims = modal.Dict.from_name(
            order.claims, environment_name=order.environment, create_if_missing=True
        )
        await claims.put.aio(key, order.intent_sha256, skip_if_exists=True)
        owner = str(await claims.get.aio(key))
    if owner != order.intent_sha256:
        raise ConfigurationError(
            f"another launcher has taken it, with the intent {owner[:12]}",
            order.submission_id,
            "choose another --run-id",
        )


async def _call(built: Built, name: FunctionName, called: list[str], *arguments: Any) -> str:
    called.append(name)
    function: Any = built.functions[name]
    async with asking(f"calling {name}", CALL_S):
        call = await function.spawn.aio(*arguments)
    print(f"modal: {name} is called: {call.object_id}", flush=True)
    return str(call.object_id)


def _settle(ledger: Ledger, intent: Intent, called: list[str], error: BaseException) -> None:
    """Write down what is known of a submission that has failed."""
    known = {entry.intent.submission_id: entry for entry in ledger.entries(intent.run_id)}
    entry = known.get(intent.submission_id)
    if entry is None or entry.intent != intent or entry.standing != "ambiguous":
        return
    if not called:
        reason = f"it ended before anything was called: {error!r}".splitlines()[0]
        ledger.resolve(intent.run_id, intent.submission_id, "absent", reason)
        return
    print(
        f"modal: whether {called[-1]} was called is not known. Ask Modal: "
        f"python -m rl.receipts inspect {intent.run_id}",
        flush=True,
    )


# ---- preparing --------------------------------------------------------------


async def _prepare(config: CampaignConfig) -> str:
    table = modal_of(config)
    await require_workspace(table.workspace)
    name = f"{table.app}-prepare"
    order = Order(
        run_id="prepare",
        submission_id="prepare",
        intent_sha256="",
        app=name,
        claims=claims_name(config),
        environment=table.environment,
    )
    async with asking("the volumes"):
        for volume in volumes(config, create=True).values():
            await volume.hydrate.aio()
    with tempfile.TemporaryDirectory(prefix="rl-modal-") as folder:
        stage(Path(folder), config, pin_code(ROOT))
        built = build(config, name, {"campaign": "prepare"}, ("prepare_account",), Path(folder))
        function: Any = built.functions["prepare_account"]
        async with (
            asking("preparing the account", BUILD_S + CALL_S),
            built.app.run(environment_name=table.environment),
        ):
            text = await function.remote.aio(order.model_dump_json())
    answer = read_answer(text, "prepare_account")
    if answer.ending != "done":
        raise InfrastructureError(answer.note, "prepare_account", "see its log at Modal")
    return answer.note
