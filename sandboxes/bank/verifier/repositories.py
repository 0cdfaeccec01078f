"""What a git repository's history holds; git runs as a stranger over a copy."""

from __future__ import annotations

import os
import shutil

from . import confined
from .files import WRONG, first_difference, sha256
from .scratch import give_away, scratch

__all__ = ["WRONG", "commits", "committed"]

GIT_TIME_S = 20.0


def commits(repo: str, ref: str, log: list[str], more: int) -> str | None:
    """See `expect.commits`."""
    command = ("log", "--first-parent", "--reverse", "--format=%s|%an|%at", ref, "--")
    found = _git(repo, *command).splitlines()
    extra = len(found) - len(log)
    if found[: len(log)] != log:
        return f"history differs: {first_difference(found, log)}"
    if extra != more and not (more == -1 and extra >= 1):
        return f"{extra} commits follow"
    return None


def committed(repo: str, ref: str, digests: dict[str, str], parents: int) -> str | None:
    """See `expect.committed`."""
    found: dict[str, str] = {}
    for line in _git(repo, "ls-tree", "-r", "-z", ref).split("\0"):
        if line:
            kind, blob = line.partition("\t")[0].split()[1:]
            name = line.partition("\t")[2]
            found[name] = sha256(_git(repo, "cat-file", kind, blob).encode())
    if found != digests:
        return f"holds {sorted(found)}, or other content"
    count = len(_git(repo, "rev-list", "--parents", "-n", "1", ref).split()) - 1
    return None if count == parents else f"has {count} parents"


def _git(repo: str, *arguments: str) -> str:
    """What git's plumbing prints about a repository of the agent's, run as a stranger."""
    settings = ("safe.directory=*", "core.fsmonitor=false", "log.showSignature=false")
    flags = [part for setting in settings for part in ("-c", setting)]
    with scratch() as folder:
        copy = os.path.join(folder, "repository")
        shutil.copytree(os.path.join(repo, ".git"), copy, symlinks=True)
        give_away(folder)
        ended = confined.run(["git", *flags, "--git-dir", copy, *arguments], folder, GIT_TIME_S)
    if ended.code != 0:
        raise ValueError(f"git {arguments[0]} ended with {ended.code}")
    return ended.output
