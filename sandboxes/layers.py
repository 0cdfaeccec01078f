"""What build steps left, kept on disk by the content that they were made from.

Invariants:
- A layer's name is the digest of everything it depends on: the Dockerfile, every
  file of the build context, this machine's /usr, and how user ids are mapped.
- A layer that is read is the one that was written: its own digest comes first in
  the file, and one that does not match is made again.
- Writers never meet: a layer is written aside, synced and renamed, and two that
  made the same one leave the same bytes.
- The folder belongs to this user alone, and holds at most `MAX_BYTES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from rl.errors import ConfigurationError
from rl.files import sha256_file, write_bytes
from sandboxes.rootfs import base_identity

FORMAT = "layer 2"  # a changed format makes old layers void
MAX_BYTES = 2 << 30
DIGEST_BYTES = 32


def default_folder() -> Path:
    """Where layers are kept: below XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "terminal-rl", "layers")


def layer_name(context: Path, full_map: bool) -> str:
    """The digest of what a layer depends on, hex.

    Args:
        context: the folder of the Dockerfile, which is the build context.
        full_map: whether the sandbox has a range of user ids.
    """
    digest = hashlib.sha256()
    for part in (FORMAT, base_identity(), str(full_map)):
        digest.update(f"{part}\0".encode())
    for path in sorted(context.rglob("*")):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(info.st_mode):
            content = sha256_file(path)
        else:
            content = ""
        name = path.relative_to(context).as_posix()
        digest.update(os.fsencode(f"{name}\0{info.st_mode:o}\0{content}\0"))
    return digest.hexdigest()


def read_layer(folder: Path, name: str) -> bytes | None:
    """A layer, None if there is none; it counts as just used.

    Raises:
        ConfigurationError: somebody else could have written it.
    """
    if not folder.exists():
        return None
    _require_own(folder)
    path = folder / name
    try:
        data = path.read_bytes()
        os.utime(path)
    except FileNotFoundError:
        return None
    layer = data[DIGEST_BYTES:]
    return layer if hashlib.sha256(layer).digest() == data[:DIGEST_BYTES] else None


def write_layer(folder: Path, name: str, layer: bytes) -> None:
    """Keep a layer, and remove those unused for longest beyond `MAX_BYTES`.

    Raises:
        ConfigurationError: the folder belongs to somebody else.
        InfrastructureError: it can't be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(folder)
    write_bytes(folder / name, hashlib.sha256(layer).digest() + layer)
    _prune(folder, MAX_BYTES)


def _prune(folder: Path, limit: int) -> None:
    """Remove what was used least recently, unfinished files included."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another writer removes, too
            info = path.stat()
            found.append((info.st_mtime, info.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def _require_own(folder: Path) -> None:
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ConfigurationError(
            "others could write the layers that sandboxes start from",
            str(folder),
            "make it a folder of your own with mode 700, or set XDG_CACHE_HOME",
        )
