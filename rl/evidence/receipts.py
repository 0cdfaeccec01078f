"""The ledger of submissions: what may be submitted, and what was.

Invariants:
- An intent is created exclusively and synced before the provider is told anything: of any
  number of launchers exactly one gets it, and whoever comes later sees it whole.
- A receipt is written once, after the provider's answer, for the intent that it names.
- An intent that has neither receipt nor resolution is ambiguous: nothing more is submitted
  under its run until somebody has stated what the provider holds.
- While a launcher lives it holds a lock on its intent, which ends with its process: an
  ambiguous intent whose launcher lives is only under way.
- No file here holds a secret: a command line, tags and ids are all that is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from rl.errors import ConfigurationError, DeadlineExceeded, EvidenceError, first_problem
from rl.evidence.intents import Entry, Finding, Intent, Receipt, Resolution
from rl.files import create_exclusive, disk_errors, json_bytes, read_errors, sync_directory
from rl.records import Record

RECEIPTS_ROOT: Final = Path("state/receipts")
INTENT: Final = "intent.json"
RECEIPT: Final = "receipt.json"
RESOLUTION: Final = "resolution.json"
_LOCK_POLL_S = 0.05
# A reader looks whether the lock is free for microseconds; a launcher has it for longer.
_CLAIM_WAIT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True, slots=True)
class Ledger:
    """All intents and receipts of one state directory.

    Args:
        root: a directory for each run, and in it one for each submission.
    """

    root: Path = RECEIPTS_ROOT

    @contextmanager
    def claim(self, intent: Intent) -> Generator[Intent]:
        """Create the intent and hold its lock: the provider is told inside `with`.

        Raises:
            ConfigurationError: it is submitted already, or under way in another process.
            EvidenceError: it is ambiguous: its launcher ended before it had a receipt.
            InfrastructureError: the disk is full or can't be written.
        """
        self.require_settled(intent.run_id, other_than=intent.submission_id)
        folder = self._folder(intent.run_id, intent.submission_id)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent, self.root, self.root.parent):
                sync_directory(parent)
        path = self._intent_path(folder)
        with self._lock(folder, _CLAIM_WAIT_S, unless=path) as held:
            if held and not path.exists():
                create_exclusive(path, json_bytes(intent))
                yield intent
                return
        if path.exists():
            raise _taken(self._require(folder), self._hint(intent))
        raise DeadlineExceeded(
            f"another process has held its lock for {_CLAIM_WAIT_S:g} s without an intent",
            str(folder),
            "run it again",
        )

    @contextmanager
    def reclaim(self, entry: Entry) -> Generator[Intent]:
        """Take up an ambiguous submission whose provider knows its id, and take it only once.

        Asking such a provider again under the same id is safe: it has the submission, or
        gets it now.

        Raises:
            ConfigurationError: it is not ambiguous, or its launcher lives.
        """
        intent = entry.intent
        folder = self._folder(intent.run_id, intent.submission_id)
        with self._lock(folder, _CLAIM_WAIT_S) as held:
            if held and not (folder / RECEIPT).exists() and not (folder / RESOLUTION).exists():
                yield intent
                return
        raise _taken(self._require(folder), self._hint(intent))

    def record(self, intent: Intent, calls: Mapping[str, str]) -> Receipt:
        """Write the receipt of `intent`.

        Raises:
            EvidenceError: it has one already.
            InfrastructureError: the disk is full or can't be written.
        """
        folder = self._folder(intent.run_id, intent.submission_id)
        receipt = Receipt(
            intent_sha256=_sha256(self._intent_path(folder)),
            calls=dict(calls),
            created_at=time.time(),
        )
        create_exclusive(folder / RECEIPT, json_bytes(receipt))
        return receipt

    def resolve(
        self,
        run_id: str,
        submission_id: str,
        finding: Finding,
        reason: str,
        calls: Mapping[str, str] | None = None,
    ) -> Resolution:
        """State what the provider holds of an ambiguous submission.

        Raises:
            ConfigurationError: there is no such submission, its launcher lives, it is not
                ambiguous, or the finding is incomplete.
            InfrastructureError: the disk is full or can't be written.
        """
        entry = self.entry(run_id, submission_id)
        if not reason.strip() or (finding == "present") != bool(calls):
            raise ConfigurationError(
                "needs a reason, and the provider's call id exactly if something is there",
                submission_id,
                "say how it was found out, such as: --because 'modal app list shows none'",
            )
        if entry.held or entry.standing != "ambiguous":
            state = "being submitted by a process that lives" if entry.held else entry.standing
            raise ConfigurationError(
                f"is not ambiguous: it is {state}",
                submission_id,
                f"see `python -m rl.receipts inspect {run_id}`",
            )
        folder = self._folder(run_id, submission_id)
        resolution = Resolution(
            intent_sha256=_sha256(self._intent_path(folder)),
            finding=finding,
            calls=dict(calls or {}),
            reason=reason.strip(),
            created_at=time.time(),
        )
        create_exclusive(folder / RESOLUTION, json_bytes(resolution))
        return resolution

    def runs(self) -> list[str]:
        """Names of all runs that something was submitted for."""
        with read_errors(self.root):
            if not self.root.is_dir():
                return []
            return sorted(path.name for path in self.root.iterdir() if path.is_dir())

    def entries(self, run_id: str) -> list[Entry]:
        """The submissions of a run, in the order of their intents.

        Raises:
            EvidenceError: a file is damaged or belongs to another intent.
        """
        folder = self.root / _plain(run_id)
        with read_errors(folder):
            children = list(folder.iterdir()) if folder.is_dir() else []
        folders = [path for path in children if path.is_dir()]
        found = [entry for path in folders if (entry := self._read(path)) is not None]
        return sorted(found, key=lambda entry: entry.intent.created_at)

    def entry(self, run_id: str, submission_id: str) -> Entry:
        """One submission.

        Raises:
            ConfigurationError: there is none of this name.
            EvidenceError: a file is damaged or belongs to another intent.
        """
        return self._require(self._folder(run_id, submission_id))

    def await_settled(self, run_id: str, submission_id: str, limit_s: float) -> Entry:
        """The submission, once no living launcher is at it any more.

        Raises:
            ConfigurationError, EvidenceError: as for `entry`.
            DeadlineExceeded: another process has been at it for `limit_s`.
        """
        folder = self._folder(run_id, submission_id)
        with self._lock(folder, limit_s) as held:
            if not held:
                raise DeadlineExceeded(
                    f"another process has been submitting it for {limit_s:g} s",
                    submission_id,
                    f"see what it does: {self._require(folder).intent.pid} on "
                    f"{self._require(folder).intent.host}",
                )
        return self._require(folder)

    def require_settled(self, run_id: str, other_than: str = "") -> None:
        """Refuse to go on while a submission of the run is ambiguous.

        Raises:
            EvidenceError: one is; the remedy says how to find out and to unblock.
        """
        for entry in self.entries(run_id):
            if entry.standing == "ambiguous" and entry.intent.submission_id != other_than:
                raise _taken(entry, self._hint(entry.intent))

    def digest(self, intent: Intent) -> str:
        """sha256 of the intent's file: by it a provider's record names the intent."""
        return _sha256(self._intent_path(self._folder(intent.run_id, intent.submission_id)))

    def _hint(self, intent: Intent) -> str:
        where = "" if self.root == RECEIPTS_ROOT else f" --state {self.root.parent}"
        return f"python -m rl.receipts inspect {intent.run_id}{where}"

    def _folder(self, run_id: str, submission_id: str) -> Path:
        return self.root / _plain(run_id) / _plain(submission_id)

    @staticmethod
    def _intent_path(folder: Path) -> Path:
        return folder / INTENT

    def _require(self, folder: Path) -> Entry:
        entry = self._read(folder)
        if entry is None:
            known = ", ".join(e.intent.submission_id for e in self.entries(folder.parent.name))
            raise ConfigurationError(
                f"nothing was submitted under the name '{folder.name}'",
                str(folder.parent),
                f"there are: {known}" if known else "see `python -m rl.receipts ls`",
            )
        return entry

    def _read(self, folder: Path) -> Entry | None:
        """The submission in `folder`; None: its launcher ended before there was an intent."""
        path = self._intent_path(folder)
        intent = _load(path, Intent)
        if intent is None:
            return None
        receipt = _load(folder / RECEIPT, Receipt)
        resolution = _load(folder / RESOLUTION, Resolution)
        for of in (receipt, resolution):
            if of is not None and of.intent_sha256 != _sha256(path):
                raise EvidenceError("is of another intent", str(folder), "restore both files")
        with self._lock(folder, 0.0, shared=True) as free:
            return Entry(intent, receipt, resolution, held=not free)

    @contextmanager
    def _lock(
        self, folder: Path, limit_s: float, *, shared: bool = False, unless: Path | None = None
    ) -> Generator[bool]:
        """Hold the folder's lock, waiting `limit_s` at most; False: somebody else does.

        Args:
            folder: what is locked.
            limit_s: how long to wait for it, s.
            shared: with others who only look.
            unless: no longer than until this file is there.
        """
        with read_errors(folder):
            if not folder.is_dir():
                yield True
                return
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            limit = time.monotonic() + limit_s
            while not (held := _try_lock(descriptor, shared)) and time.monotonic() < limit:
                if unless is not None and unless.exists():
                    break
                time.sleep(_LOCK_POLL_S)
            yield held
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _taken(entry: Entry, hint: str) -> ConfigurationError | EvidenceError:
    """Why a submission can't be begun again, and what to do."""
    intent = entry.intent
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(intent.created_at))
    who = f"process {intent.pid} on {intent.host}"
    if entry.standing == "submitted":
        calls = ", ".join(f"{key} {value}" for key, value in entry.calls.items())
        return ConfigurationError(
            f"has a receipt already, of {since} ({calls})",
            intent.submission_id,
            f"inspect it with `{hint}`, or choose another --run-id",
        )
    if entry.held:
        return ConfigurationError(
            f"is being submitted since {since} by {who}", intent.submission_id, "wait for it"
        )
    if entry.standing == "absent":
        return ConfigurationError(
            f"was begun at {since} and found to have submitted nothing",
            intent.submission_id,
            "launch it again: the next attempt gets a name of its own",
        )
    return EvidenceError(
        f"was begun at {since} by {who}, which ended before it had an answer: "
        f"{intent.provider} may or may not run it",
        intent.submission_id,
        f"ask with `{hint}`, then state what you found with `python -m rl.receipts resolve`",
    )


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} can't be a run id",
            "run id",
            "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def _sha256(path: Path) -> str:
    with read_errors(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _load[R: Record](path: Path, record: type[R]) -> R | None:
    """The record in `path`, None if there is none.

    Raises:
        EvidenceError: it can't be read or is no valid record.
    """
    with read_errors(path):
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        return record.model_validate_json(content)
    except ValidationError as error:
        raise EvidenceError(
            f"not a valid record: {first_problem(error)}",
            str(path),
            "restore it from an archive",
        ) from None
