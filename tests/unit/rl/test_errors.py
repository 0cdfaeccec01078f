"""Errors cross process boundaries and end commands as promised."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from rl import errors
from rl.errors import (
    CampaignError,
    ConfigurationError,
    InfrastructureError,
    Interrupted,
    PolicyError,
    SandboxError,
    TaskPackageError,
    run_command,
)

CLASSES = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, CampaignError)
    ),
    key=lambda value: value.__name__,
)


def fail(kind: type[CampaignError]) -> None:
    raise kind("it broke", "here", "mend it")


def exit_code(main: object) -> int:
    with pytest.raises(SystemExit) as end:
        run_command(main, [])  # type: ignore[arg-type]
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("kind", CLASSES)
def test_pickling_keeps_class_and_parts(kind: type[CampaignError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("it broke", "here", "mend it")))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.remedy) == ("it broke", "here", "mend it")
    assert str(copy) == "here: it broke\n  -> mend it"


def test_errors_raised_in_another_process_arrive_typed() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for kind in (SandboxError, PolicyError, TaskPackageError):
            with pytest.raises(kind) as caught:
                pool.submit(fail, kind).result(timeout=60)
            assert type(caught.value) is kind
            assert caught.value.remedy == "mend it"


def test_message_leaves_out_what_is_empty() -> None:
    assert str(CampaignError("it broke")) == "it broke"
    assert str(CampaignError("it broke", "here")) == "here: it broke"
    assert str(CampaignError("it broke", remedy="mend it")) == "it broke\n  -> mend it"


def test_boundaries_are_told_apart() -> None:
    assert issubclass(TaskPackageError, ConfigurationError)
    assert issubclass(SandboxError, InfrastructureError)
    assert not issubclass(PolicyError, InfrastructureError)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not Interrupted])
def test_typed_error_ends_a_command_with_2_and_one_message(
    kind: type[CampaignError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda argv: fail(kind)) == 2
    assert capsys.readouterr().err == "error: here: it broke\n  -> mend it\n"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_interrupt_ends_a_command_with_130(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise kind("stopped")

    assert exit_code(main) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_result_of_main_is_the_exit_code() -> None:
    assert exit_code(lambda argv: 0) == 0
    assert exit_code(lambda argv: 2) == 2


def test_full_disk_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/full/file")

    assert exit_code(main) == 2
    message = capsys.readouterr().err
    assert "/full/file: no space left" in message
    assert "-> free some disk space" in message


@pytest.mark.parametrize(
    ("number", "filename", "wanted"),
    [
        (errno.EACCES, "/secret", "error: /secret: permission denied\n  -> check that"),
        (errno.EISDIR, b"/a/folder", "error: /a/folder: is a directory\n  -> check that"),
        (errno.ENOENT, "/\udcff", "error: /\\udcff: no such file or directory\n  -> check"),
    ],
)
def test_os_error_that_names_a_file_is_one_message(
    number: int, filename: str | bytes, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise OSError(number, os.strerror(number), filename)

    assert exit_code(main) == 2
    assert capsys.readouterr().err.startswith(wanted)


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "no file is named")])
def test_unexpected_errors_keep_their_traceback(error: Exception) -> None:
    def bug(argv: list[str]) -> int:
        raise error

    with pytest.raises(type(error)):
        run_command(bug, [])


def test_a_path_that_is_no_text_can_be_printed() -> None:
    code = "from rl.errors import run_command; run_command(lambda argv: print('/\\udcff') or 0, [])"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"/\\udcff\n")
