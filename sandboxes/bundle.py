"""The sandbox's daemon as one compiled file, made for the Python that runs it.

Invariant: the bundle holds the modules of `sandboxes/guest` in `ORDER` and
nothing else, so what runs inside depends on no file of this project.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import os
import subprocess
from pathlib import Path

from rl.errors import SandboxError

ORDER = (
    *("kernel", "wire", "output", "bounds", "syscalls", "shell", "killing", "layer"),
    *("transfer", "init"),
)
COMPILE_TIMEOUT_S = 30.0
# Annotations stay text by a flag: the statement for it would load a module at each start.
_COMPILE = """
import marshal, sys, __future__
from importlib.util import MAGIC_NUMBER
flags = __future__.annotations.compiler_flag
code = compile(sys.stdin.read(), "sandbox-init", "exec", flags, True, optimize=0)
sys.stdout.buffer.write(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


def bundle_source() -> str:
    """The modules in order, without their imports of each other."""
    body: list[ast.stmt] = []
    for name in ORDER:
        text = (Path(__file__).parent / "guest" / f"{name}.py").read_text(encoding="utf-8")
        for statement in ast.parse(text).body:
            module = statement.module if isinstance(statement, ast.ImportFrom) else None
            if module != "__future__" and not (module or "").startswith("sandboxes."):
                body.append(statement)
    return ast.unparse(ast.Module(body=body, type_ignores=[]))


@functools.cache
def compiled_bundle(python: str) -> int:
    """A sealed, inheritable-by-request descriptor of the bundle, compiled for `python`.

    Raises:
        SandboxError: that Python does not run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE],
            input=bundle_source().encode(),
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the sandboxes' Python does not run: {error}", python) from None
    return sealed_file("sandbox-init", done.stdout)


def sealed_file(name: str, content: bytes) -> int:
    """A descriptor of an anonymous file that nobody can change."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
