"""What a task may expect of its working directory; the verifier checks it.

Invariants:
- An expectation is plain data: a kind, which names a module of `verifier` and the
  function there that checks it, and that function's arguments.
- It speaks of the outcome: files, modes, databases, commits, what a program does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

SHORT = 4096  # bytes that are quoted: loading the module of digests takes as long as Python's start

type Expectation = dict[str, Any]


def text(path: str, content: str) -> Expectation:
    """A regular file with these lines; the last one's newline may be missing."""
    return {"kind": "files.text", "path": path, "content": content}


def unchanged(path: str, content: str | bytes, gzipped: bool = False) -> Expectation:
    """A regular file with exactly these bytes, or whose decompressed bytes are these."""
    data = content.encode() if isinstance(content, str) else content
    wanted = data if len(data) <= SHORT else _sha256(data)
    return {"kind": "files.unchanged", "path": path, "wanted": wanted, "gzipped": gzipped}


def absent(path: str) -> Expectation:
    """Nothing has this name."""
    return {"kind": "files.absent", "path": path}


def folder(path: str) -> Expectation:
    """A directory, not a link to one."""
    return {"kind": "files.folder", "path": path}


def link(path: str, target: str) -> Expectation:
    """A symbolic link with this target, a final slash aside."""
    return {"kind": "files.link", "path": path, "target": target}


def names(path: str, entries: Sequence[str]) -> Expectation:
    """A directory below which lie exactly these files and links, in whatever folders."""
    return {"kind": "files.names", "path": path, "entries": sorted(entries)}


def mode(path: str, bits: int) -> Expectation:
    """A file or directory with exactly these permission bits."""
    return {"kind": "files.mode", "path": path, "bits": f"{bits:04o}"}


def json_value(path: str, value: Any) -> Expectation:
    """A JSON file that holds this value; the order of keys is free."""
    return {"kind": "files.json_value", "path": path, "value": value}


def rows(path: str, table: Sequence[Sequence[str]]) -> Expectation:
    """A CSV file with these rows, its header among them, however it is quoted."""
    return {"kind": "files.rows", "path": path, "table": [list(row) for row in table]}


def query(path: str, sql: str, result: Sequence[Sequence[str | int | None]]) -> Expectation:
    """An SQLite database that answers `sql` with these rows."""
    return {
        "kind": "databases.query",
        "path": path,
        "sql": sql,
        "result": [list(row) for row in result],
    }


def refused(path: str, sql: str) -> Expectation:
    """An SQLite database whose constraints refuse `sql` (tried on a copy)."""
    return {"kind": "databases.refused", "path": path, "sql": sql}


def members(path: str, content: Mapping[str, str]) -> Expectation:
    """A gzipped tar archive with exactly these regular files; its folders are free."""
    digests = {name: _sha256(data) for name, data in content.items()}
    return {"kind": "archives.members", "path": path, "digests": digests}


def commits(repo: str, ref: str, log: Sequence[str], more: int = 0) -> Expectation:
    """A ref's first-parent history, oldest first, as `subject|author|author time`.

    Args:
        repo: the repository's folder.
        ref: a branch, tag or other name of a commit.
        log: the commits it begins with.
        more: how many others must follow; -1 for one or more.
    """
    return {
        "kind": "repositories.commits",
        "repo": repo,
        "ref": ref,
        "log": list(log),
        "more": more,
    }


def committed(repo: str, ref: str, files: Mapping[str, str], parents: int = 1) -> Expectation:
    """A commit with exactly these files and that many parents."""
    digests = {name: _sha256(data) for name, data in files.items()}
    return {
        "kind": "repositories.committed",
        "repo": repo,
        "ref": ref,
        "digests": digests,
        "parents": parents,
    }


def program(
    argv: Sequence[str],
    *,
    uses: Sequence[str],
    given: Mapping[str, str] | None = None,
    prints: str | None = None,
    exits: int = 0,
    leaves: Mapping[str, str | None] | None = None,
    signals: Sequence[tuple[str, str]] = (),
    within_s: float = 10.0,
) -> Expectation:
    """A program of the agent's, run as a stranger in a copy of what it uses.

    Args:
        argv: command and arguments; its working directory is the copy.
        uses: files of the working directory that are copied.
        given: files that it finds beside them; inputs the agent has never seen.
        prints: lines of its standard output; None: not looked at.
        exits: its exit code.
        leaves: files it leaves, with their lines; None: there must be no such file.
        signals: pairs of a line it prints and the signal it is sent then.
        within_s: seconds that it may run.
    """
    return {
        "kind": "programs.program",
        "argv": list(argv),
        "uses": list(uses),
        "given": dict(given or {}),
        "prints": prints,
        "exits": exits,
        "leaves": dict(leaves or {}),
        "signals": [list(pair) for pair in signals],
        "within_s": within_s,
    }


def _sha256(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
