"""Running one command: a supervisor, and under it the shell.

Invariants:
- The supervisor is a child subreaper, so every process that the command starts,
  in whatever session, stays its descendant for as long as the shell runs.
- Both run as the command's user, without the capabilities that would let it trace or
  change the daemon; the shell in a session of its own, with no descriptor but its
  standard three.
- When memory runs out, of the sandbox or of the machine, the kernel ends what a
  command started before it ends anything else.
"""

from __future__ import annotations

import os
import resource
import signal
import struct

from sandboxes.guest.bounds import wrote
from sandboxes.guest.kernel import capset, errno, prctl

PR_SET_NAME, PR_CAPBSET_DROP = 15, 24
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
LAST_CAPABILITY = 40
# What containers usually keep: chown, dac_override, fowner, fsetid, kill, setgid,
# setuid, setpcap, net_bind_service, net_raw, sys_chroot, audit_write, setfcap.
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31)

# Python ignores the first two, `nohup` and shells without job control the others, and a program
# keeps ignoring what was ignored when it started.
RESET_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
)
EXIT_CANNOT_RUN = 126
FIRST_TO_DIE = "1000"  # the highest oom_score_adj


def group_id(group: str) -> int:
    """The id of a group by name or number."""
    with open("/etc/group", encoding="utf-8", errors="replace") as groups:
        for line in groups:
            field = line.split(":")
            if len(field) >= 3 and group == field[0]:
                return int(field[2])
    if not group.isdigit():
        raise OSError(f"there is no group '{group}'")
    return int(group)


def resolve_user(user: str) -> tuple[int, int, str]:
    """uid, gid and home of a name, a number or `uid:gid`; root is root, whatever /etc says."""
    if user in ("root", "0"):
        return 0, 0, "/root"
    name, _, group = user.partition(":")
    with open("/etc/passwd", encoding="utf-8", errors="replace") as passwd:
        for line in passwd:
            field = line.rstrip("\n").split(":")
            if len(field) >= 6 and name in (field[0], field[2]):
                return int(field[2]), group_id(group or field[3]), field[5]
    if not name.isdigit():
        raise OSError(f"there is no user '{name}'")
    return int(name), group_id(group or name), "/"


def become(user: str, single_uid: bool) -> str:
    """Take the user's ids and give up what commands must not have; return the home."""
    uid, gid, home = resolve_user(user)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in KEPT_CAPABILITIES:
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if not single_uid:
        os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    elif (uid, gid) != (0, 0):
        raise OSError("this sandbox has one user only; run the command as root")
    kept = sum(1 << capability for capability in KEPT_CAPABILITIES) if uid == 0 else 0
    low, high = kept & 0xFFFFFFFF, kept >> 32
    header = struct.pack("=Ii", 0x20080522, 0)
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    if capset(header, data) != 0:
        raise OSError(errno(), "capset failed")
    return home


def start_shell(request: list[bytes], out: int, err: int, single_uid: bool) -> int:
    """Take the limits and the user of a command, and start its shell; its process number.

    The shell is not forked: copying this process would take as long as bash's start.
    """
    command, cwd, user, limits = request[1], request[2], request[3].decode(), request[4]
    wrote("/proc/self/oom_score_adj", FIRST_TO_DIE)
    for item in limits.decode().split():
        which, value = item.split("=")
        resource.setrlimit(getattr(resource, which), (int(value), int(value)))
    env = {b"HOME": become(user, single_uid).encode()}
    os.chdir(cwd)
    for item in request[7:]:
        key, _, value = item.partition(b"=")
        env[key] = value
    env.setdefault(b"PWD", cwd)
    return os.posix_spawn(
        "/bin/bash",
        [b"bash", b"-c", command],
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, err, 2),
        ],
        setsid=True,
        setsigdef=RESET_SIGNALS,
    )


def supervise(request: list[bytes], out: int, err: int, status: int, single_uid: bool) -> None:
    """Run the shell, adopt what it orphans, report its exit code; never returns."""
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_NAME, b"supervisor", 0, 0, 0)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (out, err, status):
                try:
                    os.close(int(name))
                except OSError:
                    continue  # the descriptor of the listing itself
        try:
            shell = start_shell(request, out, err, single_uid)
        except (OSError, ValueError) as error:
            os.write(err, f"sandbox: cannot run the command: {error}\n".encode())
            os.write(status, str(EXIT_CANNOT_RUN).encode())
            os._exit(0)
        for fd in {out, err}:
            os.close(fd)
        while True:
            pid, state = os.waitpid(-1, 0)
            if pid == shell:
                code = os.waitstatus_to_exitcode(state)
                os.write(status, str(code if code >= 0 else 128 - code).encode())
                os._exit(0)
    except BaseException:
        os._exit(1)
