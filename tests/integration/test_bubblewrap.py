"""Real bubblewrap sandboxes: how commands run, and how files move."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rl.errors import ConfigurationError, SandboxError
from sandboxes import launch
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.shells import BubblewrapShell, HarborShell
from sandboxes.tasks import TaskPackage, load_package
from tests.support.packages import write_package
from tests.support.sandbox import create, finished, output, started

type Body = Callable[[BubblewrapEnvironment], Awaitable[None]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> TaskPackage:
    return load_package(write_package(tmp_path_factory.mktemp("packages")))


@pytest.fixture
def inside(package: TaskPackage, tmp_path: Path) -> Callable[[Body], None]:
    """Run an async test body in a fresh sandbox."""

    def run(body: Body) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), started(package, tmp_path) as env:
                await body(env)

        asyncio.run(main())

    return run


# How commands run.


def test_streams_are_apart_and_the_exit_code_is_the_shells(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        done = await env.exec("echo out; echo err >&2; exit 7")
        assert (done.stdout, done.stderr, done.return_code) == ("out\n", "err\n", 7)

    inside(body)


def test_cwd_env_and_user(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        assert await output(env, "pwd") == "/app\n"
        done = await env.exec("echo $X; pwd; id -u", cwd="/tmp", env={"X": "a b"}, user=65534)
        if launch.can_map_ids():
            assert done.stdout == "a b\n/tmp\n65534\n"
        assert (await env.exec("true", cwd="/absent")).return_code == 126

    inside(body)


def test_programs_start_with_every_signal_as_it_is_by_default(
    inside: Callable[[Body], None],
) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        assert await output(env, 'yes | head -1; echo "${PIPESTATUS[0]}"') == "y\n141\n"
        ignored = (await output(env, "grep SigIgn /proc/self/status")).split()[1]
        assert int(ignored, 16) & 0x7FFFFFFF == 0  # the C library keeps 32 and 33 for itself

    inside(body)


def test_file_is_read_if_it_is_one(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        await output(
            env, "seq 100000 > long; mkdir d; mkfifo p; ln -s long l; > empty; chmod 0 long"
        )
        whole = "".join(f"{number}\n" for number in range(1, 100_001)).encode()
        assert await env.read_file("/app/long", 1 << 20) == whole
        assert await env.read_file("long", 1000) == whole[:1000]
        assert await env.read_file("empty", 10) == b""
        for name in ("absent", "d", "p", "l", "/dev/null", "empty/x", "d/x"):
            assert await env.read_file(name, 10) is None, name

    inside(body)


def test_nothing_of_the_owner_shows_in_process_1(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        assert await output(env, "tr -d '\\0' < /proc/1/cmdline; cat /proc/1/comm") == (
            "sandbox-initsandbox-init\n"
        )
        for name in ("root", "cwd", "exe", "fd", "environ", "maps"):
            assert "Permission denied" in await output(
                env, f"ls /proc/1/{name}/ ; cat /proc/1/{name}"
            )

    inside(body)


def test_shell_interleaves_cuts_and_replaces_bad_utf8(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        shell = BubblewrapShell(env)
        done = await shell.run("echo a; echo b >&2; echo c", 10, 1000)
        assert done.output == "a\nb\nc\n"
        assert (await shell.run(r"printf '\xff\x00z'", 10, 1000)).output == "\ufffd\0z"
        flood = await shell.run("yes | head -c 200000000", 60, 1000)
        assert len(flood.output) < 1100
        assert re.search(r"\[\.\.\. 1999990\d\d bytes cut \.\.\.\]", flood.output)

    inside(body)


def test_unusual_commands_are_answered(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        assert (await finished(env, "echo \ud800", 10)).streams[0].text() == "?\n"
        assert (await finished(env, "echo \0", 10)).exit_code == 126
        assert (await finished(env, "true " + "x" * 300_000, 10)).exit_code == 126
        assert (await finished(env, "", 10)).exit_code == 0
        assert (await finished(env, "if then (", 10)).exit_code == 2
        assert (await finished(env, "read x; cat; echo no input", 10)).exit_code == 0

    inside(body)


def test_timeout_returns_what_was_printed_and_kills_setsid_children(
    inside: Callable[[Body], None],
) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        began = time.monotonic()
        tree = "setsid bash -c 'setsid sleep 901 & sleep 902' & (sleep 903 &) ; echo partial; "
        done = await finished(env, tree + "trap '' TERM; sleep 904", 1.0)
        assert (done.exit_code, done.timed_out) == (124, True)
        assert done.streams[0].text() == "partial\n"
        assert time.monotonic() - began < 5
        assert "sleep 90" not in await output(env, "ps ax -o cmd | grep '[s]leep'")

    inside(body)


def test_background_job_neither_holds_the_call_nor_dies_of_it(
    inside: Callable[[Body], None],
) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        began = time.monotonic()
        loop = "(while sleep 0.05; do echo noise; date +%s%N > /tmp/alive; done) & echo started"
        assert (await output(env, loop)).startswith("started\n")
        assert time.monotonic() - began < 3
        await asyncio.sleep(0.5)
        first = await output(env, "cat /tmp/alive")
        await asyncio.sleep(0.5)
        assert await output(env, "cat /tmp/alive") != first

    inside(body)


def test_many_commands_at_once(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        began = time.monotonic()
        texts = await asyncio.gather(*(output(env, f"sleep 1; echo {n}") for n in range(20)))
        assert texts == [f"{n}\n" for n in range(20)]
        assert time.monotonic() - began < 10

    inside(body)


def test_kill_all_signals_spare_the_daemon(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        assert (await finished(env, "kill -9 -1; echo survived", 10)).exit_code == 137
        # Its own supervisor last: what a command does after that runs beside the next one.
        await output(env, "kill -9 1; kill -TERM 1; kill -STOP 1; pkill -9 python; kill $PPID")
        assert await output(env, "echo alive") == "alive\n"

    inside(body)


def test_cancelled_command_is_killed(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        task = asyncio.create_task(output(env, "sleep 905", 60))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(50):
            if "sleep 905" not in await output(env, "ps ax -o cmd | grep '[s]leep'"):
                return
            await asyncio.sleep(0.05)
        pytest.fail("the command outlived its caller")

    inside(body)


def test_kill_all_ends_every_process(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        await output(env, "setsid sleep 906 & (setsid nohup sleep 907 &) ; echo")
        await env.kill_all()
        assert "sleep" not in await output(env, "ps ax -o cmd | grep '[s]leep 90'")

    inside(body)


def test_other_environments_shell_has_the_same_meaning(inside: Callable[[Body], None]) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        shell = HarborShell(env)
        done = await shell.run("echo 'it'\"'\"'s'; echo err >&2; exit 3", 10, 1000)
        assert (done.output, done.exit_code) == ("it's\nerr\n", 3)
        late = await shell.run("echo early; setsid sleep 912 & setsid sleep 912", 0.7, 1000)
        assert (late.output, late.exit_code) == ("early\n", 124)
        assert "sleep 912" not in await output(env, "ps ax")
        served = await shell.run("(while sleep 0.05; do echo x; done) & echo up", 10, 1000)
        assert (served.output, served.exit_code) == ("up\n", 0)
        await asyncio.sleep(0.3)
        assert "while sleep" in await output(env, "ps ax")  # nor does what it prints end it
        assert (await shell.run(r"printf '\xff\x00z'; kill -9 $$", 10, 1000)).output == "\ufffd\0z"
        flood = await shell.run("yes | head -c 20000000; exit 5", 60, 1000)
        assert flood.exit_code == 5
        assert re.search(r"y\n\n\[\.\.\. 19999000 bytes cut \.\.\.\]\ny", flood.output)

    inside(body)


def test_other_environment_without_python_has_a_time_limit_too(
    inside: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        shell = HarborShell(env)
        monkeypatch.setattr(shell, "_python", "")
        done = await shell.run("echo 'it'\"'\"'s'; echo err >&2; exit 3", 10, 1000)
        assert (done.output, done.exit_code) == ("it's\nerr\n", 3)
        late = await shell.run("echo early; sleep 30", 1, 1000)
        assert (late.output, late.exit_code) == ("early\n", 124)

    inside(body)


# Files.


def test_trees_go_in_and_out_unchanged(inside: Callable[[Body], None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "big").write_bytes(os.urandom(3 << 20))
    (source / "name with\nnewline").write_text("x")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)

    async def body(env: BubblewrapEnvironment) -> None:
        await env.upload_dir(source, "/tmp/in")
        await env.download_dir("/tmp/in", tmp_path / "back")
        await env.download_file("/tmp/in/deep/big", tmp_path / "one" / "big")
        with pytest.raises(SandboxError, match="No such file"):
            await env.download_file("/tmp/absent", tmp_path / "absent")

    inside(body)
    names = {path.relative_to(source) for path in source.rglob("*")}
    assert {path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*")} == names
    big = (source / "deep" / "big").read_bytes()
    assert (tmp_path / "back" / "deep" / "big").read_bytes() == big
    assert (tmp_path / "one" / "big").read_bytes() == big
    assert os.access(tmp_path / "back" / "run.sh", os.X_OK)


def test_links_pipes_and_devices_do_not_come_out(
    inside: Callable[[Body], None], tmp_path: Path
) -> None:
    async def body(env: BubblewrapEnvironment) -> None:
        make = "mkdir d; cd d; ln -s /etc/passwd link; ln -s / root; mkfifo pipe; echo ok > file"
        await output(env, make)
        await env.download_dir("/app/d", tmp_path / "out")
        with pytest.raises(SandboxError, match="not a regular file"):
            await env.download_file("/dev/zero", tmp_path / "zero")

    inside(body)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_link_that_leaves_the_folder_is_not_sent(
    inside: Callable[[Body], None], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "secret").symlink_to("/etc/passwd")

    async def body(env: BubblewrapEnvironment) -> None:
        with pytest.raises(SandboxError, match="symlink leaves"):
            await env.upload_dir(source, "/tmp/in")

    inside(body)


# What it asks for.


def test_network_is_refused_unless_the_owner_allows_it(tmp_path: Path) -> None:
    path = write_package(tmp_path / "packages")
    toml = path / "task.toml"
    toml.write_text(toml.read_text().replace('"no-network"', '"public"'))
    env = create(load_package(path), tmp_path)
    with pytest.raises(ConfigurationError, match="asks for a network"):
        asyncio.run(env.start(False))


def test_two_tasks_with_one_name_do_not_meet(package: TaskPackage, tmp_path: Path) -> None:
    async def main() -> None:
        async with started(package, tmp_path, "same") as one, started(package, tmp_path) as two:
            await output(one, "echo secret > /app/x; echo secret > /dev/shm/x")
            assert await output(two, "cat /app/x /dev/shm/x 2>/dev/null; ls /dev/shm") == ""

    asyncio.run(main())
