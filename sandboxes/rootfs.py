"""What a local sandbox sees of the machine: arguments for bubblewrap, and /etc.

Invariants:
- Only /usr (and the views of it at /bin, /sbin, /lib*) and a short list of
  public files of /etc are shared with the host, all read-only.
- Everything writable is a tmpfs with a size limit.
- The dynamic loader's inputs (/lib*, /etc/ld.so.*) and the directories that
  grading relies on (/logs, /tests, /solution) are mount points: whatever runs
  inside can neither replace nor rename them.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from sandboxes.guest.enclosure import EMPTY_FILE

SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
USR_VIEWS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

# Public configuration that programs need; nothing here may hold a secret.
SHARED_ETC = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "perl",
    "profile",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)

BASE_FILES = (
    *("/usr/lib/os-release", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/share"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"),
    *("/usr/local/bin", "/usr/local/lib"),
)

OWN_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
    "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\nbin:x:2:\nadm:x:4:\ntty:x:5:\nstaff:x:50:\n"
    "www-data:x:33:\nusers:x:100:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
    "services: files\nprotocols: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
}

DIRECTORIES = (
    ("/app", 0o755),
    ("/tmp", 0o1777),
    ("/root", 0o700),
    ("/home", 0o755),
    ("/opt", 0o755),
    ("/srv", 0o755),
    ("/mnt", 0o755),
    ("/run", 0o755),
    ("/var/tmp", 0o1777),
    ("/var/log", 0o755),
    ("/var/lib", 0o755),
    ("/var/cache", 0o755),
    ("/logs/agent", 0o777),
    ("/logs/verifier", 0o777),
    ("/logs/artifacts", 0o777),
)

# Room of their own for what grading writes, so that a full disk can't prevent it.
GRADING_MOUNTS = ("/logs", "/tests", "/solution")
GRADING_MB = 16
ETC_MB = 4
SHM_MB = 16
OWN_MOUNTS_MB = len(GRADING_MOUNTS) * GRADING_MB + ETC_MB + SHM_MB


def mount_arguments(disk_mb: int, guard_proc_sys: bool) -> list[str]:
    """Arguments that build the file system.

    Args:
        disk_mb: size limit of the writable root.
        guard_proc_sys: bind /proc/sys read-only, where ids alone don't protect it.
    """
    args = ["--size", _mb(disk_mb), "--tmpfs", "/", *_usr_binds(), "--proc", "/proc"]
    if guard_proc_sys:
        args += ["--ro-bind", "/proc/sys", "/proc/sys"]
    args += ["--dev", "/dev", "--size", _mb(SHM_MB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    args += ["--size", _mb(ETC_MB), "--tmpfs", "/etc", *_etc_binds()]
    args += ["--ro-bind-data", EMPTY_FILE, "/etc/ld.so.preload"]
    for path in GRADING_MOUNTS:
        args += ["--size", _mb(GRADING_MB), "--tmpfs", path]
    return args


@functools.cache
def _usr_binds() -> tuple[str, ...]:
    """/usr and the views of it, as they were when this was first asked."""
    args = ["--ro-bind", "/usr", "/usr"]
    for view in USR_VIEWS:
        if os.path.isdir(view):
            args += ["--ro-bind", os.path.realpath(view), view]
    return tuple(args)


@functools.cache
def _etc_binds() -> tuple[str, ...]:
    """What is shared of /etc, as it was when this was first asked."""
    args: list[str] = []
    for name in (*SHARED_ETC, *_python_etc()):
        source = Path("/etc", name)
        if source.exists():
            args += ["--ro-bind", str(source.resolve()), f"/etc/{name}"]
    return tuple(args)


def first_files() -> list[tuple[str, str, int, bytes]]:
    """What is written into a fresh sandbox before anything runs in it."""
    entries = [(path, "d", mode, b"") for path, mode in DIRECTORIES]
    entries += [(f"/etc/{name}", "f", 0o644, text.encode()) for name, text in OWN_ETC.items()]
    return entries


def known_directories() -> frozenset[str]:
    """Directories that a fresh sandbox has, as far as build steps may write into them."""
    found = {path for path, _ in DIRECTORIES} | {"/etc", *GRADING_MOUNTS}
    return frozenset(found | {os.path.dirname(path) for path in found})


def base_identity() -> str:
    """A digest of what a sandbox starts from: this machine's /usr, and the first files.

    /usr is told by its release and by when names in its main directories last changed,
    which every installation and removal does.
    """
    digest = hashlib.sha256(repr(first_files()).encode())
    for name in BASE_FILES:
        path = Path(name)
        if path.is_dir():
            digest.update(f"{name} {path.stat().st_mtime_ns}\0".encode())
        elif path.is_file():
            digest.update(name.encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _python_etc() -> list[str]:
    return sorted(path.name for path in Path("/etc").glob("python3*"))


def _mb(size: int) -> str:
    return str(size << 20)
