"""Where a Ray that is started here listens.

Invariant: a cluster of one machine listens on the loopback address alone, its daemons and
their metrics, which take no token, included.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

# Ray's own way to do so, meant for systems whose firewall would ask a person otherwise.
VARIABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK: Final = {VARIABLE: "0"}


@contextmanager
def on_loopback() -> Generator[None]:
    """Have a Ray that this process starts inside `with` listen on the loopback address alone.

    Its processes inherit that; this one can connect to another cluster later.
    """
    from ray._private import ray_constants

    variable, constant = os.environ.get(VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(LOOPBACK)
    ray_constants.ENABLE_RAY_CLUSTER = False  # read from the variable when Ray is imported
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = variable
