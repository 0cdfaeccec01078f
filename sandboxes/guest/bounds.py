"""Bounds that the daemon sets on its own sandbox, where nothing outside does.

Invariants:
- What is set here can't be undone by what runs inside: `/proc/sys` is read-only
  afterwards, and nothing inside may mount.
- The memory bound is a watch, not a limit: it sees private and mapped shared
  memory, a moment late, and ends every process of the sandbox when they exceed it.
"""

from __future__ import annotations

import os

from sandboxes.guest.kernel import mount

MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PIDS_RESERVED = 301  # numbers that the kernel never gives out again once they have been used

# Memory that outlives the processes that made it, and watchers that the host's users share.
SYSCTLS = {
    "/proc/sys/kernel/shmall": "4096",  # pages
    "/proc/sys/kernel/msgmni": "32",
    "/proc/sys/user/max_inotify_instances": "4",
    "/proc/sys/user/max_inotify_watches": "4096",
}
WRITABLE = ("/", "/etc", "/logs", "/tests", "/solution", "/dev/shm")


def wrote(path: str, text: str) -> bool:
    """Whether `text` could be written to a file of /proc."""
    try:
        with open(path, "w", encoding="ascii") as handle:
            handle.write(text)
    except OSError:
        return False
    return True


def seal_proc_sys() -> bool:
    """Make /proc/sys read-only for good; False where this process may not mount."""
    path = b"/proc/sys"
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    if mount(path, path, None, MS_BIND, None) != 0:
        return False
    return mount(None, path, None, flags, None) == 0


def bound_inodes() -> bool:
    """Give every writable file system as many inodes as blocks: an inode is memory, too."""
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV
    done = True
    for place in WRITABLE:
        option = f"nr_inodes={os.statvfs(place).f_blocks}".encode()
        done &= mount(None, place.encode(), None, flags, option) == 0
    return done


def set_bounds(processes: int) -> dict[str, bool]:
    """Deny nested user namespaces, bound what all processes share, and seal it; say what held.

    A namespace has a bound on its process numbers of its own since Linux 6.14.
    """
    written = {path: wrote(path, text) for path, text in SYSCTLS.items()}
    bounds = {
        "nested": wrote("/proc/sys/user/max_user_namespaces", "0"),
        "processes": wrote("/proc/sys/kernel/pid_max", str(processes + PIDS_RESERVED)),
        "ipc": all(written.values()),
        "inodes": bound_inodes(),
    }
    bounds["sealed"] = seal_proc_sys()
    return bounds


def memory_in_use() -> int:
    """Bytes of memory of every process but this one: private, and shared as far as mapped."""
    private, shared = 0, 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as handle:
                lines = handle.read().splitlines()
        except OSError:
            continue  # it has just ended
        for line in lines:
            if line.startswith(b"RssAnon:"):
                private += int(line.split()[1])
            elif line.startswith(b"RssShmem:"):
                shared = max(shared, int(line.split()[1]))
    return (private + shared) << 10
