"""Archives: what goes in comes out, and no moment is without the original or an archive."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.errors import ConfigurationError, EvidenceError, InfrastructureError
from rl.evidence import archive as making
from rl.evidence.archive import Archived, archive
from rl.evidence.archive_manifest import Meter, parse_manifest, read_sidecar
from rl.evidence.archive_read import restore, verify_archive
from rl.evidence.traces import TraceWriter
from tests.unit.rl.evidence.synthetic import build, episode, task

NAMES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 100)
CONTENTS = st.one_of(
    st.binary(max_size=200), st.binary(min_size=1, max_size=1).map(lambda byte: byte * 70_000)
)
TREES = st.recursive(
    st.tuples(CONTENTS, st.sampled_from([0o644, 0o400, 0o755, 0o600])),
    lambda children: st.dictionaries(NAMES, children, max_size=4),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


class Killed(BaseException):
    """The process ends here: nothing that follows has an effect."""


def plant(root: Path, tree: Any) -> None:
    """Make a tree of files on disk."""
    root.mkdir(mode=0o750)
    for name, child in tree.items():
        if isinstance(child, dict):
            plant(root / name, child)
        else:
            content, mode = child
            (root / name).write_bytes(content)
            (root / name).chmod(mode)
    os.utime(root, ns=(10**18 + 7, 10**18 + 7))


def picture(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything that is to come back, by relative path."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        info = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
        mode = None if path.is_symlink() else info.st_mode
        found[str(path.relative_to(root))] = (content, mode, info.st_mtime_ns)
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with one small folder of a run."""
    run = tmp_path / "state" / "campaigns" / "run-1"
    (run / "traces").mkdir(parents=True)
    (run / "logs").mkdir(mode=0o500)
    (run / "frozen.json").write_text("{}")
    (run / "empty").write_bytes(b"")
    (run / "traces" / "big.bin").write_bytes(os.urandom(3 << 20))
    (run / "latest").symlink_to("traces/big.bin")
    (run / "traces" / "up").symlink_to("../frozen.json")
    return tmp_path / "state"


def run_of(state: Path) -> Path:
    return state / "campaigns" / "run-1"


def test_restores_what_was_archived(state: Path, tmp_path: Path) -> None:
    before = picture(run_of(state))
    made = archive(run_of(state), state)
    assert made.path.parent == state / "archives"
    assert picture(run_of(state)) == before
    assert restore(made.path, tmp_path / "other") == tmp_path / "other" / "campaigns" / "run-1"
    assert picture(tmp_path / "other" / "campaigns" / "run-1") == before
    elsewhere = restore(made.sidecar, state, tmp_path / "elsewhere")
    assert picture(elsewhere) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "other", "state"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES, level=st.sampled_from([1, 6, 19]))
