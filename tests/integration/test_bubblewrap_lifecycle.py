"""Real bubblewrap sandboxes: how they start and end, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.errors import ConfigurationError, SandboxError
from sandboxes import cgroups, launch
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.tasks import TaskPackage, load_package
from tests.support.packages import write_package
from tests.support.sandbox import create, daemons, output, started, zygotes

ROOT = Path(__file__).resolve().parents[2]
ORDINARY_USER = 65534
ENDS_S = 20.0  # on a busy machine
USERS = (0, ORDINARY_USER) if os.geteuid() == 0 else (os.geteuid(),)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> TaskPackage:
    return load_package(write_package(tmp_path_factory.mktemp("packages")))


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
    assert _ends(lambda: daemons(os.getpid()) == [])


def test_failing_run_step_leaves_nothing(tmp_path: Path) -> None:
    path = write_package(tmp_path / "packages")
    with (path / "environment" / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("RUN echo broken; exit 3\n")
    env = create(load_package(path), tmp_path)
    with pytest.raises(SandboxError, match=r"(?s)exit code 3.*broken"):
        asyncio.run(env.start(False))
    assert daemons(os.getpid()) == []


# What a process of another user needs is imported before it gives up being root.
BECOME = textwrap.dedent(
    """
    import asyncio, os, sys
    import concurrent.futures.thread, encodings.idna, encodings.unicode_escape
    from pathlib import Path
    from rl.config import SandboxConfig
    from sandboxes.grading import grade
    from sandboxes.provider import SandboxProvider
    from sandboxes.tasks import load_package

    if (user := int(sys.argv[3])) != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    package = load_package(Path(sys.argv[1]))
    scratch = Path(sys.argv[2])
    """
)

OWNER = BECOME + textwrap.dedent(
    """
    async def main():
        provider = SandboxProvider(SandboxConfig())
        for n in range(3):
            env = provider.create(package, f"owner-{n}", scratch)
            await env.start(False)
            await env.exec("setsid sleep 909 & echo")
            globals()[f"env{n}"] = env
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
    """
)


def _start_as(user: int, script: str, package: Path, scratch: Path) -> subprocess.Popen[str]:
    """Run `script` as `user`, who can read the package and write to the folder `scratch`."""
    scratch.mkdir()
    for folder in (package, *package.parents, *scratch.parents):
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)
    scratch.chmod(0o777)
    return subprocess.Popen(
        [sys.executable, "-c", script, str(package), str(scratch), str(user)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(scratch)},
    )


@pytest.mark.parametrize("user", USERS)
def test_killed_owner_leaves_nothing(package: TaskPackage, tmp_path: Path, user: int) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    files = set(os.listdir(tempfile.gettempdir()))
    owner = _start_as(user, OWNER, package.path, tmp_path / "scratch")
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(daemons(owner.pid)) == 3
        assert user != 0 or cgroups.owner() is None or _groups(owner.pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=10)
    assert _ends(lambda: b"sleep 909" not in subprocess.check_output(["ps", "ax", "-o", "cmd"]))
    assert _ends(lambda: daemons(owner.pid) == [])
    assert _ends(lambda: _groups(owner.pid) == [])
    assert _ends(lambda: Path("/proc/self/mountinfo").read_text() == mounts)
    left = set(os.listdir(tempfile.gettempdir())) - files
    assert [name for name in left if "owner-" in name] == []


def _ends(gone: Callable[[], bool]) -> bool:
    """Whether it is gone, at last: how soon is what `benchmarks.sandboxes` measures."""
    limit = time.monotonic() + ENDS_S
    while not gone():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def _groups(owner: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/{cgroups.PREFIX}{owner}-*"))


def test_missing_bubblewrap_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="apt-get install bubblewrap"):
        BubblewrapEnvironment.preflight()


def test_sysctls_are_guarded_where_ids_do_not(
    package: TaskPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "can_map_ids", lambda: False)

    async def main() -> None:
        async with started(package, tmp_path) as env:
            assert await output(env, "echo ok; echo x > /proc/sys/kernel/hostname || echo no") == (
                "ok\nbash: line 1: /proc/sys/kernel/hostname: Read-only file system\nno\n"
            )

    asyncio.run(main())


def test_bubblewrap_that_fails_is_heard(
    package: TaskPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_ISOLATE", ("--no-such-option",))
    with pytest.raises(SandboxError) as caught:
        asyncio.run(create(package, tmp_path).start(False))
    assert "bwrap: Unknown option --no-such-option" in caught.value.remedy
    assert daemons(os.getpid()) == []


def test_dead_zygote_takes_its_sandboxes_along_and_is_replaced(
    package: TaskPackage, tmp_path: Path
) -> None:
    async def main() -> None:
        async with started(package, tmp_path, "before") as env:
            (zygote,) = zygotes(os.getpid())
            os.kill(zygote, signal.SIGKILL)
            with pytest.raises(SandboxError, match="sandbox is gone"):
                await env.run("sleep 20", timeout_s=20)
        async with started(package, tmp_path, "after") as env:
            assert await output(env, "echo ok") == "ok\n"

    asyncio.run(main())


ORDINARY = BECOME + textwrap.dedent(
    """
    async def main():
        env = SandboxProvider(SandboxConfig()).create(package, "ordinary", scratch)
        await env.start(False)
        try:
            assert env.limits_in_force["ids"].startswith("one user id")
            await env.upload_dir(package.path / "solution", "/solution")
            await env.download_dir("/solution", scratch / "back")
            solution = (package.path / "solution" / "solve.sh").read_bytes()
            assert (scratch / "back" / "solve.sh").read_bytes() == solution
            late = await env.run("setsid sleep 910 & sleep 911", timeout_s=0.5, merged=True)
            assert late.timed_out
            assert (await env.run("kill -9 -1", timeout_s=20)).exit_code == 137
            other = await env.run("id", user="nobody", timeout_s=20)
            assert b"one user only" in other.streams[1].head
            assert (await grade(env, package, 30)).reward == 1.0
            assert (await env.run("rm /app/*; id -u", timeout_s=20)).exit_code == 0
            assert (await grade(env, package, 30)).reward == 0.0
        finally:
            await env.stop()
        print("fine")

    asyncio.run(main())
    """
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become an ordinary user")
def test_ordinary_user_has_a_working_sandbox(package: TaskPackage, tmp_path: Path) -> None:
    run = _start_as(ORDINARY_USER, ORDINARY, package.path, tmp_path / "scratch")
    out, err = run.communicate(timeout=120)
    assert out == "fine\n", err
