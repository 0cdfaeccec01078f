"""Loading and pinning of task packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harbor.publisher.packager import Packager

from rl.errors import TaskPackageError
from sandboxes.tasks import load_folder, load_package, survey_folder, verify_digest
from tests.support.packages import write_package


@pytest.fixture
def package_dir(tmp_path: Path) -> Path:
    return write_package(tmp_path / "bank")


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_package_is_read_whole(package_dir: Path) -> None:
    package = load_package(package_dir)
    assert package.name == package_dir.name
    assert package.family == "rm"
    assert package.instruction.startswith("Delete the file ")
    assert (package.cpus, package.memory_mb, package.network) == (0.125, 128, "no-network")
    assert package.verifier_timeout_s == 60.0
    assert package.agent_timeout_s == 600.0
    assert package.solution_script is not None
    assert package.dockerfile is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory = 0.125\n", ["environment.memory", "memory_mb", "dropped"]),
        ("memroy_mb = 5\n", ["environment.memroy_mb", "did you mean 'memory_mb'"]),
        ("[agent.extra]\nx = 1\n", ["agent.extra"]),
        ("[verifier.environment]\ncpu = 1\n", ["verifier.environment.cpu", "'cpus'"]),
        ("[[steps]]\nname = 'a'\nagnet = {}\n", ["steps[0].agnet", "'agent'"]),
        ("[solutions]\n", ["solutions", "'solution'"]),
    ],
)
def test_key_that_would_be_ignored_is_refused_by_name(
    package_dir: Path, text: str, words: list[str]
) -> None:
    _append(package_dir / "task.toml", text)
    with pytest.raises(TaskPackageError) as caught:
        load_package(package_dir)
    for word in ("task.toml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("environment.env.A = 1", None),
        ("verifer.timeout_sec = 3", "line 1: unknown key 'verifer'"),
        ("[verifier]\n'timeout_sec' = 3\n\n# x\n\"tiemout_sec\"=4", "line 5: unknown key"),
        ("[environment]\nmcp_servers = [{name='a'},\n {nam = 'b'}]", "line 3: unknown key"),
        ("[[steps]]\nname='a'\n[[steps]]\nname='b'\n[steps.verifier]\nx=1", "line 6: unknown"),
        ('doc = """\n[agent]\nx = 1\n"""\n[agent]\nx = 1', "line 6: unknown key 'agent.x'"),
        ("[verifier.environment]\nmemory = 2", "line 2: 'verifier.environment.memory' = 2"),
        ("[environment]\ncpus = 'two'", "line 2: 'environment.cpus"),
        ("[agent]\ntimeout_sec = 0", "line 2: 'agent.timeout_sec' = 0"),
        ("[environment]\nos = 'windows'", "line 2: environment.os"),
        ("schema_version = '1.4'\nversion = '1.0'", "line 2: 'version' is dropped"),
        (
            "[environment]\nnetwork_mode = 'public'\nallow_internet = false",
            "line 3: 'environment.allow_internet' is dropped",
        ),
    ],
)
def test_finding_names_its_line(package_dir: Path, text: str, line: str | None) -> None:
    (package_dir / "task.toml").write_text(f"{text}\n")
    with pytest.raises(TaskPackageError) as caught:
        load_package(package_dir)
    if line is not None:
        assert line in caught.value.what


@pytest.mark.parametrize(
    "text",
    [
        "author = 'x'\n",
        "[task]\nname = 'a/b'\nlicense = 'MIT'\n",
        "[[task.authors]]\nname = 'x'\norcid = 1\n[task]\nname = 'a/b'\n",
        "[harness]\nx = 1\n",
        "[agent]\nuser = 'agent'\n",
        "[environment.healthcheck]\ncommand = 'true'\n",
        "artifacts = ['/app/out']\n",
    ],
)
def test_key_that_changes_nothing_here_is_a_warning(package_dir: Path, text: str) -> None:
    (package_dir / "task.toml").write_text(text)
    (warning,) = load_package(package_dir).warnings
    assert re.match(r"line \d+: ", warning)


def test_free_tables_take_any_key(package_dir: Path) -> None:
    (package_dir / "task.toml").write_text(
        "[metadata]\nanything = {goes = [1]}\n[environment.env]\nA = 'b'\n[verifier.env]\nC = 'd'\n"
    )
    assert load_package(package_dir).warnings == ()


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("verifier", "timeout_sec"),
        ("agent", "timeout_sec"),
        ("environment", "cpus"),
        ("environment", "memory_mb"),
        ("environment", "storage_mb"),
    ],
)
def test_limit_that_leaves_nothing_is_refused_by_name(
    package_dir: Path, table: str, key: str, value: str
) -> None:
    path = package_dir / "task.toml"
    data = tomllib.loads(path.read_text())
    old = data.get(table, {}).get(key)
    text = path.read_text()
    if old is not None:
        at = text.index(f"[{table}]")
        text = text[:at] + re.sub(rf"(?m)^{key} = .*\n", "", text[at:], count=1)
    path.write_text(text.replace(f"[{table}]\n", f"[{table}]\n{key} = {value}\n"))
    with pytest.raises(TaskPackageError) as caught:
        load_package(package_dir)
    assert f"'{table}.{key}" in caught.value.what
    assert caught.value.where == str(path) and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "an integer is too long"),
        ("[metadata]\nfamily = 0x" + "f" * 5000, "beyond 64 bits"),
    ],
)
def test_toml_beyond_reading_is_refused(package_dir: Path, text: str, wanted: str) -> None:
    path = package_dir / "task.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(TaskPackageError, match=wanted) as caught:
        load_package(package_dir)
    assert caught.value.where == str(path) and caught.value.remedy


def test_size_beyond_any_number_is_refused(package_dir: Path) -> None:
    path = package_dir / "task.toml"
    path.write_text(path.read_text().replace("memory_mb = 128", 'memory = "1e999G"'))
    with pytest.raises(TaskPackageError) as caught:
        load_package(package_dir)
    assert caught.value.remedy


def test_old_size_as_text_is_accepted(package_dir: Path) -> None:
    path = package_dir / "task.toml"
    path.write_text(path.read_text().replace("memory_mb = 128", 'memory = "2G"'))
    assert load_package(package_dir).memory_mb == 2048


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_file_is_named(package_dir: Path, missing: str) -> None:
    (package_dir / missing).unlink()
    with pytest.raises(TaskPackageError, match=missing):
        load_package(package_dir)


def test_broken_toml_is_refused(package_dir: Path) -> None:
    _append(package_dir / "task.toml", "= broken")
    with pytest.raises(TaskPackageError, match="not valid TOML"):
        load_package(package_dir)


def test_wrong_type_names_the_key(package_dir: Path) -> None:
    path = package_dir / "task.toml"
    path.write_text(path.read_text().replace("cpus = 0.125", 'cpus = "many"'))
    with pytest.raises(TaskPackageError, match=r"environment\.cpus"):
        load_package(package_dir)


def test_steps_are_refused(package_dir: Path) -> None:
    _append(package_dir / "task.toml", "[[steps]]\nname = 'a'\n")
    with pytest.raises(TaskPackageError, match="several steps"):
        load_package(package_dir)


def test_link_that_leaves_the_package_is_refused(package_dir: Path) -> None:
    (package_dir / "environment" / "files" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskPackageError, match="symlink leaves") as caught:
        load_package(package_dir)
    assert caught.value.where.endswith("files/secret") and caught.value.remedy


@pytest.mark.parametrize("content", [b"\xff\n", None])
def test_gitignore_that_cannot_be_read_is_refused(package_dir: Path, content: bytes | None) -> None:
    path = package_dir / ".gitignore"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TaskPackageError, match="can't be pinned") as caught:
        load_package(package_dir)
    assert caught.value.where == str(package_dir) and ".gitignore" in caught.value.remedy


def test_link_in_a_circle_is_refused(package_dir: Path) -> None:
    (package_dir / "tests" / "loop").symlink_to("loop")
    with pytest.raises(TaskPackageError, match="a symlink loop") as caught:
        load_package(package_dir)
    assert caught.value.where.endswith("tests/loop") and caught.value.remedy


def test_package_that_is_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TaskPackageError, match=r"has no task\.toml"):
        load_package(tmp_path / "loop")


@pytest.mark.parametrize("place", [b"tests/a\xff.sh", b"a\xff"])
def test_name_that_is_no_text_is_refused(package_dir: Path, place: bytes) -> None:
    file = os.path.join(os.fsencode(package_dir), place)
    with open(file, "w"):
        pass
    with pytest.raises(TaskPackageError, match="name is not UTF-8") as caught:
        load_package(package_dir)
    assert caught.value.where.endswith(place.decode(errors="backslashreplace"))
    str(caught.value).encode()


def test_package_whose_name_is_no_text_is_refused(package_dir: Path) -> None:
    renamed = package_dir.rename(package_dir.with_name("p\udcff"))
    with pytest.raises(TaskPackageError, match="name is not UTF-8") as caught:
        load_folder(renamed.parent)
    assert caught.value.where.endswith("p\\xff")


def test_one_changed_byte_breaks_the_pin(package_dir: Path) -> None:
    package = load_package(package_dir)
    verify_digest(package, package.digest)
    _append(package_dir / "tests" / "test.sh", "#")
    with pytest.raises(TaskPackageError, match=r"content has changed.*tests/test\.sh has changed"):
        verify_digest(package, package.digest)


def test_every_wrong_package_of_a_folder_is_named(package_dir: Path) -> None:
    for name in ("a", "b"):
        (write_package(package_dir.parent, name) / "instruction.md").write_text("")
    packages, refused = survey_folder(package_dir.parent)
    assert [package.name for package in packages] == [package_dir.name]
    assert len(refused) == 2
    with pytest.raises(TaskPackageError) as caught:
        load_folder(package_dir.parent)
    assert all(f"{name}/instruction.md: is empty" in caught.value.what for name in ("a", "b"))


ODDITIES = {
    "plain": lambda package: None,
    "ignored by default": lambda package: (package / "tests" / "x.pyc").write_text("x"),
    "gitignore": lambda package: (package / ".gitignore").write_text("*.sh\n!test.sh\n"),
    "harborignore": lambda package: (package / "tests" / ".harborignore").write_text("data\n"),
    "link to a file": lambda package: (package / "tests" / "l").symlink_to("test.sh"),
    "link to a folder": lambda package: (package / "tests" / "l").symlink_to("../solution"),
    "unpublished": lambda package: (package / "notes.md").write_text("x"),
    "readme": lambda package: (package / "README.md").write_text("x"),
    "steps": lambda package: write_package(package / "steps", "one"),
    "names": lambda package: [
        (package / "tests" / name).write_text("x") for name in ("é", "a b", "B", "b", "a.b", "a-b")
    ],
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_digest_is_harbors(package_dir: Path, oddity: str) -> None:
    (package_dir / "tests" / "data").write_text("x")
    ODDITIES[oddity](package_dir)
    assert load_package(package_dir).digest == Packager.compute_content_hash(package_dir)[0]


def test_pipe_in_a_package_is_refused_unopened(package_dir: Path) -> None:
    os.mkfifo(package_dir / "environment" / "pipe")
    with pytest.raises(TaskPackageError, match="neither a file nor a folder") as caught:
        load_package(package_dir)
    assert caught.value.where.endswith("environment/pipe")


def test_folder_without_packages_is_an_error(tmp_path: Path) -> None:
    for path, wanted in ((tmp_path, "holds no task package"), (tmp_path / "a", "no such folder")):
        with pytest.raises(TaskPackageError, match=wanted) as caught:
            load_folder(path)
        assert caught.value.where == str(path) and "task.toml" in caught.value.remedy


def test_import_is_light() -> None:
    code = (
        "import sys, sandboxes.tasks;"
        "heavy = {'litellm', 'torch', 'ray', 'vllm'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
