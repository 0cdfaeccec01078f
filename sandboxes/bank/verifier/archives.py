"""What an archive holds; it is read, never extracted."""

from __future__ import annotations

import io
import lzma
import os
import tarfile

from .files import LIMIT, read, sha256
from .files import WRONG as WRONG_FILE

WRONG = (*WRONG_FILE, lzma.LZMAError, tarfile.TarError)


def members(path: str, digests: dict[str, str]) -> str | None:
    """See `expect.members`."""
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(read(path)), mode="r:gz") as archive:
        for member in archive:
            if member.isdir():
                continue
            if not member.isfile() or member.size > LIMIT:
                return f"{member.name} is no regular file, or too long"
            stream = archive.extractfile(member)
            if stream is not None:
                found[os.path.normpath(member.name)] = sha256(stream.read())
    if found == digests:
        return None
    return f"holds {sorted(found)}, or other content"