def test_any_tree_comes_back(
    tree: Any, level: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("round")
    (root / "state").mkdir()
    plant(root / "state" / "a tree", tree)
    before = picture(root / "state" / "a tree")
    made = archive(root / "state" / "a tree", root / "state", level=level, remove=True)
    assert not (root / "state" / "a tree").exists()
    assert picture(restore(made.path, root / "state")) == before


def test_a_single_file_comes_back(state: Path, tmp_path: Path) -> None:
    file = run_of(state) / "frozen.json"
    made = archive(file, state, tmp_path / "out")
    assert made.manifest.run_id is None and made.manifest.path == "campaigns/run-1/frozen.json"
    assert restore(made.path, tmp_path / "s").read_bytes() == b"{}"


def test_manifest_says_what_and_where(state: Path) -> None:
    made = archive(run_of(state), state)
    manifest = read_sidecar(made.sidecar)
    assert (manifest.kind, manifest.run_id) == ("campaigns", "run-1")
    assert manifest.path == "campaigns/run-1" and manifest.tool.startswith("terminal-rl")
    assert manifest.archive is not None
    assert manifest.archive.sha256 == hashlib.sha256(made.path.read_bytes()).hexdigest()
    assert manifest.archive.bytes == made.path.stat().st_size
    entries = {entry.path: entry for entry in manifest.entries}
    content = (run_of(state) / "traces" / "big.bin").read_bytes()
    big = entries["traces/big.bin"]
    assert (big.sha256, big.bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert entries["latest"].target == "traces/big.bin"
    assert entries["logs"].mode == 0o500


def test_plain_tar_reads_it(state: Path, tmp_path: Path) -> None:
    made = archive(run_of(state), state)
    tar = ["tar", "--zstd", "-xf", str(made.path), "-C", str(tmp_path), "campaigns/run-1"]
    subprocess.run(tar, check=True, timeout=60)
    source, copy = picture(run_of(state)), picture(tmp_path / "campaigns" / "run-1")
    assert {k: v[:2] for k, v in copy.items()} == {k: v[:2] for k, v in source.items()}
    listed = subprocess.run(
        ["tar", "--zstd", "-xOf", str(made.path), "ARCHIVE.json"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    alone = parse_manifest(listed.stdout, "tar")
    assert alone == made.manifest.model_copy(update={"archive": None})


def test_an_archive_alone_verifies_and_restores(state: Path, tmp_path: Path) -> None:
    made = archive(run_of(state), state)
    copy = tmp_path / "copy.tar.zst"
    copy.write_bytes(made.path.read_bytes())
    assert verify_archive(copy).path == "campaigns/run-1"
    assert picture(restore(copy, tmp_path / "new")) == picture(run_of(state))


def test_two_archives_in_one_second_have_two_names(state: Path) -> None:
    made = {archive(run_of(state), state).path for _ in range(3)}
    assert len(made) == 3 and all(verify_archive(path) for path in made)


def test_what_exists_is_not_restored_over(state: Path, tmp_path: Path) -> None:
    made = archive(run_of(state), state)
    before = picture(state)
    for to in (None, tmp_path / "dangling"):
        (tmp_path / "dangling").unlink(missing_ok=True)
        (tmp_path / "dangling").symlink_to("nowhere")
        with pytest.raises(ConfigurationError, match="exists already"):
            restore(made.path, state, to)
    assert picture(state) == before


def test_a_running_run_is_refused_and_kept_from_starting(tmp_path: Path) -> None:
    directory = build(tmp_path / "state" / "campaigns", finish=False)
    with (
        TraceWriter(directory.failed_trace),
        pytest.raises(EvidenceError, match="is writing this trace"),
    ):
        archive(directory.root, tmp_path / "state")
    assert not (tmp_path / "state" / "archives").exists()

    class Resuming(Meter):
        def advance(self, amount: int) -> None:
            with pytest.raises(EvidenceError, match="another process"):
                TraceWriter(directory.trace("train"))

    made = archive(directory.root, tmp_path / "state", meter=Resuming())
    assert made.manifest.run_id == directory.run_id
    with TraceWriter(directory.trace("train")) as trace:
        trace.append(episode("x", "g", task("train", 0), 0))


def rewritten(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def gone(path: Path) -> None:
    path.unlink()


def joined(path: Path) -> None:
    (path.parent / "late").write_bytes(b"")


@pytest.mark.parametrize("change", [rewritten, grown, cut, gone, joined])
@pytest.mark.parametrize("phase", ["hash", "archive"])
def test_what_changes_meanwhile_is_refused(
    state: Path, change: Callable[[Path], None], phase: str
) -> None:
    class Changing(Meter):
        def begin(self, what: str, total: int) -> None:
            self.armed = what == phase

        def advance(self, amount: int) -> None:
            if self.armed:
                self.armed = False
                change(run_of(state) / "traces" / "big.bin")

    with pytest.raises(EvidenceError, match="changed while it was being archived"):
        archive(run_of(state), state, remove=True, meter=Changing())
    assert list((state / "archives").glob("*")) == [] if (state / "archives").exists() else True
    assert (run_of(state) / "frozen.json").exists()


@pytest.mark.parametrize(
    "target", ["../../../outside", "/etc/passwd", "../../other-run", "latest/../../../x"]
)
def test_a_link_that_leads_outside_is_refused(state: Path, target: str) -> None:
    (run_of(state) / "link").symlink_to(target)
    with pytest.raises(EvidenceError, match="a link out of what is archived"):
        archive(run_of(state), state)


def test_what_is_no_file_is_refused(state: Path) -> None:
    os.mkfifo(run_of(state) / "pipe")
    with pytest.raises(EvidenceError, match="no folder, file or link"):
        archive(run_of(state), state)


def test_a_name_that_is_no_text_is_refused(state: Path) -> None:
    odd = os.fsdecode(b"a\xff")
    link = run_of(state) / "link"
    link.symlink_to(odd)
    with pytest.raises(EvidenceError, match="no UTF-8"):
        archive(run_of(state), state)
    link.rename(run_of(state) / odd)
    with pytest.raises(EvidenceError, match="no UTF-8"):
        archive(run_of(state), state)


def test_only_what_lies_in_the_state_is_archived(state: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (state / "link").symlink_to("campaigns")
    archive(run_of(state), state)
    for target in (
        tmp_path / "foreign",
        state,
        state / "missing",
        state / "link",
        state / "archives",
    ):
        with pytest.raises(ConfigurationError):
            archive(target, state)


def test_remove_deletes_only_after_a_comparison(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = making.verify_archive

    def change_after(path: Path, **more: Any) -> Any:
        found = real(path, **more)
        (run_of(state) / "frozen.json").write_text("[]")
        return found

    monkeypatch.setattr(making, "verify_archive", change_after)
    with pytest.raises(EvidenceError, match="changed"):
        archive(run_of(state), state, remove=True)
    assert (run_of(state) / "frozen.json").read_text() == "[]"


def test_what_is_added_after_the_comparison_is_not_deleted(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = making.survey, 0

    def add_after(root: Path, meter: Meter) -> Any:
        nonlocal calls
        found, calls = real(root, meter), calls + 1
        if calls == 2:
            (run_of(state) / "late").write_text("x")
        return found

    monkeypatch.setattr(making, "survey", add_after)
    with pytest.raises(EvidenceError, match="changed"):
        archive(run_of(state), state, remove=True)
    assert (run_of(state) / "late").read_text() == "x"
    assert (run_of(state) / "frozen.json").exists()


def test_an_archive_that_reads_back_wrong_removes_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = making.verify_archive

    def damage(path: Path, **more: Any) -> Any:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return real(path, **more)

    monkeypatch.setattr(making, "verify_archive", damage)
    before = picture(run_of(state))
    with pytest.raises(EvidenceError):
        archive(run_of(state), state, remove=True)
    assert picture(run_of(state)) == before


CALLS = ("open", "fsync", "link", "unlink", "rename", "rmdir", "mkdir", "chmod", "utime", "fchmod")


class Faults:
    """Fails at the n-th call of the operating system that changes something."""

    def __init__(self, patch: pytest.MonkeyPatch, below: Path, at: int, error: BaseException):
        self.calls = 0
        self._at, self._error, self._below = at, error, str(below)
        for name in CALLS:
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return real(*args, **kwargs)
            self.calls += 1
            dead = isinstance(self._error, Killed)
            if self.calls == self._at or (dead and self.calls > self._at):
                raise self._error
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("error", [Killed(), OSError(28, "no space")], ids=["kill", "full"])
def test_at_every_step_the_original_or_an_archive_is_whole(
    error: BaseException, tmp_path: Path
) -> None:
    steps, run = 0, tmp_path
    for at in range(1, 200):
        state = tmp_path / f"s{at}"
        run = state / "campaigns" / "run-1"
        plant_small(run)
        before = picture(run)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, state, at, error)
            try:
                archive(run, state, remove=True)
            except (Killed, InfrastructureError, OSError):
                steps = at
        whole = run.exists() and picture(run) == before
        archives = sorted((state / "archives").glob("*.tar.zst"))
        for made in archives:
            copy = restore(made, tmp_path / f"r{at}", tmp_path / f"r{at}-{made.name}")
            assert picture(copy) == before  # a name means a whole archive
        assert whole or archives
        if isinstance(error, OSError) and not archives:
            assert whole and list((state / "archives").glob("[!.]*")) == []
        if faults.calls < at:
            break
    assert steps > 12 and not run.exists()


def plant_small(run: Path) -> None:
    (run / "traces").mkdir(parents=True)
    (run / "traces" / "a").write_bytes(b"a" * 1000)
    (run / "frozen.json").write_bytes(b"{}")


@pytest.mark.parametrize("error", [Killed(), OSError(28, "no space")], ids=["kill", "full"])
def test_at_every_step_restoring_gives_all_or_nothing(error: BaseException, tmp_path: Path) -> None:
    state = tmp_path / "state"
    plant_small(run_of(state))
    made, before = archive(run_of(state), state), picture(run_of(state))
    steps, target = 0, tmp_path
    for at in range(1, 200):
        target = tmp_path / f"t{at}" / "run"
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, tmp_path, at, error)
            try:
                restore(made.path, state, target)
            except (Killed, InfrastructureError, OSError):
                steps = at
        assert not target.exists() or picture(target) == before
        if faults.calls < at:
            break
    assert steps > 8 and picture(target) == before


def test_a_full_disk_leaves_no_archive(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InfrastructureError, match="no space left") as told:
        archive(run_of(state), state)
    assert "nothing was changed" in str(told.value)
    assert list((state / "archives").iterdir()) == []


def test_manifest_of_another_version_is_refused(state: Path) -> None:
    made: Archived = archive(run_of(state), state)
    raw = json.loads(made.sidecar.read_text()) | {"schema_version": 2}
    made.sidecar.write_text(json.dumps(raw))
    with pytest.raises(EvidenceError, match="schema version is unknown"):
        verify_archive(made.path)
