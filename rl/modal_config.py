"""What is rented on Modal, a table of `rl.config`'s tree.

Invariants:
- Nothing here is a secret: secrets are named, and live at Modal.
- What Modal's client does not check is checked here: a function's bound, the number of
  GPUs, the form of an image's digest.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, model_validator

from rl.values import Flag, Seconds, Section, Text

MAX_FUNCTION_S: Final = 86_400.0  # Modal ends any function after 24 h
MAX_GPUS: Final = 8  # of one container
# A machine of eight H100s has less than this; a larger figure is a slip of the unit.
MAX_CPUS: Final = 192
MAX_MEMORY_GIB: Final = 2_048
MAX_NODES: Final = 64
# An app's name is PREFIX-RUN.aN, and Modal takes 63 characters.
MAX_APP_PREFIX: Final = 24

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
AppPrefix = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]*$", max_length=MAX_APP_PREFIX)]
PinnedImage = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}$")]
Cores = Annotated[int, Field(gt=0, le=MAX_CPUS, strict=True)]
Memory = Annotated[int, Field(gt=0, le=MAX_MEMORY_GIB, strict=True)]
Nodes = Annotated[int, Field(gt=0, le=MAX_NODES, strict=True)]
GpuName = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9-]*!?$")]


class ModalConfig(Section):
    """Where a campaign is rented, and what of."""

    workspace: Name | None = Field(
        default=None,
        description="workspace that pays; nothing is launched while it is not named, or is not "
        "the one that is logged in",
    )
    environment: Name = Field(default="main", description="Modal environment of that workspace")
    profile: Name | None = Field(
        default=None, description="profile of ~/.modal.toml that must be active; any if absent"
    )
    app: AppPrefix = Field(
        default="terminal-rl",
        description="prefix of the apps' names; cost reports are searched for terminal-rl",
    )
    gpu: GpuName = Field(
        default="H100!", description="GPU of trainer and replicas; with ! never a better one"
    )
    base_image: PinnedImage = Field(
        default="python:3.12.13-slim-bookworm@sha256:"
        "4766d8b510c428e595d74b9cc5bbb2fae8e26316fffb4adc89908d79aacd58a2",
        description="image that the environments are built on, by digest: Debian bookworm "
        "with Python 3.12 as `python`",
    )
    state_volume: Name = Field(
        default="terminal-rl-state", description="volume of runs, gates and task packages"
    )
    model_volume: Name = Field(default="terminal-rl-models", description="volume of models")
    secrets: tuple[Name, ...] = Field(
        default=("terminal-rl",),
        description="names of Modal secrets: a token for the sandboxes (MODAL_TOKEN_ID, "
        "MODAL_TOKEN_SECRET), HF_TOKEN for a gated model",
    )
    regions: tuple[Text, ...] = Field(default=(), description="regions; any if empty")
    cpus: Cores = Field(default=16, description="cores of a container that trains")
    memory_gib: Memory = Field(default=96, description="memory of a container that trains, GiB")
    worker_cpus: Cores = Field(default=6, description="cores of a held-out worker")
    worker_memory_gib: Memory = Field(default=32, description="memory of a held-out worker, GiB")
    commit_s: Seconds = Field(default=120.0, description="between two commits of the volume, s")
    dashboard: Flag = Field(
        default=False,
        description="tell the address of a tunnel to Ray's dashboard, which wants "
        "the cluster's token",
    )
    nodes: Nodes = Field(
        default=1,
        description="containers of a run; several take all GPUs of their machines each",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> ModalConfig:
        if len(set(self.secrets)) != len(self.secrets):
            raise ValueError("secrets names one twice")
        if self.state_volume == self.model_volume:
            raise ValueError("state_volume and model_volume are two volumes")
        return self
