"""The warm process that all sandboxes of one owner are forked from.

Starting a Python for each sandbox would take longer than everything else of its start.

Invariants:
- It has one thread, opens nothing of its sandboxes, and has loaded all that they need:
  inside, no module can be found any more.  It loads little: each fork copies it.
- It ends when its owner's socket closes, and each sandbox with it (by the parent-death
  signal, and by its own socket).
- The owner gets a descriptor of each sandbox's first process, which names it for good.
"""

from __future__ import annotations

import _socket
import codecs
import gc
import os
import signal
import struct
import sys

from sandboxes.guest.enclosure import PR_SET_PDEATHSIG, Order, become_process_one
from sandboxes.guest.kernel import CLONE_NEWPID, CLONE_NEWUSER, check, overwrite, prctl, unshare
from sandboxes.guest.shell import PR_SET_CHILD_SUBREAPER, PR_SET_NAME

LONGEST_ORDER = 1 << 17
LONGEST_WORD = 256
NAME = b"sandbox-init"
FIRST_OUTER_ID = 100_000
MAPPED_IDS = 65_536


def fork_sandbox(order: Order, control: _socket.socket) -> tuple[int, int]:
    """Fork process 1 of a new sandbox; its number, and a descriptor of it.

    Raises:
        OSError: no namespace, no process, or the ids can't be mapped; nothing is left.
    """
    mapped, tell_mapped = os.pipe()
    born, tell_born = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            os.close(tell_mapped)
            os.close(born)
            _divide(order, control, mapped, tell_born)
        os.close(tell_born)
        tell_born = -1
        said = os.read(born, LONGEST_WORD).decode()
        _wait_for(between)  # from now on the new process is our own child
        if not said.isdigit():
            raise OSError(said or "a process ended before it had begun")
        pid = int(said)
        watch = os.pidfd_open(pid)  # it waits for us: nobody else has its number
        try:
            _map_ids(pid, order.full_map)
        except OSError:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            os.close(watch)
            raise
        os.write(tell_mapped, b"m")
        return pid, watch
    finally:
        for fd in {mapped, tell_mapped, born, tell_born} - {-1}:
            os.close(fd)


def _divide(order: Order, control: _socket.socket, mapped: int, tell_born: int) -> None:
    """Make the namespaces of users and processes, and their first process; never returns."""
    try:
        check(unshare(CLONE_NEWUSER | CLONE_NEWPID), "no namespace")
        pid = os.fork()
        if pid == 0:
            os.close(tell_born)
            become_process_one(order, control, mapped)
        os.write(tell_born, str(pid).encode())
    except OSError as error:
        os.write(tell_born, str(error).encode()[:LONGEST_WORD])
    finally:
        os._exit(0)


def _wait_for(pid: int) -> None:
    """Wait for the end of a child, which the kernel collects."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


def _map_ids(pid: int, full: bool) -> None:
    """Give a new user namespace its ids: a range of them, or the one that made it."""
    if not full:
        _write(f"/proc/{pid}/setgroups", "deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        first, count = (FIRST_OUTER_ID, MAPPED_IDS) if full else (own, 1)
        _write(f"/proc/{pid}/{name}", f"0 {first} {count}\n")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


def _hide_arguments() -> None:
    """Show a name in place of the command line: what runs inside can read that of process 1."""
    with open("/proc/self/stat", "rb") as handle:
        fields = handle.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    overwrite(begin, NAME[: end - begin].ljust(end - begin, b"\0"))
    prctl(PR_SET_NAME, NAME, 0, 0, 0)


def _take_order(owner: _socket.socket) -> None:
    """Fork one sandbox and hand the owner a descriptor of its process, or say why not."""
    wire, given, _, _ = owner.recvmsg(LONGEST_ORDER, _socket.CMSG_SPACE(4))
    if not given:
        os._exit(0)  # the owner has closed its end
    control = _socket.socket(fileno=struct.unpack("i", given[0][2][:4])[0])
    try:
        pid, watch = fork_sandbox(Order.read(wire), control)
    except OSError as error:
        owner.send(str(error).encode())
        return
    finally:
        control.close()
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", watch))
    owner.sendmsg([str(pid).encode()], [rights])
    os.close(watch)


def main() -> None:
    """Load everything, forget where from, and serve the owner on standard input."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what has ended
    os.chdir("/")
    codecs.lookup("ascii")  # an encoding is a module, too
    sys.path.clear()
    sys.meta_path.clear()
    _hide_arguments()
    owner = _socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    gc.freeze()
    while True:
        _take_order(owner)
