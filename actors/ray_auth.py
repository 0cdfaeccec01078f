"""Ray's token authentication, on unless somebody has said otherwise.

Invariants:
- What this process has read of Ray's settings before, it reads again: Ray does so once, when
  it is imported.
- A token's file can be read by its owner alone; of two processes that make it, one does.
- A token is in that file or where the person has put it, and nowhere else.
"""

from __future__ import annotations

import importlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

from rl.errors import ConfigurationError
from rl.files import disk_errors, write_all

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
DEFAULT_PATH = Path("~/.ray/auth_token")
OWNER_ONLY = 0o600
TOKEN_BYTES = 32
REFUSED_REMEDY = (
    "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of its head "
    "(there: `ray get-auth-token`)"
)


def use_tokens() -> None:
    """Have this process and its children authenticate, with a token that is there or made now.

    RAY_AUTH_MODE=disabled, set by the person, is left as it is.

    Raises:
        ConfigurationError: the token's file is missing or belongs to somebody else.
        InfrastructureError: it can't be written.
    """
    if MODE_VARIABLE not in os.environ:
        os.environ[MODE_VARIABLE] = "token"
        _tell_ray()
    if os.environ[MODE_VARIABLE].lower() != "token":
        return
    if os.environ.get(TOKEN_VARIABLE):
        return
    named = os.environ.get(PATH_VARIABLE)
    path = Path(named or DEFAULT_PATH).expanduser()
    if not path.exists():
        if named:
            raise ConfigurationError(
                "no such token file", f"{PATH_VARIABLE}={named}", "name the cluster's token file"
            )
        create_token(path)
    _keep_private(path)


def _tell_ray() -> None:
    """Have a Ray that is imported already read its settings again, as it does itself."""
    if "ray" in sys.modules:
        raylet: Any = importlib.import_module("ray._raylet")  # compiled, and has no types
        raylet.Config.initialize("")


def create_token(path: Path) -> None:
    """Write a fresh token to `path`, unless somebody else just has.

    Raises:
        InfrastructureError: it can't be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(aside, flags, OWNER_ONLY)
        try:
            write_all(descriptor, secrets.token_hex(TOKEN_BYTES).encode())
            os.fsync(descriptor)
            if not path.exists():
                os.link(aside, path)  # whole, or not at all
        except FileExistsError:
            return  # another process was first
        finally:
            os.close(descriptor)
            aside.unlink()


def _keep_private(path: Path) -> None:
    """Take from others what they may do with the token's file.

    Raises:
        ConfigurationError: others may read it and it is not ours to change.
    """
    found = path.stat()
    if not stat.S_IMODE(found.st_mode) & ~OWNER_ONLY & 0o777:
        return
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            "others may read the token, and its file is not this user's",
            str(path),
            f"have its owner run: chmod 600 {path}",
        )
    with disk_errors(path):
        path.chmod(OWNER_ONLY)
