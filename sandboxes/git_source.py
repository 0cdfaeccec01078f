"""The files of one commit of a git repository, as they were committed.

Invariants:
- Nothing of the repository runs or converts: no hook, no filter (LFS, line ends),
  no submodule, no checkout.  Objects are fetched and their bytes are written out.
- A repository of the cache, and a folder of files, has its final name only when it
  is complete; of two processes that make it, both end up with the same one.
- What would not be the whole content is refused by name: a submodule, an LFS pointer.
- No wait is without end, and nobody is asked for a password.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rl.errors import ConfigurationError, DeadlineExceeded, InfrastructureError
from rl.files import disk_errors

FETCH_TIMEOUT_S = 900.0  # a large repository over a slow line
LOCAL_TIMEOUT_S = 120.0  # git on its own disk
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_POINTER_MAX_BYTES = 1024  # by LFS's own specification
SHOWN_NAMES = 5
TRANSPORTS = "file:git:http:https:ssh"
# Settings that would make a person's or a repository's own programs run.
_SETTINGS = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "fetch.recurseSubmodules=false"),
)
# Set inside a hook or a rebase, these would make git work on another repository.
_FOREIGN = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_SHALLOW_FILE",
    "GIT_CONFIG_PARAMETERS",
    "GIT_PREFIX",
)


@dataclass(frozen=True, slots=True)
class _Entry:
    mode: str
    kind: str
    object_id: str
    name: str


def fetch_files(url: str, commit: str, folder: str, cache: Path, target: Path) -> None:
    """Write the files below `folder` of `commit` into the new folder `target`.

    Args:
        url: of the repository; file, git, http, https or ssh.
        commit: the full commit hash.
        folder: within the repository; "." is all of it.
        cache: where fetched repositories are kept.
        target: its final name; nothing happens if it exists.

    Raises:
        ConfigurationError: no such commit or folder, or content that git does not hold.
        InfrastructureError: the repository can't be reached, or the disk is full.
    """
    if target.exists():
        return
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    repository = cache / f"{name}-{commit[:12]}"
    where = f"{url} at {commit}"
    if not repository.exists():
        with aside(repository) as temporary:
            _fetch(temporary, url, commit, where)
    if _git(repository, "cat-file", "-t", commit, where=where).strip() != b"commit":
        raise ConfigurationError("names no commit", where, "give the full hash of a commit")
    entries = list(_entries(repository, commit, folder, where))
    with aside(target) as temporary:
        _write(repository, entries, temporary, where)


def _fetch(repository: Path, url: str, commit: str, where: str) -> None:
    _git(repository, "init", "--quiet", "--bare", "--template=", ".", where=where)
    arguments = ("--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head")
    _git(repository, "fetch", *arguments, "--", url, commit, where=where, limit_s=FETCH_TIMEOUT_S)


def _entries(repository: Path, commit: str, folder: str, where: str) -> Iterator[_Entry]:
    """The entries below `folder`, by their names within it."""
    prefix = "" if folder == "." else f"{folder.strip('/')}/"
    paths = ["--", prefix] if prefix else []
    listing = _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit, *paths, where=where)
    lines = [line for line in listing.split(b"\0") if line]
    if not lines:
        raise ConfigurationError(
            f"has no folder '{folder}'", where, "correct source.folder in the task source"
        )
    submodules: list[str] = []
    for line in lines:
        described, _, raw = line.partition(b"\t")
        mode, kind, object_id = described.decode().split()
        name = os.fsdecode(raw)
        if kind == "commit":
            submodules.append(name)
        elif not _is_safe(name):
            raise ConfigurationError(
                f"holds a file that can't be written: {name!r}", where, "remove it there"
            )
        yield _Entry(mode, kind, object_id, name.removeprefix(prefix))
    if submodules:
        raise ConfigurationError(
            f"holds submodules, which are not fetched: {_some(submodules)}",
            where,
            "pin a commit that holds their files itself",
        )


def _is_safe(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(
        part in ("..", "/") or part.lower() == ".git" or part.startswith("/") for part in parts
    )


def _write(repository: Path, entries: Sequence[_Entry], target: Path, where: str) -> None:
    """Write all entries; links last, so that nothing is written through one."""
    pointers: list[str] = []
    ordered = sorted(entries, key=lambda entry: entry.mode == "120000")
    for entry, content in zip(ordered, _contents(repository, ordered, where), strict=True):
        path = target / entry.name
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.mode == "120000":
                path.symlink_to(os.fsdecode(content))
                continue
            with path.open("xb") as file:
                file.write(content)
            path.chmod(0o755 if entry.mode == "100755" else 0o644)
        if len(content) <= LFS_POINTER_MAX_BYTES and content.startswith(LFS_POINTER):
            pointers.append(entry.name)
    if pointers:
        raise ConfigurationError(
            f"holds Git LFS pointers in place of content: {_some(pointers)}",
            where,
            "pin a commit that holds these files themselves, or use a local folder that does",
        )


def _contents(repository: Path, entries: Sequence[_Entry], where: str) -> Iterator[bytes]:
    """The bytes of each entry, in order."""
    with tempfile.TemporaryFile() as wanted:
        wanted.write("".join(f"{entry.object_id}\n" for entry in entries).encode())
        wanted.seek(0)
        with _started(repository, ("cat-file", "--batch"), wanted) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(FETCH_TIMEOUT_S, process.kill)
            watchdog.daemon = True
            watchdog.start()
            try:
                for entry in entries:
                    header = process.stdout.readline().split()
                    content = process.stdout.read(int(header[2]) + 1) if len(header) == 3 else b""
                    if not content.endswith(b"\n"):
                        raise InfrastructureError(
                            f"the cached repository does not give out {entry.name}",
                            where,
                            f"remove it and run again: rm -rf {repository}",
                        )
                    yield content[:-1]
            finally:
                watchdog.cancel()


@contextlib.contextmanager
def aside(final: Path) -> Generator[Path]:
    """A temporary folder that becomes `final` if all goes well and nobody was faster."""
    with disk_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield temporary
        with disk_errors(final):
            temporary.chmod(0o755)
            if not final.exists():
                try:
                    temporary.rename(final)
                except OSError:
                    if not final.exists():
                        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _git(repository: Path, *command: str, where: str, limit_s: float = LOCAL_TIMEOUT_S) -> bytes:
    """Run git in `repository`; returns its output.

    Raises:
        ConfigurationError: git is missing, or the remote has no such commit.
        InfrastructureError: it failed, or took too long.
    """
    with _started(repository, command) as process:
        try:
            output, complaint = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"git {command[0]} took over {limit_s:.0f} s",
                where,
                "check the connection, or clone it yourself and name the file:// URL",
            ) from None
    if process.returncode == 0:
        return output
    text = complaint.decode(errors="replace").strip()
    if "not our ref" in text or "unadvertised object" in text:
        raise ConfigurationError(
            "the repository has no such commit, or does not give it out",
            where,
            "correct source.commit; it must be reachable from a branch or tag",
        )
    last = text.splitlines()[-1] if text else f"exit code {process.returncode}"
    raise InfrastructureError(
        f"git {command[0]} failed: {last}", where, "check the URL, the connection and your access"
    )


@contextlib.contextmanager
def _started(
    repository: Path, command: Sequence[str], stdin: IO[bytes] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A git process whose whole group is gone afterwards, whatever happens."""
    environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    environment |= {
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes"),
        "GIT_ALLOW_PROTOCOL": TRANSPORTS,
        "GIT_LFS_SKIP_SMUDGE": "1",
    }
    try:
        process = subprocess.Popen(
            ("git", *_SETTINGS, *command),
            cwd=repository,
            env=environment,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            # What is read piece by piece must not be held up by a full pipe of complaints.
            stderr=subprocess.PIPE if stdin is None else subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigurationError(
            "git is not installed", "PATH", "install it: apt-get install git"
        ) from None
    with process:  # waits for its end, which therefore comes first
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
