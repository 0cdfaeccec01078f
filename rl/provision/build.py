"""The Modal app of one submission: its functions, images, volumes and secrets.

Invariants:
- One app is one submission: its name is unique, and by its name and tags Modal can be asked
  what exists of it.
- Every field that Modal would default is given, so that a run asks for what its
  configuration says and for nothing else.
- A call is never retried by Modal: it restarts a preempted one on the same input, and the
  container finds its run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import modal

from rl.config import CampaignConfig
from rl.errors import ConfigurationError
from rl.provision import remote
from rl.provision.functions import FunctionName, FunctionSpec, functions, modal_of
from rl.provision.images import cpu_image, gpu_image
from rl.provision.order import CLAIMS, MODELS, STATE

NAME_LIMIT: Final = 63  # of Modal's names and tags
VOLUME_VERSION: Final = 2  # many containers commit at the same time
STARTUP_S: Final = 1_800  # pulling an image of some 20 GB, on a bad day
TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"


@dataclass(frozen=True, slots=True)
class Built:
    """An app that is not deployed yet.

    Attributes:
        app: what is deployed.
        functions: by name; hydrated by the deployment.
    """

    app: modal.App
    functions: Mapping[FunctionName, modal.Function[..., str, str]]


def app_name(config: CampaignConfig, submission_id: str) -> str:
    """The name of a submission's app.

    Raises:
        ConfigurationError: it is longer than Modal takes.
    """
    name = f"{modal_of(config).app}-{submission_id}"
    if len(name) > NAME_LIMIT:
        raise ConfigurationError(
            f"the app's name would have {len(name)} characters, and Modal takes {NAME_LIMIT}",
            name,
            "choose a shorter --run-id",
        )
    return name


def claims_name(config: CampaignConfig) -> str:
    """The name of the Dict that says which call has which submission."""
    return f"{modal_of(config).app}-{CLAIMS}"


def build(
    config: CampaignConfig,
    name: str,
    tags: Mapping[str, str],
    names: tuple[FunctionName, ...],
    sources: Path,
    cluster_token: str = "",
) -> Built:
    """The app `name` with some of the functions.

    Args:
        config: of the campaign.
        name: of the app.
        tags: of the app.
        names: which functions it has.
        sources: the directory with the sources, for the images.
        cluster_token: of a Ray cluster over several machines; becomes a secret of the app.

    Raises:
        ConfigurationError: GPUs or bounds can't be had.
    """
    specs = functions(config, names)
    app = modal.App(name, tags=dict(tags), include_source=False)
    cpu = cpu_image(config, sources)
    gpu = gpu_image(config, sources) if any(spec.gpu for spec in specs) else cpu
    shared = _shared(config)
    made: dict[FunctionName, modal.Function[..., str, str]] = {}
    for spec in specs:
        raw: Any = getattr(remote, spec.name)
        secrets = [*shared["secrets"]]
        if spec.nodes > 1:
            secrets.append(modal.Secret.from_dict({TOKEN_VARIABLE: cluster_token}))
            raw = modal.clustered(size=spec.nodes)(raw)
        image = cpu if spec.gpu is None else gpu
        made[spec.name] = _declare(app, spec, image, shared | {"secrets": secrets})(raw)
    return Built(app, made)


def volumes(config: CampaignConfig, create: bool = False) -> dict[str, modal.Volume]:
    """The volumes by where they are mounted."""
    table = modal_of(config)
    return {
        str(path): modal.Volume.from_name(
            name,
            environment_name=table.environment,
            create_if_missing=create,
            version=VOLUME_VERSION,
        )
        for path, name in ((STATE, table.state_volume), (MODELS, table.model_volume))
    }


def secrets(config: CampaignConfig) -> list[modal.Secret]:
    """The secrets that are named; they are made by a person, never here."""
    table = modal_of(config)
    return [
        modal.Secret.from_name(name, environment_name=table.environment) for name in table.secrets
    ]


def _shared(config: CampaignConfig) -> dict[str, Any]:
    """What all functions have in common."""
    table = modal_of(config)
    return {
        "volumes": volumes(config),
        "secrets": secrets(config),
        "region": list(table.regions) or None,
    }


def _declare(
    app: modal.App, spec: FunctionSpec, image: modal.Image, shared: Mapping[str, Any]
) -> Callable[[Any], Any]:
    return app.function(
        name=spec.name,
        image=image,
        gpu=spec.gpu,
        cpu=spec.cpus,
        memory=spec.memory_mib,
        timeout=spec.timeout_s,
        startup_timeout=STARTUP_S,
        max_containers=spec.max_containers,
        single_use_containers=True,
        retries=None,
        include_source=False,
        **shared,
    )
