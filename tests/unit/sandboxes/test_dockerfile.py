"""The Dockerfile subset."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from rl.errors import TaskPackageError
from sandboxes.archives import archive_entries, is_archive
from sandboxes.dockerfile import Copy, MakeDir, Recipe, Run, Unpack, parse_dockerfile


def _parse(folder: Path, text: str) -> Recipe:
    path = folder / "Dockerfile"
    path.write_text(text)
    return parse_dockerfile(path)


def test_supported_instructions_become_steps(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    recipe = _parse(
        tmp_path,
        "# a comment\nFROM debian:bookworm-slim\nENV A=1 B='two words'\nENV OLD style value\n"
        'WORKDIR /srv\nWORKDIR app\nCOPY a.txt ./x-$A\nCOPY *.txt docs/\nRUN echo "$HOME" && \\\n'
        '  # inside\n  true\nRUN ["echo", "a b"]\n',
    )
    assert recipe.image == "debian:bookworm-slim"
    assert recipe.env == {"A": "1", "B": "two words", "OLD": "style value"}
    assert recipe.workdir == "/srv/app"
    env = tuple(recipe.env.items())
    assert recipe.steps == (
        MakeDir("/srv"),
        MakeDir("/srv/app"),
        Copy((tmp_path / "a.txt",), "/srv/app/x-1", into=False),
        Copy((tmp_path / "a.txt", tmp_path / "b.txt"), "/srv/app/docs", into=True),
        Run('echo "$HOME" &&   true', "/srv/app", env),
        Run("echo 'a b'", "/srv/app", env),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("EXPOSE 80", "EXPOSE cannot be followed"),
        ("ADD http://example.com/x /x", "needs a network"),
        ("ADD git@example.com:x/y.git /x", "needs a network"),
        ("ADD --checksum=sha256:00 a /x", "--checksum"),
        ("ADD ../secret /x", "ADD source '../secret' leaves"),
        ("USER", "USER of nothing"),
        ("VOLUME /data", "VOLUME cannot be followed"),
        ("CMD true", "CMD cannot be followed"),
        ("COPY <<EOF /x", "does not exist"),
        ("RUN cat <<EOF", "here-document"),
        ("ENV A=${B%x}", "\\$\\{B%x\\}' cannot be followed"),
        ("COPY --from=build /x /x", "--from=build"),
        ("RUN --mount=type=cache,target=/x true", "--mount=type=cache"),
        ("COPY ../secret /x", "leaves the folder"),
        ("COPY absent /x", "does not exist"),
        ("COPY link /x", "leaves the folder"),
        ("WORKDIR $NOWHERE", "variable \\$NOWHERE"),
        ("FROM other", "several FROM"),
        ("FROM --platform=x other", "several FROM"),
        ("ENV A='x", "no closing '"),
        ("ENV A", "needs KEY=VALUE"),
        ("COPY x", "source and a target"),
    ],
)
def test_anything_else_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(TaskPackageError, match=words) as caught:
        _parse(tmp_path, f"FROM debian\n\n{line}\n")
    assert "Dockerfile:3" in str(caught.value)


def test_file_without_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskPackageError, match="before FROM"):
        _parse(tmp_path, "RUN true\n")
    with pytest.raises(TaskPackageError, match="has no FROM"):
        _parse(tmp_path, "# nothing\n")


def test_arguments_and_variables_have_docker_s_meaning(tmp_path: Path) -> None:
    recipe = _parse(
        tmp_path,
        "ARG TAG=12\nFROM debian:$TAG AS base\nARG SIZE=3 NONE\n"
        "ENV A=\\$x B='$SIZE' C=\"${SIZE:-q}-${ABSENT:-d e}\" D=${SIZE:+set}${NONE:+no}.\n"
        "ENV OLD  two $SIZE\nUSER app:$SIZE\nRUN true\nENV SIZE=4\nUSER $SIZE\nRUN true\n",
    )
    assert recipe.image == "debian:12"
    assert recipe.env == {
        "A": "$x",
        "B": "$SIZE",
        "C": "3-d e",
        "D": "set.",
        "OLD": "two 3",
        "SIZE": "4",
    }
    first, second = (step for step in recipe.steps if isinstance(step, Run))
    assert (dict(first.env)["SIZE"], first.user) == ("3", "app:3")
    assert (dict(second.env)["SIZE"], second.user, recipe.user) == ("4", "4", "4")


def test_argument_before_from_holds_for_from_only(tmp_path: Path) -> None:
    with pytest.raises(TaskPackageError, match="TAG has no value"):
        _parse(tmp_path, "ARG TAG=12\nFROM debian:$TAG\nENV X=$TAG\n")


def test_copy_to_a_directory_that_is_there_goes_into_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    recipe = _parse(tmp_path, "FROM x\nWORKDIR /srv/w\nCOPY a.txt /srv\nCOPY a.txt /srv/w/b\n")
    copies = [step for step in recipe.steps if isinstance(step, Copy)]
    assert [(copy.target, copy.into) for copy in copies] == [("/srv", True), ("/srv/w/b", False)]


def test_ignore_file_is_refused_where_it_would_matter(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*\n")
    (tmp_path / "a.txt").write_text("a")
    assert _parse(tmp_path, "FROM x\nRUN true\n").steps
    with pytest.raises(TaskPackageError, match=r"\.dockerignore cannot be followed"):
        _parse(tmp_path, "FROM x\nCOPY a.txt /\n")


# ADD of archives.


def _archive(path: Path, *members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, 0o750
    member.size = 3 if kind == tarfile.REGTYPE else 0
    return member


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_added_archive_is_told_by_its_content_and_unpacked(tmp_path: Path, mode: str) -> None:
    _archive(tmp_path / "named.txt", _member("/d/f"), mode=mode)
    (tmp_path / "plain.tar").write_text("not an archive")
    recipe = _parse(tmp_path, "FROM x\nADD named.txt plain.tar /srv/\n")
    assert recipe.steps == (
        Unpack(tmp_path / "named.txt", "/srv"),
        Copy((tmp_path / "plain.tar",), "/srv", into=True),
    )
    assert list(archive_entries(tmp_path / "named.txt", "/srv")) == [
        ("/srv", "d", 0, b""),
        ("/srv/d/f", "f", 0o750, b"xxx"),
    ]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([_member("../x")], "leaves the target"),
        ([_member("a/../../x")], "leaves the target"),
        ([_member("a", tarfile.SYMTYPE, "/etc"), _member("a/passwd")], "below a link"),
        ([_member("sda", tarfile.BLKTYPE)], "device or a pipe"),
        ([_member("pipe", tarfile.FIFOTYPE)], "device or a pipe"),
        ([_member("a", tarfile.LNKTYPE, "absent")], "names no file"),
    ],
)
def test_dangerous_member_is_refused_by_name(
    tmp_path: Path, members: list[tarfile.TarInfo], words: str
) -> None:
    path = _archive(tmp_path / "x.tar", *members)
    with pytest.raises(TaskPackageError, match=words) as caught:
        list(archive_entries(path, "/srv"))
    assert "x.tar" in str(caught.value)


def test_torn_archive_is_refused(tmp_path: Path) -> None:
    path = _archive(tmp_path / "x.tgz", *(_member(f"f{n}") for n in range(400)))
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(TaskPackageError, match="cannot be unpacked"):
        list(archive_entries(path, "/srv"))


def test_archive_by_zstandard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(TaskPackageError, match="zstandard"):
        is_archive(tmp_path / "x")
