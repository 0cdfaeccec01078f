"""What is asked of Modal for a campaign, field by field, on the wire."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from modal_proto import api_pb2

from rl.learner.prime.pinned import COMMIT
from rl.provision.build import app_name, build
from rl.provision.functions import FunctionName, smoke_overrides
from tests.support.modal_apps import ModalApps
from tests.support.modal_rented import ROOT, TOKEN_SECRET, account, configured
from tests.support.modal_server import ModalServer

NAME = "terminal-rl-run-1.a1"
TAGS = {"campaign": "run-1", "attempt": "1"}
CAMPAIGN: tuple[FunctionName, ...] = ("final_train", "heldout_worker", "final_continue")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    (path / "submitted.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def campaign(server: ModalServer, sources: Path) -> ModalApps:
    """The reference campaign, deployed once."""
    return deployed(server, sources, CAMPAIGN)


def deployed(
    server: ModalServer, sources: Path, names: tuple[FunctionName, ...], **changes: Any
) -> ModalApps:
    apps = account(server)
    config = configured(**changes)
    built = build(config, NAME, TAGS, names, sources, cluster_token="drawn")
    built.app.deploy(name=NAME, environment_name="main")
    return apps


def test_every_field_of_every_function(campaign: ModalApps) -> None:
    wanted = {
        "final_train": ("H100!", 3, 16_000, 96 * 1024, 33_000, 1),
        "heldout_worker": ("H100!", 1, 6_000, 32 * 1024, 33_000, 2),
        "final_continue": ("", 0, 2_000, 16 * 1024, 67_800, 1),
    }
    assert {request.function.function_name for request in campaign.asked("FunctionCreate")} == set(
        wanted
    )
    for name, expected in wanted.items():
        asked = campaign.function(name)
        need = asked.resources
        gpu = need.gpu_config
        assert expected == (
            gpu.gpu_type,
            gpu.count,
            need.milli_cpu,
            need.memory_mb,
            asked.timeout_secs,
            asked.autoscaler_settings.max_containers,
        )
        assert (need.milli_cpu_max, need.memory_mb_max, need.ephemeral_disk_mb) == (0, 0, 0)
        assert asked.startup_timeout_secs == 1_800
        assert asked.retry_policy.retries == 0
        assert asked.single_use_containers
        assert not asked.scheduler_placement.regions
        assert (asked.module_name, asked.implementation_name) == ("rl.provision.remote", name)
        assert list(asked.secret_ids) == ["st-1"]
        mounts = [(volume.volume_id, volume.mount_path) for volume in asked.volume_mounts]
        assert mounts == [("vo-1", "/state"), ("vo-2", "/models")]
        assert all(volume.allow_background_commits for volume in asked.volume_mounts)
        assert asked._experimental_group_size == 0


def test_the_app_is_found_by_its_name_and_tags(campaign: ModalApps) -> None:
    (made,) = campaign.asked("AppCreate")
    (published,) = campaign.asked("AppPublish")
    assert made.environment_name == "main"
    assert (published.name, dict(published.tags)) == (NAME, TAGS)
    assert published.app_state == api_pb2.APP_STATE_DEPLOYED
    assert app_name(configured(), "run-1.a1") == NAME


def test_preparing_has_no_gpu(server: ModalServer, sources: Path) -> None:
    apps = deployed(server, sources, ("prepare_account",))
    asked = apps.function("prepare_account")
    assert asked.resources.gpu_config.count == 0 and not asked.resources.gpu_config.gpu_type
    assert asked.timeout_secs == 3_600
    lines = apps.dockerfile(asked.image_id)
    assert "engine-gpu" not in lines and "prime-rl" not in lines


def test_the_short_run_has_two_gpus_and_the_bound_of_its_configuration(
    server: ModalServer, sources: Path
) -> None:
    apps = account(server)
    given = {key.replace(".", "__"): value for key, value in smoke_overrides(2, 32).items()}
    build(configured("smoke", **given), NAME, TAGS, ("train",), sources).app.deploy(
        name=NAME, environment_name="main"
    )
    asked = apps.function("train")
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == ("H100!", 2)
    assert (asked.timeout_secs, asked.autoscaler_settings.max_containers) == (6_000, 1)


def test_several_machines_are_one_cluster_with_a_token_of_its_own(
    server: ModalServer, sources: Path
) -> None:
    wide = {"modal__nodes": 2, "engine__replicas": 14, "heldout__shards": 14}
    apps = deployed(server, sources, ("final_cluster",), **wide)
    asked = apps.function("final_cluster")
    assert asked._experimental_group_size == 2 and asked.i6pn_enabled
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == ("H100!", 8)
    assert asked.autoscaler_settings.max_containers == 2
    own = next(request for request in apps.asked("SecretGetOrCreate") if request.env_dict)
    assert dict(own.env_dict) == {"RAY_AUTH_TOKEN": "drawn"}
    assert list(asked.secret_ids) == ["st-1", "st-of-app"]


def test_a_region_and_another_environment_are_asked_for(server: ModalServer, sources: Path) -> None:
    apps = account(server)
    apps.environments.add("lab")
    config = configured(modal__regions=["us-east"], modal__environment="lab")
    build(config, NAME, TAGS, ("final_train",), sources).app.deploy(
        name=NAME, environment_name="lab"
    )
    assert list(apps.function("final_train").scheduler_placement.regions) == ["us-east"]
    for name in ("SecretGetOrCreate", "VolumeGetOrCreate", "AppCreate"):
        assert {request.environment_name for request in apps.asked(name)} == {"lab"}


def test_everything_in_an_image_is_pinned(campaign: ModalApps) -> None:
    lines = campaign.dockerfile(campaign.function("final_train").image_id).splitlines()
    config = configured()
    assert config.modal is not None
    assert lines[0] == f"FROM {config.modal.base_image}" and "@sha256:" in lines[0]
    assert {line for line in lines if line.startswith("FROM ")} == {lines[0], "FROM base"}
    text = "\n".join(lines)
    assert f"git checkout {COMMIT}" in text and "uv sync --frozen" in text
    installs = [line for line in lines if "pip install" in line or "pip sync" in line]
    assert len(installs) == 4
    assert all("--require-hashes" in line for line in installs)
    assert "snapshot.debian.org/archive/debian/20261128T030000Z" in text
    packages = text.split("--no-install-recommends ")[1].split(" && ")[0].split()
    assert packages and all("=" in package for package in packages)
    assert "ENV RAY_AUTH_MODE=token" in lines


def test_requirement_files_are_the_repositorys_and_sources_come_last(campaign: ModalApps) -> None:
    uploaded = {
        file.filename: file.sha256_hex
        for request in campaign.asked("MountGetOrCreate")
        for file in request.files
    }
    for name in ("uv.txt", "main.txt", "gpu.txt", "engine-gpu.txt"):
        content = (ROOT / "requirements" / name).read_bytes()
        assert uploaded[f"/requirements/{name}"] == hashlib.sha256(content).hexdigest()
    assert "/opt/terminal-rl/submitted.json" in uploaded
    assert "/opt/terminal-rl" not in campaign.dockerfile(
        campaign.function("final_train").image_id
    ).replace("PYTHONPATH=/opt/terminal-rl", "")


def test_the_other_backend_needs_no_prime_rl(server: ModalServer, sources: Path) -> None:
    raw = json.loads(configured().model_dump_json())
    raw["trainer"] |= {"backend": "peft", "prime": None}
    from rl.config_file import parse_config

    apps = account(server)
    build(parse_config(raw, "test"), NAME, TAGS, ("final_train",), sources).app.deploy(
        name=NAME, environment_name="main"
    )
    assert "prime-rl" not in apps.dockerfile(apps.function("final_train").image_id)


def test_no_request_holds_the_token(campaign: ModalApps) -> None:
    assert campaign.created()
    for _, request in campaign.books.calls:
        assert TOKEN_SECRET.encode() not in request.SerializeToString()
