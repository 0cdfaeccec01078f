"""How prime-rl's interpreter is started: to be asked what it is, and to train.

Invariants:
- Pure: nothing is started, and only the presence of an interpreter is read.
- It is an environment of its own: prime-rl pins other releases of torch and
  transformers than this project.
- Variables that steer the owner's Python or its OpenMP do not reach it; what Ray
  says of the GPUs does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.trainer_process import inherited
from rl.config import CampaignConfig
from rl.errors import ConfigurationError
from rl.learner.prime.installation import SCRIPT
from rl.learner.prime.pinned import INSTALL
from rl.learner.prime.settings import ranks

PRIME_PYTHON_VARIABLE = "RL_PRIME_PYTHON"
REPOSITORY = Path(__file__).resolve().parent.parent
# What prime-rl's own launcher sets for its trainer, and no call of the network.
SET = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True, slots=True)
class PrimeCommand:
    """How to start prime-rl's interpreter."""

    inspect: tuple[str, ...]
    train: tuple[str, ...]
    environment: Mapping[str, str]


def prime_python(environ: Mapping[str, str], repository: Path = REPOSITORY) -> str:
    """The interpreter of prime-rl's environment.

    Raises:
        ConfigurationError: none is named or there, or the one named is missing.
    """
    named = environ.get(PRIME_PYTHON_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(
                f"no such interpreter: {named}", PRIME_PYTHON_VARIABLE, INSTALL
            )
        return named
    # A submitted job runs in a copy of the sources: environments lie beside the one
    # that runs this.
    for place in (repository, Path(sys.prefix).parent):
        local = place / ".venv-prime" / "bin" / "python"
        if local.is_file():
            return str(local)
    raise ConfigurationError(
        "trainer.backend = 'prime-rl' needs prime-rl's own environment",
        PRIME_PYTHON_VARIABLE,
        f"{INSTALL}, or choose trainer.backend = 'peft'",
    )


def prime_command(
    config: CampaignConfig, config_file: Path, environ: Mapping[str, str]
) -> PrimeCommand:
    """The commands of the campaign's trainer.

    Args:
        config: the campaign's.
        config_file: prime-rl's own configuration.
        environ: the environment to build on.

    Raises:
        ConfigurationError: as `prime_python`.
    """
    python = prime_python(environ)
    return PrimeCommand(
        inspect=(python, str(SCRIPT)),
        train=(
            *(python, "-m", "torch.distributed.run", "--standalone"),
            *("--role=trainer", f"--nproc-per-node={ranks(config)}"),
            *("-m", "prime_rl.trainer.rl.train", "@", str(config_file)),
        ),
        environment={**inherited(environ), **SET},
    )
