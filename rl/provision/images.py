"""The images that a campaign runs in on Modal.

Invariants:
- Everything is pinned: the base by digest, Debian's packages by version and by the day of
  the archive, Python's by hash, prime-rl by its commit with its own lock file.
- Layers go from what changes seldom to what changes often; the sources come last and are no
  layer at all: a change of theirs builds nothing.
- No layer is given a secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import modal

from rl.config import CampaignConfig
from rl.learner.prime.pinned import COMMIT
from rl.provision.functions import modal_of
from rl.provision.order import MODELS, SOURCES
from rl.running import ROOT

ENVIRONMENTS: Final = "/opt/environments"
MAIN: Final = f"{ENVIRONMENTS}/main"
ENGINE: Final = f"{ENVIRONMENTS}/engine"
REQUIREMENTS: Final = "/requirements"
PRIME: Final = "/opt/prime-rl"
PRIME_URL: Final = "https://github.com/PrimeIntellect-ai/prime-rl"
ARCHIVE_DAY: Final = "20261128T030000Z"  # the day of sandboxes/images/terminal.Dockerfile
# git fetches prime-rl; Triton and FlashInfer compile at run time with g++.
PACKAGES: Final = ("ca-certificates=20230311+deb12u1", "g++=4:12.2.0-3", "git=1:2.39.5-0+deb12u3")
_SUITES: Final = (
    f"debian/{ARCHIVE_DAY} bookworm",
    f"debian-security/{ARCHIVE_DAY} bookworm-security",
)
_APT: Final = "apt-get -o Acquire::Retries=5"
_SYNC: Final = "uv pip sync --no-cache --compile-bytecode"
_ADD: Final = "uv pip install --no-cache --no-deps -r"


def cpu_image(config: CampaignConfig, sources: Path) -> modal.Image:
    """For what has no GPU: the main environment and the sources.

    Args:
        config: of the campaign.
        sources: a directory that is taken as it is.
    """
    return _with_sources(_main_environment(config), sources)


def gpu_image(config: CampaignConfig, sources: Path) -> modal.Image:
    """For training and evaluation: the engine's and, if it is asked for, prime-rl's too."""
    image = _installed(_main_environment(config), MAIN, "gpu.txt", _ADD)
    image = image.run_commands(f"python3.12 -m venv --without-pip {ENGINE}")
    image = _installed(image, ENGINE, "engine-gpu.txt", _SYNC)
    variables = {"RL_ENGINE_PYTHON": f"{ENGINE}/bin/python"}
    if config.trainer.backend == "prime-rl":
        image = image.run_commands(
            f"git clone {PRIME_URL} {PRIME} && cd {PRIME} && git checkout {COMMIT} "
            "&& git submodule update --init --recursive "
            "&& uv sync --frozen --extra flash-attn --extra flash-attn-3"
        )
        variables["RL_PRIME_PYTHON"] = f"{PRIME}/.venv/bin/python"
    return _with_sources(image.env(variables), sources)


def _main_environment(config: CampaignConfig) -> modal.Image:
    base = modal.Image.from_registry(modal_of(config).base_image)
    lines = " ".join(
        f"'deb [check-valid-until=no] http://snapshot.debian.org/archive/{suite} main'"
        for suite in _SUITES
    )
    debian = base.run_commands(
        "rm -f /etc/apt/sources.list.d/* "
        f"&& printf '%s\\n' {lines} > /etc/apt/sources.list "
        f"&& {_APT} update && DEBIAN_FRONTEND=noninteractive {_APT} install -y "
        f"--no-install-recommends {' '.join(PACKAGES)} && rm -rf /var/lib/apt/lists/*"
    )
    uv = _with_requirements(debian, "uv.txt").run_commands(
        "python3.12 -m pip install --no-cache-dir --require-hashes --only-binary :all: "
        f"-r {REQUIREMENTS}/uv.txt",
        f"python3.12 -m venv --without-pip {MAIN}",
    )
    main = _installed(uv, MAIN, "main.txt", _SYNC)
    # `python` is the main environment's from here on, for Modal's own runner as well.
    return main.env(
        {
            "PATH": f"{MAIN}/bin:/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(SOURCES),
            "PYTHONUNBUFFERED": "1",
            "HF_HOME": str(MODELS),
            "HARBOR_TELEMETRY": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    )


def _with_sources(image: modal.Image, sources: Path) -> modal.Image:
    return image.add_local_dir(sources, str(SOURCES))


def _with_requirements(image: modal.Image, name: str) -> modal.Image:
    return image.add_local_file(ROOT / "requirements" / name, f"{REQUIREMENTS}/{name}", copy=True)


def _installed(image: modal.Image, environment: str, name: str, how: str) -> modal.Image:
    """The image with an environment brought to a requirement file, by hash."""
    return _with_requirements(image, name).run_commands(
        f"{how} {REQUIREMENTS}/{name} --python {environment}/bin/python --require-hashes --no-build"
    )
