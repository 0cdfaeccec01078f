"""What the reference campaign asks of Modal, field by field, on the wire."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from harbor.environments.base import BaseEnvironment
from harbor.models.task.config import VerifierConfig
from harbor.models.trial.config import ResourceMode
from harbor.models.trial.paths import TrialPaths

from rl.config import SandboxConfig
from rl.config_file import load_config
from rl.errors import ConfigurationError, InfrastructureError, TaskPackageError
from sandboxes.bank.task import IMAGE
from sandboxes.modal_image import PINNED, pinned_dockerfile
from sandboxes.modal_sandbox import (
    ARGUMENTS_LIMIT_BYTES,
    RequestedModalEnvironment,
    label,
    reap_orphans,
)
from sandboxes.pace import Pace
from sandboxes.provider import SandboxProvider, lifetime
from sandboxes.tasks import TaskPackage, load_package
from tests.support.modal_server import FILE_TOOL, ModalBooks, ModalServer
from tests.support.packages import write_package

ROOT = Path(__file__).resolve().parents[3]
CAMPAIGN = "final-20261129-1200"
ATTEMPT = "g00001.0-a3"


@pytest.fixture(scope="module")
def server() -> Iterator[ModalServer]:
    from modal import Client

    with pytest.MonkeyPatch.context() as environment, ModalServer() as server:
        environment.setenv("MODAL_SERVER_URL", server.url)
        environment.setenv("MODAL_TOKEN_ID", "ak-1")
        environment.setenv("MODAL_TOKEN_SECRET", "as-1")
        environment.setenv("MODAL_SANDBOX_V2", "1")
        yield server
        Client.from_env().close()


@pytest.fixture
def books(server: ModalServer) -> ModalBooks:
    server.books = ModalBooks()
    return server.books


@pytest.fixture
def package(tmp_path: Path) -> TaskPackage:
    return load_package(write_package(tmp_path / "bank"))


def provider(**changes: Any) -> SandboxProvider:
    config = load_config(ROOT / "configs" / "final.toml")
    return SandboxProvider(
        config.sandbox.model_copy(update={"creates_per_s": 1000.0, **changes}),
        lifetime(config.episodes.deadline_s),
        CAMPAIGN,
    )


def started(env: BaseEnvironment) -> BaseEnvironment:
    asyncio.run(env.start(False))
    return env


def tags_of(request: Any) -> dict[str, str]:
    return {tag.tag_name: tag.tag_value for tag in request.tags}


def test_every_requested_field(books: ModalBooks, package: TaskPackage, tmp_path: Path) -> None:
    started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    (sandbox,) = books.sandboxes
    asked = sandbox.request.definition
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (125, 128)
    assert (asked.resources.milli_cpu_max, asked.resources.memory_mb_max) == (0, 0)
    assert asked.resources.gpu_config.count == 0
    assert asked.resources.ephemeral_disk_mb == 0
    assert (asked.timeout_secs, asked.idle_timeout_secs) == (2400, 600)
    assert asked.name == f"{CAMPAIGN}-{ATTEMPT}"
    assert asked.image_id == "im-1"
    assert list(asked.entrypoint_args) == ["sh", "-c", "sleep infinity"]
    blocked = asked.network_access.NetworkAccessType.BLOCKED
    assert asked.network_access.network_access_type == blocked
    assert not asked.open_ports.ports and not asked.volume_mounts and not asked.secret_ids
    assert sandbox.request.app_id == "ap-1"
    assert tags_of(sandbox.request) == {
        "campaign": CAMPAIGN,
        "attempt": ATTEMPT,
        "task": "rm-old",
        "role": "agent",
    }
    (app,) = books.of("AppGetOrCreate")
    assert app.app_name == "terminal-rl-sandboxes"


def test_requests_are_the_configurations_not_the_packages(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    source = provider(cpus=0.25, memory_mb=192)
    started(source.create(package, ATTEMPT, tmp_path / "scratch"))
    asked = books.sandboxes[0].request.definition.resources
    assert (asked.milli_cpu, asked.memory_mb) == (250, 192)
    assert (asked.milli_cpu_max, asked.memory_mb_max) == (0, 0)


def test_image_is_the_packages_dockerfile_on_the_pinned_base(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    (lines,) = [
        list(each.image.dockerfile_commands)
        for each in books.of("ImageGetOrCreate")
        if "COPY files/ /app/" in each.image.dockerfile_commands
    ]
    (base,) = [line for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"FROM debian:\S+-slim@sha256:[0-9a-f]{64}", base)
    versions = [line for line in lines if re.fullmatch(r"\s+[a-z0-9-]+=\S+ \\", line)]
    assert len(versions) >= 10
    assert lines.index(base) < lines.index("WORKDIR /app")


@pytest.mark.parametrize(
    ("dockerfile", "replaced"),
    [
        (f"FROM {IMAGE}\nRUN true\n", True),
        ("# x\nfrom docker.io/library/debian:bookworm-slim\n", True),
        ("FROM debian:bookworm-slim@sha256:" + "a" * 64, False),
        ("FROM ubuntu:24.04\n", False),
        ("FROM debian:bookworm-slim\nFROM debian:bookworm-slim\n", False),
        ("FROM debian:bookworm-slim AS build\n", False),
    ],
)
def test_only_a_floating_base_that_is_stood_for_is_replaced(
    dockerfile: str, replaced: bool
) -> None:
    text = pinned_dockerfile(dockerfile)
    assert (text is not None) == replaced
    if text is not None:
        assert text.replace(PINNED.read_text().rstrip(), "X") == re.sub(
            r"(?i)from \S+", "X", dockerfile
        )


def test_lifetime_lies_above_the_episodes_deadline() -> None:
    config = load_config(ROOT / "configs" / "final.toml")
    assert lifetime(config.episodes.deadline_s) >= config.episodes.deadline_s + 600
    with pytest.raises(ConfigurationError, match="lifetime must be within 86400") as caught:
        SandboxProvider(config.sandbox, lifetime(86_000.0))
    assert "85800" in caught.value.remedy


def test_separate_grader_asks_for_the_same(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    verifier = VerifierConfig.model_validate(
        {"environment": {"cpus": 4, "memory_mb": 8192, "docker_image": "grader:1"}}
    )
    config = package.config.model_copy(update={"verifier": verifier})
    separate = replace(package, config=config)
    started(provider().create_grader(separate, ATTEMPT, tmp_path / "scratch"))
    (sandbox,) = books.sandboxes
    asked = sandbox.request.definition
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (125, 128)
    assert (asked.resources.milli_cpu_max, asked.resources.memory_mb_max) == (0, 0)
    assert (asked.timeout_secs, asked.idle_timeout_secs) == (2400, 600)
    assert asked.name == f"{CAMPAIGN}-{ATTEMPT}-grader"
    assert tags_of(sandbox.request)["role"] == "grader"
    lines = [
        line for each in books.of("ImageGetOrCreate") for line in each.image.dockerfile_commands
    ]
    assert "FROM grader:1" in lines
    with pytest.raises(TaskPackageError, match="no separate verifier"):
        provider().create_grader(package, ATTEMPT, tmp_path / "scratch")


def test_harbors_own_run_asks_for_no_cap_either(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "environment_dir": package.environment_dir,
        "environment_name": "x",
        "session_id": "x__1",
        "trial_paths": TrialPaths(tmp_path),
        "task_env_config": package.config.environment.model_copy(update={"memory_mb": 4096}),
    }
    started(RequestedModalEnvironment(**options))
    asked = books.sandboxes[0].request.definition
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (125, 128)
    assert (asked.resources.milli_cpu_max, asked.resources.memory_mb_max) == (0, 0)
    assert (asked.timeout_secs, asked.idle_timeout_secs) == (3600, 600)
    with pytest.raises(ConfigurationError, match="never caps"):
        RequestedModalEnvironment(**options, cpu_enforcement_policy=ResourceMode.LIMIT)


class CountedPace(Pace):
    """Notes how many creations Modal has seen whenever a turn is asked for."""

    def __init__(self, books: ModalBooks) -> None:
        super().__init__(1.0)
        self.seen: list[int] = []
        self._books = books

    async def turn(self) -> None:
        self.seen.append(len(self._books.of("SandboxCreateV2")))


def test_every_creation_has_a_turn_second_tries_included(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    source = provider()
    pace = source._pace = CountedPace(books)
    books.failing_creates = 1
    started(source.create(package, "a-1", tmp_path / "scratch"))
    started(source.create(package, "a-2", tmp_path / "scratch"))
    assert pace.seen == [0, 1, 2] and len(books.sandboxes) == 2


def test_turns_are_a_rates_inverse_apart() -> None:
    now = 100.0
    pace = Pace(4.0, lambda: now)
    assert [pace.reserve() for _ in range(4)] == [0.0, 0.25, 0.5, 0.75]
    now = 100.6
    assert pace.reserve() == pytest.approx(0.4)
    now = 200.0
    assert [pace.reserve() for _ in range(2)] == [0.0, 0.25]


def test_creators_share_the_rate() -> None:
    config = SandboxConfig(provider="modal", creates_per_s=8.0)
    pace = SandboxProvider(config, campaign=CAMPAIGN, creators=4)._pace
    assert pace.reserve() == 0.0
    assert pace.reserve() == pytest.approx(0.5, abs=0.1)


def test_command_and_its_limits_arrive_as_given(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    env = started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    done = asyncio.run(env.exec("echo 'a b'", cwd="/app", timeout_sec=7))
    assert done.return_code == 0
    sent = books.execs[-1]
    assert list(sent.command_args) == ["bash", "-c", "echo 'a b'"]
    assert (sent.workdir, sent.timeout_secs) == ("/app", 7)


@pytest.mark.parametrize("user", [None, "root"])
@pytest.mark.parametrize("length", [60_000, 66_000, 500_000])
def test_no_command_exceeds_modals_arguments(
    books: ModalBooks, package: TaskPackage, tmp_path: Path, length: int, user: str | None
) -> None:
    env = started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    command = "echo '" + "é" * (length // 2) + "'"
    asyncio.run(env.exec(command, user=user))
    assert max(sum(len(a.encode()) for a in e.command_args) for e in books.execs) <= (
        ARGUMENTS_LIMIT_BYTES
    )
    last = " ".join(books.execs[-1].command_args)
    if length > ARGUMENTS_LIMIT_BYTES:
        ((path, content),) = books.files.items()
        assert content == command.encode()
        assert f"bash {path}" in last and f"rm -f {path}" in last
    else:
        assert books.files == {} and "éé" in last


def test_large_file_is_uploaded_in_pieces_beside_the_arguments(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    env = started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    content = bytes(range(256)) * 20_000
    (tmp_path / "large").write_bytes(content)
    asyncio.run(env.upload_file(tmp_path / "large", "/tests/large"))
    assert books.files == {"/tests/large": content}
    assert len(books.pieces) > 1
    (tool,) = [each for each in books.execs if each.command_args[0] == FILE_TOOL]
    assert sum(map(len, tool.command_args)) < 1000


def test_stop_terminates_the_sandbox(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    env = started(provider().create(package, ATTEMPT, tmp_path / "scratch"))
    assert not books.sandboxes[0].terminated
    asyncio.run(env.stop(delete=True))
    assert books.sandboxes[0].terminated


def test_only_the_campaigns_orphans_are_terminated(
    books: ModalBooks, package: TaskPackage, tmp_path: Path
) -> None:
    source = provider()
    other = SandboxProvider(source.config, 3600.0, "another")
    for owner, attempt in ((source, "a-1"), (source, "a-2"), (source, "a-3"), (other, "a-1")):
        started(owner.create(package, attempt, tmp_path / "scratch"))
    books.sandboxes[2].terminated = True
    assert source.reap(live={"a-2"}) == ["a-1"]
    assert [each.terminated for each in books.sandboxes] == [True, False, True, False]
    (listed, *_) = books.of("SandboxListV2")
    assert listed.app_id == "ap-1" and tags_of(listed) == {"campaign": CAMPAIGN}
    assert not listed.include_finished
    assert source.reap() == ["a-2"]
    assert not books.sandboxes[3].terminated


def test_modal_that_refuses_is_infrastructure(
    server: ModalServer, books: ModalBooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise GRPCError(Status.PERMISSION_DENIED, "no")

    answers = server.answers
    monkeypatch.setitem(answers, "SandboxListV2", fail)
    with pytest.raises(InfrastructureError, match="can't be looked through"):
        asyncio.run(reap_orphans(CAMPAIGN))


def test_local_sandboxes_leave_no_orphans() -> None:
    assert SandboxProvider(SandboxConfig(), campaign=CAMPAIGN).reap() == []


@pytest.mark.parametrize("text", ["a/b", "", "x" * 64, "é", "a b"])
def test_label_is_valid_and_tells_apart(text: str) -> None:
    from modal._utils.name_utils import check_object_name, check_tag_dict

    check_tag_dict({"k": label(text)})
    check_object_name(label(text), "Sandbox")
    assert label(text) != label(text + "/") and label(text) == label(text)


def test_label_leaves_what_fits() -> None:
    assert label(ATTEMPT) == ATTEMPT
