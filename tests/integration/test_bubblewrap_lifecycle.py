"""Real bubblewrap sandboxes: how they start and end, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from rl.errors import ConfigurationError, SandboxError
from sandboxes import launch
from sandboxes.bank import write_bank
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.tasks import TaskPackage, load_package
from tests.support.sandbox import create, daemons, output, started

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> TaskPackage:
    return load_package(write_bank(tmp_path_factory.mktemp("bank"), ["rm"], 1, seed=0)[0])


def test_many_are_alive_at_once(package: TaskPackage, tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            envs = [
                await stack.enter_async_context(started(package, tmp_path, f"many-{n}"))
                for n in range(32)
            ]
            texts = await asyncio.gather(*(output(env, "echo $$; ls") for env in envs))
            assert len(texts) == 32

    asyncio.run(main())
    assert daemons(os.getpid()) == []


def test_stop_is_final_and_may_be_repeated(package: TaskPackage, tmp_path: Path) -> None:
    async def main() -> None:
        env = create(package, tmp_path)
        await env.stop(delete=True)
        await env.start(False)
        await output(env, "trap '' TERM; (setsid sleep 908 &); echo")
        await asyncio.gather(env.stop(delete=True), env.stop(delete=True))
        await env.stop(delete=False)
        with pytest.raises(SandboxError, match="not running"):
            await env.exec("true")

    asyncio.run(main())
    assert "sleep 908" not in subprocess.check_output(["ps", "ax", "-o", "cmd"], text=True)


def test_start_that_is_given_up_at_any_moment_leaves_nothing(
    package: TaskPackage, tmp_path: Path
) -> None:
    async def main() -> None:
        for n in range(60):
            env = create(package, tmp_path / str(n))
            starting = asyncio.create_task(env.start(False))
            await asyncio.sleep(n * 0.0005)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            await env.stop(False)

    asyncio.run(main())
    time.sleep(1)
    assert daemons(os.getpid()) == []


def test_failing_run_step_leaves_nothing(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "bank", ["touch"], 1, seed=0)[0]
    with (path / "environment" / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("RUN echo broken; exit 3\n")
    env = create(load_package(path), tmp_path)
    with pytest.raises(SandboxError, match=r"(?s)exit code 3.*broken"):
        asyncio.run(env.start(False))
    assert daemons(os.getpid()) == []


OWNER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from rl.config import SandboxConfig
    from sandboxes.provider import SandboxProvider
    from sandboxes.tasks import load_package

    async def main():
        provider = SandboxProvider(SandboxConfig())
        for n in range(3):
            env = provider.create(load_package(Path(sys.argv[1])), f"owner-{n}", Path(sys.argv[2]))
            await env.start(False)
            await env.exec("setsid sleep 909 & echo")
            globals()[f"env{n}"] = env
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
    """
)


def test_killed_owner_leaves_no_process_or_mount(package: TaskPackage, tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(package.path), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(daemons(owner.pid)) == 3
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=10)
    time.sleep(2)
    assert "sleep 909" not in subprocess.check_output(["ps", "ax", "-o", "cmd"], text=True)
    assert daemons(owner.pid) == []
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_missing_bubblewrap_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="apt-get install bubblewrap"):
        BubblewrapEnvironment.preflight()


@pytest.fixture
def no_system_python(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(launch, "SYSTEM_PYTHONS", ())
    launch.guest_python.cache_clear()
    yield
    launch.guest_python.cache_clear()


@pytest.mark.usefixtures("no_system_python")
def test_python_that_sandboxes_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "can_map_ids", lambda: True)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigurationError, match="apt-get install python3"):
        launch.require_bubblewrap()


@pytest.mark.usefixtures("no_system_python")
def test_running_python_stands_in_where_the_system_has_none(
    package: TaskPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "can_map_ids", lambda: False)

    async def main() -> None:
        async with started(package, tmp_path) as env:
            assert await output(env, "echo ok; echo x > /proc/sys/kernel/hostname || echo no") == (
                "ok\nbash: line 1: /proc/sys/kernel/hostname: Read-only file system\nno\n"
            )

    asyncio.run(main())


ORDINARY = textwrap.dedent(
    """
    import asyncio, os, sys
    import concurrent.futures.thread, encodings.idna, encodings.unicode_escape
    from pathlib import Path
    from rl.config import SandboxConfig
    from sandboxes.gates import gate_all, load_report
    from sandboxes.provider import SandboxProvider
    from sandboxes.tasks import load_folder

    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    packages = load_folder(Path(sys.argv[1]))

    async def main():
        provider = SandboxProvider(SandboxConfig())
        for result in await gate_all(packages, provider):
            assert result.verdict == "passed", result
        env = provider.create(packages[0], "ordinary", Path("/tmp"))
        await env.start(False)
        try:
            for command in ("cat /etc/shadow", "ls /work", "touch /usr/x", "cat /proc/1/environ",
                            "echo x > /proc/sys/kernel/hostname", "unshare -Ur true",
                            "mount -t tmpfs none /mnt"):
                assert (await env.run(command, timeout_s=20)).exit_code != 0, command
            assert (await env.run("kill -9 -1", timeout_s=20)).exit_code == 137
            late = await env.run("setsid sleep 910 & sleep 911", timeout_s=0.5, merged=True)
            assert late.timed_out
            assert (await env.run("id -u; touch /app/x /tmp/y", timeout_s=20)).exit_code == 0
            assert (await env.run("id", user="nobody", timeout_s=20)).exit_code == 126
        finally:
            await env.stop()
        print("fine")

    asyncio.run(main())
    """
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become an ordinary user")
def test_ordinary_user_has_a_working_sandbox(tmp_path_factory: pytest.TempPathFactory) -> None:
    bank = tmp_path_factory.mktemp("ordinary")
    write_bank(bank, [], 6, seed=3)
    for folder in (bank, *bank.parents[: len(bank.parents) - 1]):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY, str(bank)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "fine\n", done.stderr
