"""A commit's files arrive as they were committed, or are refused by name."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from rl.errors import ConfigurationError, DeadlineExceeded, InfrastructureError
from sandboxes import git_source
from sandboxes.git_source import fetch_files
from sandboxes.manifest import pin_folder, prepare_cohort
from sandboxes.source import GitSource, TaskSource
from tests.support.packages import write_package

IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(repository: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", *command],
        cwd=repository,
        env={**os.environ, **IDENTITY},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def commit(repository: Path) -> str:
    git(repository, "add", "-A", "-f")
    git(repository, "commit", "-q", "-m", "x")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    git(path, "init", "-q")
    write_package(path / "tasks", "copy-a")
    write_package(path / "tasks", "move-b")
    (path / "README").write_text("not a package")
    return path


def fetched(repository: Path, pin: str, root: Path, folder: str = ".") -> Path:
    target = root / "files"
    fetch_files(f"file://{repository}", pin, folder, root / "git", target)
    return target


def test_an_older_commit_is_fetched_byte_for_byte(repository: Path, tmp_path: Path) -> None:
    commit(repository)
    package = repository / "tasks" / "copy-a"
    (package / "environment" / "files" / "crlf").write_bytes(b"a\r\nb\x00\xff")
    (package / "environment" / "files" / "$Id$").write_text("$Id$ name\twith\nnewline")
    (package / "environment" / "files" / "é\nx").write_text("")
    (package / "environment" / "link").symlink_to("files/crlf")
    (repository / ".gitattributes").write_text("* text=auto ident eol=lf\ncrlf -text\n")
    pin = commit(repository)
    expected = {path.name: digest for path, digest in pinned(repository / "tasks")}
    write_package(repository / "tasks", "later-c")
    commit(repository)
    target = fetched(repository, pin, tmp_path, "tasks")
    assert {path.name: digest for path, digest in pinned(target)} == expected
    assert os.readlink(target / "copy-a" / "environment" / "link") == "files/crlf"
    (cached,) = (tmp_path / "git").iterdir()
    assert git(cached, "rev-list", pin) == pin  # without its history


def pinned(folder: Path) -> list[tuple[Path, str]]:
    source = pin_folder(folder, "c").source
    return [(folder / name, digest) for name, digest in source.cohorts["c"].items()]


def test_what_is_cached_needs_no_repository(repository: Path, tmp_path: Path) -> None:
    pin = commit(repository)
    target = fetched(repository, pin, tmp_path)
    repository.rename(tmp_path / "gone")
    assert fetched(repository, pin, tmp_path) == target
    (target).rename(tmp_path / "other")
    assert (fetched(repository, pin, tmp_path) / "README").read_text() == "not a package"


def test_cache_that_has_lost_an_object_is_refused(repository: Path, tmp_path: Path) -> None:
    pin = commit(repository)
    target = fetched(repository, pin, tmp_path)
    target.rename(tmp_path / "other")
    (cached,) = (tmp_path / "git").iterdir()
    blob = git(repository, "rev-parse", "HEAD:README")
    (cached / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(InfrastructureError, match="does not give out README") as caught:
        fetched(repository, pin, tmp_path)
    assert f"rm -rf {cached}" in caught.value.remedy and not target.exists()


def test_hooks_and_filters_do_not_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("reference-transaction", "post-checkout", "post-merge"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (hooks / name).chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[core]\n\thooksPath = {hooks}\n[filter "x"]\n\tsmudge = touch {ran}\n'
        f"[init]\n\ttemplateDir = {tmp_path}\n"
    )
    (repository / ".gitattributes").write_text("* filter=x\n")
    pin = commit(repository)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    fetched(repository, pin, tmp_path)
    assert not ran.exists()


def test_submodule_is_refused_by_name(repository: Path, tmp_path: Path) -> None:
    pin = commit(repository)
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{pin},tasks/copy-a/sub")
    git(repository, "commit", "-q", "-m", "sub")
    with pytest.raises(ConfigurationError, match=r"submodules.* tasks/copy-a/sub"):
        fetched(repository, git(repository, "rev-parse", "HEAD"), tmp_path)
    assert not (tmp_path / "files").exists()


def test_lfs_pointer_is_refused_by_name(repository: Path, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (repository / "tasks" / "copy-a" / "model.bin").write_text(pointer)
    with pytest.raises(ConfigurationError, match=r"LFS pointers.* tasks/copy-a/model\.bin"):
        fetched(repository, commit(repository), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".files")] == []


@pytest.mark.parametrize("kind", ["unknown", "tree", "folder"])
def test_pin_that_names_nothing_is_refused(repository: Path, tmp_path: Path, kind: str) -> None:
    pin = commit(repository)
    with pytest.raises(ConfigurationError) as caught:
        if kind == "folder":
            fetched(repository, pin, tmp_path, "no/such")
        else:
            tree = git(repository, "rev-parse", "HEAD^{tree}")
            fetched(repository, "d" * 40 if kind == "unknown" else tree, tmp_path)
    assert str(repository) in caught.value.where and caught.value.remedy


def test_repository_out_of_reach_is_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="git fetch failed"):
        fetched(tmp_path / "nothing", "a" * 40, tmp_path)
    assert list((tmp_path / "git").iterdir()) == []


def test_repository_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_source, "FETCH_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.git"
        with pytest.raises(DeadlineExceeded, match="git fetch took over"):
            fetch_files(url, "a" * 40, ".", tmp_path / "git", tmp_path / "files")
        peer, _ = silent.accept()
        peer.settimeout(30.0)
        with peer:  # the whole group of processes is gone, and with it the connection
            while peer.recv(4096):
                pass
    assert list((tmp_path / "git").iterdir()) == []


def test_cohort_of_a_repository_is_prepared_and_guarded(repository: Path, tmp_path: Path) -> None:
    pin = commit(repository)
    digests = {path.name: digest for path, digest in pinned(repository / "tasks")}
    source = TaskSource(
        schema_version=1,
        source=GitSource(url=f"file://{repository}", commit=pin, folder="tasks"),
        cohorts={"c": digests},
    )
    cohort = prepare_cohort(source, "c", tmp_path / "state")
    assert [package.name for package in cohort.packages] == ["copy-a", "move-b"]
    (cohort.folder / "copy-a" / "tests" / "test.sh").write_text("#")
    with pytest.raises(ConfigurationError, match=r"tests/test\.sh has changed") as caught:
        prepare_cohort(source, "c", tmp_path / "state")
    assert f"rm -r {cohort.folder}" in caught.value.remedy
