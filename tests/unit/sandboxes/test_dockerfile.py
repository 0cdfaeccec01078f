"""The Dockerfile subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.errors import TaskPackageError
from sandboxes.dockerfile import Copy, MakeDir, Recipe, Run, parse_dockerfile


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
        Run('echo "$HOME" && true', "/srv/app", env),
        Run("echo 'a b'", "/srv/app", env),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("EXPOSE 80", "EXPOSE cannot be followed"),
        ("ADD http://example.com/x /x", "ADD cannot be followed"),
        ("USER app", "USER cannot be followed"),
        ("COPY --from=build /x /x", "--from=build"),
        ("RUN --mount=type=cache,target=/x true", "--mount=type=cache"),
        ("COPY ../secret /x", "leaves the folder"),
        ("COPY absent /x", "does not exist"),
        ("COPY link /x", "leaves the folder"),
        ("WORKDIR $NOWHERE", "variable \\$NOWHERE"),
        ("FROM other", "several FROM"),
        ("ENV 'x", "cannot be parsed"),
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
