"""System calls that nothing inside may make: those that namespaces don't confine.

Invariants:
- The filter holds for whatever starts after it, and can't be taken off.
- A refused call fails with EPERM, as it does for a user without the privilege.
- A program of another architecture than the kernel's own can make no call at all,
  because the numbers below would mean other calls to it.
"""

from __future__ import annotations

import os
import struct

from sandboxes.guest.kernel import address, buffer, prctl

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter: fail with EPERM
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
X32_BIT = 0x40000000
REFUSED_FAMILIES = (38, 40)  # the kernel's ciphers; sockets to the hypervisor
# Audit's name of the architecture, then socket, then what is refused: keys, kernel
# modules and images, the clock, the kernel's log, its tracing and programs, swap,
# accounting, quotas, mounts, files by handle, page faults and io_uring.
MACHINES = {
    "x86_64": (
        *(0xC000003E, 41, 248, 249, 250, 246, 320, 175, 176, 313, 169, 164, 227, 305, 159),
        *(103, 298, 321, 167, 168, 163, 179, 165, 166, 155, 304, 323, 425),
        *(428, 429, 430, 432, 442),
    ),
    "aarch64": (
        *(0xC00000B7, 198, 217, 218, 219, 104, 294, 105, 106, 273, 142, 170, 112, 266, 171),
        *(116, 241, 280, 224, 225, 89, 60, 40, 39, 41, 265, 282, 425),
        *(428, 429, 430, 432, 442),
    ),
}


def filter_program(architecture: int, socket: int, refused: tuple[int, ...]) -> bytes:
    """The filter as the kernel takes it: (code, jump if true, jump if false, value)."""
    body: list[tuple[int, str, str, int]] = [
        (LOAD_WORD, "", "", ARCHITECTURE_AT),
        (JUMP_EQUAL, "", "refuse", architecture),
        (LOAD_WORD, "", "", NUMBER_AT),
        (JUMP_AT_LEAST, "refuse", "", X32_BIT),
        *((JUMP_EQUAL, "refuse", "", number) for number in refused),
        (JUMP_EQUAL, "", "allow", socket),
        (LOAD_WORD, "", "", FIRST_ARGUMENT_AT),
        *((JUMP_EQUAL, "refuse", "", family) for family in REFUSED_FAMILIES),
        (RETURN, "", "", ALLOW),
        (RETURN, "", "", REFUSE),
    ]
    ends = {"allow": len(body) - 2, "refuse": len(body) - 1}
    return b"".join(
        struct.pack(
            "=HBBI",
            code,
            ends[true] - at - 1 if true else 0,
            ends[false] - at - 1 if false else 0,
            value,
        )
        for at, (code, true, false, value) in enumerate(body)
    )


def refuse_calls() -> bool:
    """Put the filter on this process and all to come; False where it is not known how.

    The process may gain no privileges any more, or must be privileged.
    """
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        return False
    program = buffer(filter_program(machine[0], machine[1], machine[2:]))
    header = struct.pack("@HP", len(program) // 8, address(program))  # struct sock_fprog
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0
