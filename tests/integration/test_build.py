"""Real sandboxes made from Dockerfiles: steps, users, archives, layers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rl.errors import SandboxError
from sandboxes import launch
from sandboxes.bubblewrap import BubblewrapEnvironment
from sandboxes.tasks import load_package
from tests.support.packages import write_package
from tests.support.sandbox import create, output


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "terminal-rl" / "layers"


class Recipe:
    """A package whose Dockerfile ends with `steps`."""

    def __init__(self, folder: Path, steps: str) -> None:
        self.folder = folder
        self.path = write_package(folder / "packages")
        self.context = self.path / "environment"
        with (self.context / "Dockerfile").open("a") as dockerfile:
            dockerfile.write(steps)

    @contextlib.asynccontextmanager
    async def started(self, force_build: bool = False) -> AsyncGenerator[BubblewrapEnvironment]:
        """A sandbox of it."""
        env = create(load_package(self.path), self.folder / "scratch")
        await env.start(force_build)
        try:
            yield env
        finally:
            await env.stop()


_EVERY_KIND = (
    "RUN mkdir -m 2750 /srv/d && echo data > /srv/d/file && chown 33:33 /srv/d/file && "
    "chmod 4755 /srv/d/file && ln /srv/d/file /srv/d/hard && ln -s file /srv/d/soft && "
    "mkfifo -m 600 /srv/d/pipe && truncate -s 40M /srv/d/hole && echo end >> /srv/d/hole && "
    "echo x:x:7:7::/:/bin/sh >> /etc/passwd && rm /etc/hostname && "
    "printf '\\377\\n' > \"$(printf '/srv/d/name\\377\\nline')\" && "
    "find /srv/d -exec touch -h -d @1000000000.123456789 {} +\n"
)
_LISTING = (
    "cd /srv/d && find . -printf '%P %y %m %U %G %T@ %s %n %l\\n' | sort; du -k hole | cut -f1; "
    "tail -c4 hole; stat -c %i file hard | uniq | wc -l; tail -1 /etc/passwd; ls /etc/hostname; "
    "stat -c '%n %a' /logs/* /tmp /root"
)


def test_layer_holds_what_the_steps_left_and_they_run_once(tmp_path: Path, layers: Path) -> None:
    owned = _EVERY_KIND if launch.can_map_ids() else _EVERY_KIND.replace("33:33", "0:0")
    recipe = Recipe(tmp_path, owned + "RUN date +%s%N > /srv/made; setsid sleep 912 &\n")

    async def look(force_build: bool = False) -> tuple[str, str]:
        async with recipe.started(force_build) as env:
            assert "sleep 912" not in await output(env, "ps ax -o cmd | grep '[s]leep 912'")
            return await output(env, "cat /srv/made"), await output(env, _LISTING)

    made, listing = asyncio.run(look())
    assert "hole f 644" in listing
    assert len(os.listdir(layers)) == 1
    assert max(path.stat().st_size for path in layers.iterdir()) < 1 << 20, "the hole was kept"
    assert asyncio.run(look()) == (made, listing)
    rebuilt = asyncio.run(look(force_build=True))
    assert rebuilt[0] != made
    assert rebuilt[1] == listing
    (recipe.context / "files" / "new").write_text("x")
    assert asyncio.run(look())[0] not in (made, rebuilt[0])


def test_torn_layer_is_made_again(tmp_path: Path, layers: Path) -> None:
    recipe = Recipe(tmp_path, "RUN echo made > /srv/made\n")

    async def look() -> str:
        async with recipe.started() as env:
            return await output(env, "cat /srv/made")

    assert asyncio.run(look()) == "made\n"
    layer = next(layers.iterdir())
    whole = layer.read_bytes()
    layer.write_bytes(whole[:-7])
    assert asyncio.run(look()) == "made\n"
    assert len(layer.read_bytes()) == len(whole)


def test_several_first_sandboxes_at_once_are_all_right(tmp_path: Path, layers: Path) -> None:
    recipe = Recipe(tmp_path, "RUN echo made > /srv/made\n")

    async def look() -> str:
        async with recipe.started() as env:
            return await output(env, "cat /srv/made")

    async def main() -> list[str]:
        return await asyncio.gather(*(look() for _ in range(6)))

    assert asyncio.run(main()) == ["made\n"] * 6
    assert len(os.listdir(layers)) == 1


@pytest.mark.usefixtures("layers")
@pytest.mark.skipif(
    not launch.can_map_ids(), reason="this user can give a sandbox one user id only"
)
def test_user_arguments_and_environment_hold_as_docker_says(tmp_path: Path) -> None:
    recipe = Recipe(
        tmp_path,
        "ARG WHO=app\nENV KEPT=yes\nRUN echo app:x:1234:1234::/home/app:/bin/bash >> /etc/passwd; "
        "mkdir /home/app; chown 1234:1234 /home/app\nUSER $WHO\nWORKDIR /home/app\n"
        "RUN echo $WHO $KEPT > who; id -u >> who; echo $0 >> who\n",
    )

    async def main() -> None:
        async with recipe.started() as env:
            assert await output(env, "cat who; id -u; pwd; echo $WHO,$KEPT,$HOME") == (
                "app yes\n1234\n/bin/sh\n1234\n/home/app\n,yes,/home/app\n"
            )
            assert (await env.exec("id -u", user="root")).stdout == "0\n"
            assert (await env.exec("ls /app", user="app")).return_code == 0

    asyncio.run(main())


@pytest.mark.usefixtures("layers")
def test_unknown_user_fails_by_name(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path, "USER nosuch\nRUN true\n")

    async def main() -> None:
        async with recipe.started():
            pass

    with pytest.raises(SandboxError, match=r"there is no user 'nosuch'|one user only"):
        asyncio.run(main())


@pytest.mark.usefixtures("layers")
def test_added_archive_is_unpacked_and_a_bomb_stays_within_the_disk(tmp_path: Path) -> None:
    def pack(path: Path, size: int) -> None:
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("top/zeros")
            member.size, member.mode = size, 0o640
            archive.addfile(member, io.BytesIO(bytes(size)))
            link = tarfile.TarInfo("top/link")
            link.type, link.linkname = tarfile.SYMTYPE, "zeros"
            archive.addfile(link)

    async def main(recipe: Recipe) -> str:
        async with recipe.started() as env:
            return await output(env, "cd /srv/x/top && stat -c '%n %a %s' -- * && readlink link")

    recipe = Recipe(tmp_path, "ADD data.tgz /srv/x\n")
    pack(recipe.context / "data.tgz", 5000)
    assert asyncio.run(main(recipe)) == "link 777 5\nzeros 640 5000\nzeros\n"
    pack(recipe.context / "data.tgz", 80 << 20)
    with pytest.raises(SandboxError, match=r"No space left|File too large"):
        asyncio.run(main(recipe))
