"""Where the processes of a tree listen, as the kernel tells."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from actors.engine_guard import descendants

LISTENING = "0A"


def listening(root: int) -> dict[str, int]:
    """Address and port of every TCP socket on which a descendant of `root` listens, by process."""
    sockets = _listening_sockets()
    found: dict[str, int] = {}
    for pid in descendants(root):
        try:
            links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended
            continue
        for link in links:
            inode = link.removeprefix("socket:[").removesuffix("]")
            if inode in sockets:
                found[sockets[inode]] = pid
    return found


def is_loopback(address: str) -> bool:
    """Whether an address and port, as `listening` tells them, can be reached from here alone."""
    ip = ipaddress.ip_address(address.rpartition(":")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _listening_sockets() -> dict[str, str]:
    rows: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] != LISTENING:
                continue
            host, _, port = parts[1].partition(":")
            words = bytes.fromhex(host)  # each group of four bytes is little-endian
            packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            rows[parts[9]] = f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
    return rows
