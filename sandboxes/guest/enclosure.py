"""From a fork of the zygote to process 1 of a sandbox: ids, namespaces, file system.

Invariants:
- The process becomes root of its own user namespace before anything is made, so that
  whatever is made belongs to it.
- bubblewrap makes the file system and all other namespaces, as a child inside the new
  process namespace, and shows by running `cat` in them that it is done; this process
  then enters them.  So it is never in a half-made one, and its death ends bubblewrap too.
- Once it has entered, it holds nothing of the host but its own code: no path, no
  directory, no descriptor other than its owner's socket.
"""

from __future__ import annotations

import _socket
import os
import signal

from sandboxes.guest.bounds import MS_NODEV, MS_NOEXEC, MS_NOSUID
from sandboxes.guest.init import Daemon
from sandboxes.guest.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    check,
    mount,
    prctl,
    setns,
    unshare,
)
from sandboxes.guest.shell import RESET_SIGNALS
from sandboxes.guest.syscalls import PR_SET_NO_NEW_PRIVS

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
KEPT_WORDS = 4096  # of what a failing bubblewrap prints
# Stands among the arguments for the descriptor of an empty file.
EMPTY_FILE = "{empty}"
# What bubblewrap runs when it is done; its arguments come from the owner.
WITNESS = "cat"
WITNESS_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


class Order:
    """What the owner asks for.  No dataclass: each fork would copy what makes one.

    Args:
        full_map: a whole range of user ids is mapped, not only the owner's own.
        network: the machine's network is shared.
        entrances: files to which a process writes 0 to join its control groups.
        processes: a bound that the daemon sets.
        watched_bytes: of memory, the same; 0 where something else bounds it.
        command: bubblewrap and its arguments, which make the file system.
    """

    def __init__(
        self,
        full_map: bool,
        network: bool,
        processes: int,
        watched_bytes: int,
        entrances: list[str],
        command: list[str],
    ) -> None:
        self.full_map = full_map
        self.network = network
        self.processes = processes
        self.watched_bytes = watched_bytes
        self.entrances = entrances
        self.command = command

    def wire(self) -> bytes:
        """All of it, separated by NUL bytes."""
        numbers = (self.full_map, self.network, self.processes, self.watched_bytes)
        words = [*map(str, map(int, numbers)), str(len(self.entrances))]
        return "\0".join([*words, *self.entrances, *self.command]).encode()

    @classmethod
    def read(cls, wire: bytes) -> Order:
        """The inverse of `wire`."""
        words = wire.decode().split("\0")
        full_map, network, processes, watched_bytes, count = map(int, words[:5])
        command = words[5 + count :]
        entrances = words[5 : 5 + count]
        return cls(bool(full_map), bool(network), processes, watched_bytes, entrances, command)


def become_process_one(order: Order, control: _socket.socket, mapped: int) -> None:
    """Wait for `mapped`, make the sandbox, enter it and serve; never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which the zygote ignores
        if os.read(mapped, 1) != b"m":
            os._exit(1)  # whoever maps the ids has given up
        for path in order.entrances:
            with open(path, "w", encoding="ascii") as entrance:
                entrance.write("0\n")
        if order.full_map:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        # Only now, as a change of user undoes it.
        check(prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "no parent-death signal")
        check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "its memory can't be hidden")
        _show_own_processes()
        _enter(order)
        check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "privileges can't be given up")
        Daemon(control, not order.full_map, order.watched_bytes).begin(order.processes)
    except Exception as error:  # whatever it is, the owner must hear of it
        control.send(f"failed {error}".encode(errors="replace"))
    finally:
        os._exit(1)


def _show_own_processes() -> None:
    """Mount a /proc of the new process namespace, which bubblewrap then takes over.

    It must be done here, where the machine's own is still in sight: the kernel gives a
    user namespace none otherwise.
    """
    check(unshare(CLONE_NEWNS), "no namespace of mounts")
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    check(mount(b"proc", b"/proc", b"proc", flags, None), "/proc cannot be mounted")


def _enter(order: Order) -> None:
    """Have bubblewrap make the namespaces, and enter them."""
    info, info_end = os.pipe()
    answer, answer_end = os.pipe()
    question_end, question = os.pipe()
    words, empty = os.memfd_create("words"), os.memfd_create("empty")
    for fd in (info_end, empty):
        os.set_inheritable(fd, True)
    ends = ((question_end, 0), (answer_end, 1), (words, 2))
    bwrap, *arguments = [str(empty) if word == EMPTY_FILE else word for word in order.command]
    child = os.posix_spawn(
        bwrap,
        [bwrap, "--info-fd", str(info_end), *arguments, WITNESS],
        WITNESS_ENV,
        file_actions=[(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in ends],
        setsigdef=RESET_SIGNALS,
    )
    for fd in (info_end, answer_end, question_end):
        os.close(fd)
    try:
        os.write(question, b"\n")
        done = os.read(answer, 1) == b"\n"
    except BrokenPipeError:
        done = False
    if not done:
        said = os.pread(words, KEPT_WORDS, 0).decode(errors="replace").strip()
        raise OSError(f"bubblewrap: {said}")
    witness = os.pidfd_open(_number_of(b'"child-pid":', os.read(info, 1024)))
    check(setns(witness, _namespaces(order.network)), "the namespaces cannot be entered")
    os.chdir("/")
    for fd in (witness, info, answer, question, words, empty):
        os.close(fd)  # upon which the witness ends, and bubblewrap
    os.waitpid(child, 0)


def _number_of(key: bytes, text: bytes) -> int:
    """The number behind a key of flat JSON."""
    return int(text.partition(key)[2].replace(b"}", b",").partition(b",")[0])


def _namespaces(network: bool) -> int:
    """Those that bubblewrap has made."""
    kinds = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    if os.path.exists("/proc/self/ns/cgroup"):
        kinds |= CLONE_NEWCGROUP
    return kinds if network else kinds | CLONE_NEWNET
